"""What each choice loses: measured once, and kept in a file for other sizes.

{"of": what it was measured of, "tokens": n,
 "losses": {"blk.0.attn_q.weight": {"Q4_K": nats a token, ...}, ...}}
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from qtool.errors import FormatError, SourceError
from qtool.fitting.ways import Losses
from qtool.formats import safetensors_file as st
from qtool.runs.staging import staged_file


@dataclass(frozen=True)
class Costs:
    """Losses, and over how many tokens they were measured."""

    losses: Losses
    tokens: int


def write(path: Path, costs: Costs, known: Mapping[str, Any]) -> None:
    """The file; it must not be there."""
    found = {"of": known, "tokens": costs.tokens, "losses": costs.losses}
    text = json.dumps(found, indent=1) + "\n"
    with staged_file(path, len(text)) as (staged, _):
        staged.write_text(text, encoding="utf-8")


def read(path: Path, known: Mapping[str, Any]) -> Costs:
    """FormatError where it is no such file, SourceError where it is not of what `known` says."""
    found = st.read_json(path)
    try:
        before = dict(found["of"])
        losses = {
            str(unit): {str(choice): _loss(loss) for choice, loss in every.items()}
            for unit, every in found["losses"].items()
        }
        costs = Costs(losses, int(found["tokens"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{path}: not a file of costs as `qtool fit --costs` writes it ({error}); name another "
            "file, or remove this one to have them measured again"
        ) from None
    now = json.loads(json.dumps(dict(known)))
    others = [name for name, value in now.items() if before.get(name) != value]
    if others:
        raise SourceError(
            f"{path}: costs that were measured with another {' and another '.join(others)}; name "
            "another file for --costs, or remove this one to have them measured again"
        )
    return costs


def _loss(found: Any) -> float:
    if type(found) not in (int, float) or not isfinite(found) or found < 0:
        raise ValueError(f"a loss of {found!r}"[:60])
    return float(found)
