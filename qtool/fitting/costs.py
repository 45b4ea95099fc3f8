"""What each tensor costs as each type: measured once, and kept in a file for other sizes.

{"of": what it was measured of, "tokens": n,
 "tensors": {"blk.0.attn_q.weight": {"Q4_K": [bytes, loss], ...}, ...}}
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from qtool.errors import FormatError, SourceError
from qtool.fitting.allocate import Candidate
from qtool.fitting.request import FitRequest
from qtool.formats import safetensors_file as st
from qtool.runs.identity import file_facts
from qtool.runs.staging import staged_file


@dataclass(frozen=True)
class Costs:
    """By tensor, then by type."""

    tensors: Mapping[str, Mapping[str, Candidate]]
    tokens: int


def facts(request: FitRequest, files: Sequence[Path], digest: str) -> dict[str, Any]:
    """What costs hang on, by the names that a person knows it by. files: of the model. digest: of
    the tokens."""
    return {
        "model": [file_facts(file) for file in files],
        "calibration text": digest,
        "importance": request.recipe.importance,
        "types": [kind.name for kind in request.types],
    }


def write(path: Path, costs: Costs, known: Mapping[str, Any]) -> None:
    """The file; it must not be there."""
    tensors = {
        name: {kind: [one.nbytes, one.loss] for kind, one in every.items()}
        for name, every in costs.tensors.items()
    }
    text = json.dumps({"of": known, "tokens": costs.tokens, "tensors": tensors}, indent=1)
    with staged_file(path, len(text)) as (staged, _):
        staged.write_text(text + "\n", encoding="utf-8")


def read(path: Path, known: Mapping[str, Any]) -> Costs:
    """FormatError where it is no such file, SourceError where it is not of what `known` says."""
    found = st.read_json(path)
    try:
        before = dict(found["of"])
        costs = Costs(
            {
                str(name): {str(kind): _candidate(kind, *pair) for kind, pair in every.items()}
                for name, every in found["tensors"].items()
            },
            int(found["tokens"]),
        )
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


def _candidate(kind: str, nbytes: int, loss: float) -> Candidate:
    if type(nbytes) is not int or nbytes < 0 or not isfinite(loss) or loss < 0:
        raise ValueError(f"{kind}: {nbytes} bytes, loss {loss}")
    return Candidate(kind, nbytes, float(loss))
