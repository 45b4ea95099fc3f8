"""What each choice loses: measured once, and kept in a file for other sizes.

    {"of": what it was measured of, "tokens": n, "unrelated": nats,
     "losses": {"blk.0.attn_q.weight": {"Q4_K": nats a token, "Q2_K": null, ...}, ...}}

null: the type cannot hold the tensor. A unit that is {} could not be measured.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from qtool.errors import FormatError, SourceError
from qtool.fitting.ways import Losses
from qtool.formats import safetensors_file as st
from qtool.recipe.file import Precision
from qtool.workspaces.differences import differences
from qtool.workspaces.program import VERSION
from qtool.workspaces.staging import staged_file

_SHOWN = 3  # differences in a sentence


@dataclass(frozen=True)
class Costs:
    """Losses, and over how many tokens they were measured."""

    losses: Losses
    tokens: int
    unrelated: float | None = None  # how far apart predictions at unrelated places are, in nats

    def together(self, losses: Iterable[float]) -> float:
        """What several choices lose, each by itself so much.

        Predictions that have nothing to do with the original's are no further from it than those
        of unrelated places are from each other: more is not said.
        """
        total = sum(losses)
        return total if self.unrelated is None else min(total, self.unrelated)


def write(path: Path, costs: Costs, known: Mapping[str, Any]) -> None:
    """The file; it must not be there."""
    found = {"of": known, "tokens": costs.tokens, "unrelated": costs.unrelated}
    found["losses"] = costs.losses
    text = json.dumps(found, indent=1, allow_nan=False) + "\n"
    with staged_file(path, len(text)) as (staged, _):
        staged.write_text(text, encoding="utf-8")


def precision_of(path: Path) -> Precision:
    """In what costs were measured, whatever else is wrong with the file: read() tells."""
    with suppress(FormatError, LookupError, TypeError):
        if st.read_json(path)["of"]["calibration text"]["precision"] == "bfloat16":
            return "bfloat16"
    return "float32"


def read(path: Path, known: Mapping[str, Any], sizes: Mapping[str, Mapping[str, int]]) -> Costs:
    """FormatError where it is no such file; SourceError where it is not of what `known` says, or
    not of all that is to be chosen, `sizes`."""
    try:
        found = st.read_json(path)
        before = dict(found["of"])
        losses = {
            str(unit): {str(choice): _loss(loss) for choice, loss in every.items()}
            for unit, every in found["losses"].items()
        }
        costs = Costs(losses, _tokens(found["tokens"]), _loss(found.get("unrelated")))
    except (FormatError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        why = "no key " * isinstance(error, KeyError) + str(error).removeprefix(f"{path}: ")
        raise FormatError(
            f"{path}: not a file of costs as `qtool fit --costs` writes it ({why}); name another "
            "file, or remove this one to have them measured again"
        ) from None
    now = json.loads(json.dumps(dict(known)))
    version, is_now = before.get(VERSION), now.get(VERSION)
    if version != is_now:  # another measures otherwise, whatever it was asked
        by = f"qtool {version}" if isinstance(version, str) else "a qtool that did not say which"
        raise SourceError(
            f"{path}: costs that {by[:80]} measured, and this is qtool {is_now}; name another file "
            "for --costs, or remove this one to have them measured again"
        )
    others = [name for name, value in now.items() if before.get(name) != value]
    said = [one for name in others for one in differences(name, before.get(name), now[name])]
    said += _lacking(losses, sizes)
    if said:
        raise SourceError(
            f"{path}: costs of something else ({', '.join(said[:_SHOWN])}); ask as it was asked "
            "then, name another file for --costs, or remove this one to have them measured again"
        )
    return costs


def _lacking(losses: Losses, sizes: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What is to be chosen of and was not measured."""
    tensors = [unit for unit in sizes if unit not in losses]
    types = sorted(
        {choice for unit, every in sizes.items() if losses.get(unit) for choice in every}
        - {choice for every in losses.values() for choice in every}
    )
    found = [f"{', '.join(tensors[:_SHOWN])} had a type by the recipe"] if tensors else []
    return found + ([f"{', '.join(types)} not among --types"] if types else [])


def _tokens(found: Any) -> int:
    if type(found) is not int or found <= 0:
        raise ValueError(f"{str(found)[:40]} tokens")
    return found


def _loss(found: Any) -> float | None:
    if found is None:
        return None
    loss = float(found) if type(found) in (int, float) else -1.0
    if not isfinite(loss) or loss < 0:
        raise ValueError(f"a loss of {str(found)[:40]}")
    return loss
