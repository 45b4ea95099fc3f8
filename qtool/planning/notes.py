"""What a plan says of a recipe and a source besides engines' views (qtool/planning/engines.py)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qtool.checkpoints import structure
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import UnsupportedError
from qtool.planned import Planned
from qtool.planning.handed import PER_LAYER
from qtool.recipe.consistency import without
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import Recipe
from qtool.scheme import Dense, Dropped

# Tables of a recipe that a transform of the same name reads, and keys that go with a value.
_OF_TRANSFORMS = ("rotate", "smooth", "smooth_attention")
_OF_VALUES = {
    "rotate.steps": "rotate.kind: learned",
    "rotate.rate": "rotate.kind: learned",
    "smooth.grid": "smooth.alpha: search",
}
_MUCH_DENSE = 0.2  # of the weights other than embeddings and head: worth a warning


def idle(recipe: Recipe) -> list[str]:
    """Options of the recipe that do nothing, with what they go with."""
    where = f"method {'/'.join(recipe.method)} and format {recipe.format}"
    found = []
    for key in recipe.idle_options:
        table = key.partition(".")[0]
        transform = table.replace("_", "-")
        if table in _OF_TRANSFORMS and transform not in recipe.transforms:
            found.append(f"{key} has no effect {without(transform, recipe.transforms)}")
        elif key in _OF_VALUES:
            found.append(f"{key} has no effect without {_OF_VALUES[key]}")
        else:
            clips = key == "awq.clip" and recipe.rounding == "rtn"
            found.append(f"{key} has no effect with {where}" + ("; rtn.clip has" if clips else ""))
    return found


def unread(recipe: Recipe | GgufRecipe) -> list[str]:
    """Settings of a calibration that there is none of."""
    given = recipe.calibration.model_fields_set
    if recipe.calibrates or not given:
        return []
    unless = "" if isinstance(recipe, Recipe) else " without `importance: true`"
    return [
        f"note: settings of calibration ({', '.join(sorted(given))}) are not used: recipe "
        f"{recipe.name} looks at no activations{unless}"
    ]


def past_positions(config: Mapping[str, Any], length: int) -> list[str]:
    """Where samples are longer than what the model was made for."""
    said = structure.past_positions(config, length, "calibration samples")
    return [] if said is None else [said]


def missing_files(checkpoint: Checkpoint, encodes: bool = False) -> list[str]:
    """What engines will look for beside the tensors in vain; no path, as the card repeats it.

    encodes: whether a run cuts text into tokens.
    """
    from qtool.verification.tokens import NO_TOKENIZER, has_tokenizer

    found = []
    if not (checkpoint.folder / "config.json").is_file():
        found.append(
            "the model has no config.json, so engines cannot load what is made of it; put the "
            "model's own beside its tensors"
        )
    if not has_tokenizer(checkpoint.folder):
        if encodes:
            found.append(
                "the model has no tokenizer, and `qtool quantize` needs one for the calibration "
                "text; put the model's own beside its tensors"
            )
        else:
            found.append(f"the model {NO_TOKENIZER} its tensors")
    return found


def dense_share(tensors: Iterable[Planned]) -> float:
    """Of the numbers in `tensors`, those stored dense; dropped copies do not count."""
    kept = [tensor for tensor in tensors if not isinstance(tensor.action, Dropped)]
    numbers = sum(tensor.parameters for tensor in kept)
    dense = sum(tensor.parameters for tensor in kept if tensor.scheme is None)
    return dense / numbers if numbers else 0.0


def much_dense(tensors: Sequence[Planned]) -> list[str]:
    """A sentence where much of what methods are there for stays dense, with the main reason."""
    if all(tensor.scheme is None for tensor in tensors):
        return []
    inner = [t for t in tensors if t.reason not in ("embedding", "output head")]
    share = dense_share(inner)
    tables = sum(t.parameters for t in tensors if t.reason == "embedding" and PER_LAYER in t.name)
    of_all = tables / sum(tensor.parameters for tensor in tensors)
    said = []
    if of_all > _MUCH_DENSE:
        said = [
            f"{of_all:.0%} of the weights are a table of embeddings for each layer, which stays "
            "dense in safetensors; GGUF recipes such as q4_k_m quantize it, too"
        ]
    if share <= _MUCH_DENSE:
        return said
    why: Counter[str] = Counter()
    for tensor in inner:
        if isinstance(tensor.action, Dense):
            why[tensor.action.reason] += tensor.parameters
    return [
        *said,
        f"{share:.0%} of the weights stay dense, embeddings and head not counted; most of them: "
        f"{why.most_common(1)[0][0]}",
    ]


def wide_codes(tensors: Sequence[Planned]) -> list[str]:
    """Codes that take more bits than they have."""
    wide = [
        tensor
        for tensor in tensors
        if tensor.scheme is not None
        and tensor.scheme.bits < 8
        and any((spec.dtype, spec.shape) == ("I8", tensor.shape) for spec in tensor.outputs)
    ]
    if not wide:
        return []
    bits = sorted({tensor.scheme.bits for tensor in wide if tensor.scheme is not None})
    rate = 8 * sum(tensor.nbytes for tensor in wide) / sum(tensor.parameters for tensor in wide)
    return [
        f"note: {'/'.join(map(str, bits))}-bit codes take 8 bits each in int-quantized, which "
        f"packs none: {rate:.3f} bits per weight with their scales"
    ]


def doubles(tensors: Sequence[Planned]) -> list[str]:
    """What is not stored in the dtype that it has."""
    count = sum(t.dtype == "F64" and isinstance(t.action, Dense) for t in tensors)
    if not count:
        return []
    many = "1 unquantized tensor is" if count == 1 else f"{count} unquantized tensors are"
    return [
        f"note: {many} F64 in the model, in which no engine computes, and F32 in what is made of it"
    ]


def refuse_experts(path: Path, experts: Iterable[str]) -> None:
    """UnsupportedError where scales of routed experts would be tuned: models keep those of a block
    in one parameter, and torch makes a gradient by all of it for each expert that is met."""
    name = next(iter(experts), None)
    if name is not None:
        raise UnsupportedError(
            f"{path}: this version does not tune the scales of routed experts ({name}); take "
            "`tune` out of the recipe's method"
        )
