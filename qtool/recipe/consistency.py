"""Which values of a recipe go together: methods with formats, weights with activations."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qtool.formats import mlx
from qtool.recipe.file import conflict, did_you_mean
from qtool.recipe.weights import Activations, Weights

if TYPE_CHECKING:
    from qtool.recipe.recipe import Recipe

METHODS = ("rtn", "gptq", "awq", "tune", "none")
_ROUNDING = (("rtn",), ("gptq",), ("awq",), ("awq", "rtn"), ("awq", "gptq"))
CHAINS = (*_ROUNDING, *((*chain, "tune") for chain in _ROUNDING), ("none",))
TUNED_FORMATS = ("awq", "gptq", "compressed-tensors", "mlx")
TRANSFORMS = ("rotate", "smooth", "smooth-attention", "awq")


def without(transform: str, others: Sequence[str] = ()) -> str:
    """Which line of a recipe lacks, for keys that are read by a transform; rotate comes first."""
    names = [transform, *others] if transform == "rotate" else [*others, transform]
    return f"without the transform {transform}: add `transforms: [{', '.join(names)}]`"


def check(recipe: "Recipe") -> None:
    """Raise the conflict() where values that are each allowed do not go together."""
    for key, names, known in (
        ("method", recipe.method, METHODS),
        ("transforms", recipe.transforms, TRANSFORMS),
    ):
        for name in names:
            if name not in known:
                near = did_you_mean(name, known)
                hint = f"{near} " if near else ""
                raise conflict(key, f"{name!r} is unknown; {hint}known: {', '.join(known)}")
            if names.count(name) > 1:
                raise conflict(key, f"{name} is there more than once; once is all it takes")
    if recipe.method not in CHAINS:
        chains = ", ".join("[" + ", ".join(chain) + "]" for chain in CHAINS)
        found = "[" + ", ".join(recipe.method) + "]"
        raise conflict("method", f"{found} is no order that exists; one of {chains}")
    _check_cache(recipe)
    if recipe.tunes:
        _check_tuned(recipe)
    cache_alone = recipe.kv_cache is not None and recipe.format == "compressed-tensors"
    if (recipe.rounding == "none") != (recipe.format == "dense") and not (
        recipe.rounding == "none" and cache_alone
    ):
        raise conflict(
            "format",
            f"method {'/'.join(recipe.method)} does not go with format {recipe.format}; "
            "`method: none` is written as `format: dense`, or with kv_cache as compressed-tensors",
        )
    if recipe.weights is None and recipe.reads_weights:
        raise conflict("weights", "missing; it says bits, group_size and symmetric")
    if recipe.activations is not None and not recipe.reads_weights:
        raise conflict(
            "activations",
            "`method: none` leaves inputs as they are; leave it out, or give a method",
        )
    if "rotate" in recipe.transforms[1:]:
        raise conflict("transforms", "rotate changes the whole network and comes first")
    if recipe.rotates and not recipe.rotate.some:
        raise conflict("rotate", "r1, r2, r3 and r4 are all false, so that nothing is rotated")
    if recipe.rotates and recipe.rotate.online and recipe.format != "compressed-tensors":
        raise conflict(
            "rotate",
            f"format {recipe.format} cannot say that r3 and r4 are to be done while the model "
            "runs; compressed-tensors can",
        )
    if recipe.learns_rotations and recipe.weights is not None and recipe.weights.type != "int":
        raise conflict("rotate.kind", "learned rotations are for weights of type int")
    if recipe.weights is not None and recipe.rounding != "none":
        _check_numbers(recipe, recipe.weights)


def _check_tuned(recipe: "Recipe") -> None:
    """Scales that stand beside integers can be moved."""
    if recipe.format not in TUNED_FORMATS or (recipe.weights and recipe.weights.type != "int"):
        raise conflict(
            "method",
            "tune moves the scales of integers in groups, as the formats "
            f"{', '.join(TUNED_FORMATS)} have them with weights of type int",
        )
    if recipe.activations is not None:
        raise conflict(
            "method", "tune is for weights alone: it does not see how inputs are rounded"
        )


def _check_cache(recipe: "Recipe") -> None:
    """Scales of keys and values go with some formats."""
    if recipe.kv_cache is None:
        return
    if recipe.format == "qserve":
        if not recipe.kv_cache.dynamic:
            raise conflict("kv_cache", "qserve makes scales as keys come: dynamic: true")
        return
    if recipe.format != "compressed-tensors":
        raise conflict(
            "kv_cache",
            f"format {recipe.format} does not say how keys and values are kept; "
            "compressed-tensors does, also with `method: none`, and qserve",
        )
    if recipe.kv_cache.dynamic:
        raise conflict(
            "kv_cache", "engines of compressed-tensors have stored scales: dynamic: false"
        )


def _check_numbers(recipe: "Recipe", weights: Weights) -> None:
    """Types of numbers go with some formats and methods."""
    if recipe.format == "bitsandbytes" and weights.bits != 8:
        other = {2: "w2g64-gptq", 3: "w3g128-gptq"}.get(weights.bits, "w4g128-awq or w4g128-gptq")
        raise conflict(
            "weights.bits",
            f"LLM.int8() has 8 bits, not {weights.bits}; for fewer take the recipe {other}, which "
            "transformers loads too",
        )
    if recipe.format == "bitsandbytes" and (recipe.method != ("rtn",) or recipe.rtn.clip):
        raise conflict(
            "method",
            "bitsandbytes divides each row by its largest magnitude and rounds: "
            "`method: rtn` without clip",
        )
    if recipe.format == "qserve":
        _check_qserve(recipe, weights)
        return
    if recipe.format == "mlx":
        _check_mlx(recipe, weights)
    if recipe.format == "mxfp4":
        _check_mxfp4(recipe, weights)
    if recipe.format == "fp8" and weights.type != "fp8":
        raise conflict("format", f"fp8 stores weights of type fp8, not {weights.type}")
    if weights.type != "int":
        other = "fp8" if weights.type == "fp8" else "mlx"
        own = recipe.format == weights.type == "mxfp4"
        if recipe.format not in ("compressed-tensors", other) and not own:
            has = "no fp8" if recipe.format == "mlx" else "integers"
            raise conflict(
                "format",
                f"{recipe.format} stores {has}; weights of type {weights.type} go with format "
                f"compressed-tensors or {other}",
            )
        _check_floats(recipe, weights)
        if any(override.weights is not None for override in recipe.overrides):
            raise conflict(
                "overrides",
                f"with weights of type {weights.type} an override can say `dense: true` only",
            )
    if (
        weights.type == "int"
        and weights.rows < 0
        and (recipe.activations is None or recipe.method != ("rtn",) or recipe.rtn.clip)
    ):
        raise conflict(
            "weights",
            "one scale for a matrix of integers (rows: -1) goes with activations and "
            "`method: rtn` without clip",
        )
    if recipe.activations is None:
        return
    if recipe.format != "compressed-tensors":
        raise conflict(
            "activations",
            f"format {recipe.format} does not say how activations are quantized; "
            "compressed-tensors does",
        )
    wanted = "float" if weights.type == "fp8" else weights.type
    if recipe.activations.type != wanted:
        raise conflict(
            "activations",
            "int ones go with weights of type int, float ones with fp8, nvfp4 and mxfp4 with their "
            f"own; not {recipe.activations.type} with {weights.type}",
        )
    if wanted == "int" and not weights.symmetric:
        raise conflict("activations", "engines quantize them for symmetric weights only")


def _check_floats(recipe: "Recipe", weights: Weights) -> None:
    """What small floats lack."""
    if recipe.rtn.clip and weights.type == "fp8":
        raise conflict("rtn.clip", "scales of fp8 are those of the largest weight: false")
    if recipe.rtn.clip and weights.type != "nvfp4" and "awq" not in recipe.transform_chain:
        raise conflict(
            "rtn.clip",
            f"of {weights.type} the better of two scales is always taken, and to look further "
            "gains only where inputs are measured: false, or `transforms: [awq]`",
        )
    if not recipe.gptq.static_groups and recipe.rounding == "gptq":
        raise conflict(
            "gptq.static_groups",
            f"scales of {weights.type} are found before the sweep, for groups of neighbours: true",
        )
    if recipe.feeds_back and weights.rows != 1:
        raise conflict(
            "gptq.yaqa",
            "rows compensate for each other one after another, and here several share a scale: 0, "
            "or weights.rows: 1",
        )


def _check_mlx(recipe: "Recipe", weights: Weights) -> None:
    """mlx-lm has kernels for some widths and groups."""
    if weights.type != "int":
        return
    given = {(weights.bits, weights.group_size)}
    for one in recipe.overrides:
        if one.weights is not None:
            given.add(
                (one.weights.bits or weights.bits, one.weights.group_size or weights.group_size)
            )
    for bits, size in sorted(given):
        if bits not in mlx.WIDTHS:
            raise conflict("weights.bits", f"mlx holds 2, 3, 4, 5, 6 or 8 bits, not {bits}")
        if size not in mlx.GROUPS:
            raise conflict("weights.group_size", f"mlx has groups of 32, 64 or 128, not of {size}")


def _check_mxfp4(recipe: "Recipe", weights: Weights) -> None:
    """gpt-oss's own format: experts with biases, whose gate and up take turns."""
    if weights.type != "mxfp4":
        raise conflict("format", f"mxfp4 stores weights of type mxfp4, not {weights.type}")
    if recipe.method not in (("rtn",), ("gptq",)):
        raise conflict("method", "format mxfp4 goes with `method: rtn` or `method: gptq`")
    if recipe.transforms:
        raise conflict("transforms", "gpt-oss's experts take none in format mxfp4: leave it out")
    if recipe.pad_intermediate:
        raise conflict("pad_intermediate", "format mxfp4 keeps gpt-oss's widths: leave it out")


def _check_qserve(recipe: "Recipe", weights: Weights) -> None:
    """Its kernels know one kind of weights and of inputs."""
    if weights.type != "int" or weights.bits != 4 or weights.symmetric:
        raise conflict("weights", "qserve stores int of 4 bits with zeros: symmetric: false")
    inputs = recipe.activations
    if inputs is None or inputs != Activations(bits=8, type="int"):
        raise conflict(
            "activations",
            "qserve rounds inputs to 8 bits, token by token: activations: {bits: 8, type: int}",
        )
    if recipe.reorders_groups:
        raise conflict("gptq", "qserve's groups are neighbours: gptq.static_groups: true")
