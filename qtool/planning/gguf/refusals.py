"""What a source is not quantized for, told before any work: each an UnsupportedError."""

from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from qtool.errors import UnsupportedError
from qtool.gguf.gptq.levels import SWEPT
from qtool.gguf.planned import PlannedTensor
from qtool.gguf.source import GgufSource
from qtool.gguf_mixtures.kinds import layer_of
from qtool.gguf_mixtures.table import TYPES
from qtool.gguf_types import FLOATS
from qtool.planning.unseen import MUCH, overriding
from qtool.recipe.gguf import GgufRecipe


def refuse_packed(source: GgufSource, recipe: str) -> None:
    """Experts in MXFP4 are written as they are; what is changed before it is rounded is plain."""
    packed = next((t for t in source.tensors if t.origin and t.type.name == "MXFP4"), None)
    if packed is not None:
        raise UnsupportedError(
            f"{source.path}: {packed.origin[0]} is MXFP4, and recipe {recipe} changes matrices "
            "before they are rounded, or rounds them by GPTQ; take a recipe without transforms "
            "and method, or make a plain checkpoint of the model first (qtool convert MODEL --to "
            "hf -o DIR)"
        )


def refuse_conv1d(source: GgufSource, recipe: str) -> None:
    """GPT-2's matrices are kept as [in, out], which measuring does not look at."""
    if source.architecture == "gpt2":
        raise UnsupportedError(
            f"{source.path}: GPT-2 stores its matrices transposed ([in, out]), and recipe {recipe} "
            "measures what Linear layers read; take one that rounds to nearest, such as q4_k_m"
        )


def refuse_sweep(
    source: GgufSource, planned: Sequence[PlannedTensor], recipe: GgufRecipe
) -> NoReturn:
    """UnsupportedError: GPTQ has no matrix to choose codes of."""
    matrices = [t for t in planned if len(t.shape) > 1 and layer_of(t.name) >= 0]
    encoded = any(not t.copied and t.type not in FLOATS for t in matrices)
    kept = {t.type.name for t in matrices if t.copied and t.type.name in SWEPT}
    if kept and not encoded:
        raise UnsupportedError(
            f"{source.path}: its matrices are {', '.join(sorted(kept))} already, and are copied as "
            "they are, so that method gptq has nothing to do; use the F16, BF16 or F32 file"
        )
    raise UnsupportedError(
        f"{source.path}: method gptq has nothing to do with type {recipe.type}: it chooses "
        "codes of Q4_0 to Q8_0, Q2_K to Q6_K, IQ1 to IQ4, MXFP4 and NVFP4; leave it out"
    )


def refuse_floats(source: GgufSource, planned: Sequence[PlannedTensor], recipe: GgufRecipe) -> None:
    """UnsupportedError where more than a quarter of the blocks' numbers fall back to F16, for which
    nobody asked: their rows are no whole blocks of any quantized type."""
    inside = [tensor for tensor in planned if layer_of(tensor.name) >= 0]
    left = [tensor for tensor in inside if tensor.fallback and tensor.type in FLOATS]
    share = sum(t.parameters for t in left) / max(1, sum(t.parameters for t in inside))
    if share <= MUCH:
        return
    kinds = dict.fromkeys(tensor.name.split(".", 2)[2] for tensor in left)
    widths = "/".join(str(width) for width in sorted({t.source.in_features for t in left}))
    entries = [f'{{match: "{kind}", type: f16}}' for kind in kinds]
    raise UnsupportedError(
        f"{source.path}: recipe {recipe.name} would leave {share:.0%} of the blocks' weights in "
        f"F16 without saying so ({', '.join(kinds)}), as rows of {widths} are no whole blocks of "
        "any type to fall back to; where that is meant, say it: "
        f"{overriding(entries, bool(recipe.overrides))}"
    )


def requantized(
    source: GgufSource, planned: Sequence[PlannedTensor], allowed: bool
) -> tuple[str, ...]:
    """The quantized types of the source that are encoded anew."""
    for tensor in planned:
        type_ = tensor.source.type
        if tensor.copied or type_ in FLOATS:
            continue
        if type_.name not in TYPES:
            raise UnsupportedError(
                f"{source.path}: {tensor.name} is {type_.name}, which is not converted to "
                f"{tensor.type.name}; keep it with an override that says dense: true"
            )
        if not allowed:
            why = (
                f"turning it into {tensor.type.name} does not bring back what was lost"
                if tensor.type in FLOATS
                else "quantizing it again loses more than quantizing the original"
            )
            raise UnsupportedError(
                f"{source.path}: {tensor.name} is quantized already, as {type_.name}; {why}: use "
                "the F16, BF16 or F32 file, or give --requantize"
            )
    again = Counter(t.source.type.name for t in planned if not t.copied)
    return tuple(name for name, _ in again.most_common() if TYPES[name] not in FLOATS)
