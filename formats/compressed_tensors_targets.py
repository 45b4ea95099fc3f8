"""Expressions that name modules of numbered blocks in compressed-tensors' configs.

vLLM gives some models another prefix than their checkpoints have (language_model.model. for
model.language_model.). It rewrites targets that are names, and leaves those that are expressions
as they are; so what is before the blocks' list is left open in these.

Source: vLLM 0.33, CompressedTensorsConfig.apply_vllm_mapper and find_matched_target;
compressed-tensors 0.20, utils/match.py: both match from the start of a name.
"""

from collections.abc import Iterable, Sequence

from qtool.formats.gptq_dynamic import patterns_for
from qtool.formats.layer_names import is_head
from qtool.formats.patterns import matches

_KEPT = ("model", "transformer", "gpt_neox")  # prefixes that engines have as checkpoints do
_NESTED = "language_model."


def targets_of(chosen: Sequence[str], everything: Iterable[str]) -> list[str] | None:
    """Expressions for modules; None where they would mean others too.

    Where others are called alike, the prefix tells them apart if it is one that engines keep.
    """
    if len(chosen) == 1 and is_head(chosen[0]) and chosen[0].endswith("lm_head"):
        return [r"re:(?:.*\.)?lm_head$"]  # transformers has it outside of other parts
    names = {*everything}
    found = []
    for pattern in patterns_for(chosen, names):
        parts = pattern.split(r"\.")
        number = next((n for n, part in enumerate(parts) if not _plain(part)), 0)
        found.append(r"(?:.*\.)?" + r"\.".join(parts[max(0, number - 1) :]) + "$")
    others = names.difference(chosen)
    if any(matches(pattern, name) is not False for pattern in found for name in others):
        if any(name.split(".")[0] not in _KEPT or _NESTED in name for name in chosen):
            return None
        found = [f"^{pattern}$" for pattern in patterns_for(chosen, names)]
    return [f"re:{pattern}" for pattern in found]


def _plain(part: str) -> bool:
    return part.replace("\\", "").replace("_", "").isalnum() and not part.isdecimal()
