"""Schemes that can be stored: the recipe's own, overridden, and fitted to widths and formats.

What a recipe wants and what a format can hold meet here, before any work: an input width that the
group size does not divide, a width the format does not pack, parts of a fused layer that must be
stored alike.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import translate
from math import gcd, prod

from qtool.checkpoints import structure
from qtool.checkpoints.padding import KEY, shape_padded
from qtool.checkpoints.roles import FUSED_EXPERTS, LEFT_FUSED, Role
from qtool.errors import FormatError, UnsupportedError
from qtool.formats import FORMATS
from qtool.formats.facts import Options
from qtool.formats.safetensors_file import TensorInfo
from qtool.messages.remarks import NOTE
from qtool.messages.sentences import count
from qtool.planning import heads
from qtool.recipe.recipe import Recipe, patched
from qtool.scheme import UNROUNDED, Action, Dense, Scheme

SMALLEST_GROUP = 32  # what `indivisible: smaller-group` goes down to; engines load no smaller one


def recipe_scheme(recipe: Recipe) -> Action:
    """What a linear layer gets before overrides and limits."""
    if recipe.rounding == "none":
        return UNROUNDED
    return recipe.scheme


def by_role(recipe: Recipe, roles: Mapping[str, Role]) -> dict[str, Action]:
    """What each tensor gets before overrides and limits."""
    default = recipe_scheme(recipe)
    return {
        name: default if role.reason is None else Dense(role.reason) for name, role in roles.items()
    }


def override(
    recipe: Recipe,
    actions: dict[str, Action],
    parts: Mapping[str, Sequence[str]] | None = None,
    mtp: Collection[str] = (),
) -> list[str]:
    """Apply the recipe's overrides; the sentences about those that match nothing.

    parts: of fused experts that stay fused, the names of their matrices, by which overrides mean
    them, too. mtp: matrices of multi-token prediction, which stay dense.
    """
    parts = parts or {}
    warnings = []
    before: dict[str, Scheme] = {}  # of what an override made dense, which a later one may undo
    for number, entry in enumerate(recipe.overrides):
        pattern = re.compile(translate(entry.match))
        hits = 0
        dense: list[tuple[str, str]] = []  # what is never quantized, each with its reason
        for name, action in actions.items():
            module = name.removesuffix(".weight")
            if not any(means(pattern, one) for one in (name, *parts.get(name, ()))):
                continue
            if entry.weights is None:
                hits += 1
                if isinstance(action, Scheme):
                    before[name] = action
                    actions[name] = Dense(f"override {entry.match!r}")
                continue
            action = before.pop(name, action)
            if heads.means(recipe, entry.match, name, action):
                action = heads.scheme(recipe, number, name)
            if isinstance(action, Scheme):
                hits += 1
                actions[name] = patched(action, entry.weights)
            elif module == entry.match and action != heads.HEAD and recipe.rounding != "none":
                raise UnsupportedError(
                    f"overrides.{number}: {name} stays dense in this version ({action.reason}); "
                    "remove the override"
                )
            elif isinstance(action, Dense):
                dense.append((name, action.reason))
        said = f"overrides.{number}: {entry.match!r}"
        if not hits:
            but = f", but {_staying(dense)}" if dense else ""
            warnings.append(f"{said} matches no quantized tensor{but}")
        elif ahead := [one for one in dense if one[0] in mtp]:
            warnings.append(f"{NOTE}{said} also matches {_staying(ahead)}")
    left = [name for name in parts if actions[name] == Dense(FUSED_EXPERTS)]
    actions |= {name: Dense(_left_fused(recipe, name, parts[name])) for name in left}
    return warnings


def _staying(dense: Sequence[tuple[str, str]]) -> str:
    """What an override matches in vain, with the reason of the first."""
    name, reason = dense[0]
    more = f" and {len(dense) - 1} more, which stay" if dense[1:] else ", which stays"
    return f"{name}{more} dense: {reason}"


def means(pattern: re.Pattern[str], name: str) -> bool:
    """Whether an override means a tensor: its name, or that of its module."""
    return any(pattern.match(one) for one in (name, name.removesuffix(".weight")))


def _left_fused(recipe: Recipe, name: str, matrices: Sequence[str]) -> str:
    """Why experts stay fused that could be apart: the override, where overrides mean them all."""
    dense = {o.match: re.compile(translate(o.match)) for o in recipe.overrides if o.dense}
    own = next((match for match, one in dense.items() if means(one, name)), None)
    found = [
        own or next((match for match, one in dense.items() if means(one, matrix)), None)
        for matrix in matrices
    ]
    return LEFT_FUSED if None in found else f"override {found[0]!r}"


def format_options(recipe: Recipe) -> Options:
    """How the recipe's format is laid out, one way for the whole artifact."""
    module = FORMATS[recipe.format]
    if recipe.rounding == "none":
        dense: Options = module.choose(())
        return dense
    schemes = [recipe.scheme]
    schemes += [patched(recipe.scheme, o.weights) for o in recipe.overrides if o.weights]
    layouts = {
        "awq": recipe.awq.layout,
        "gptq": recipe.gptq.layout,
        "compressed-tensors": "plain" if _whole_bytes(recipe) else "packed",
    }
    chosen: Options = module.choose(schemes, layouts.get(recipe.format))
    inputs = recipe.activations
    return replace(chosen, input_scale="" if inputs is None else inputs.stored_as)


def _whole_bytes(recipe: Recipe) -> bool:
    """Whether codes are stored a byte each; engines want INT8 in groups packed."""
    scheme = recipe.scheme
    groups = scheme.bits == 8 and scheme.group_size > 0 and not scheme.is_float
    return recipe.activations is not None and not groups


def _obstacle(recipe: Recipe, scheme: Scheme, shape: tuple[int, ...]) -> str | None:
    """Why a matrix [out, in] cannot be stored under a scheme."""
    if scheme.group_size > 0 and shape[1] % scheme.group_size and not scheme.is_float:
        return f"in_features {shape[1]} is not divisible by group_size {scheme.group_size}"
    reason: str | None = FORMATS[recipe.format].supports(scheme, shape, format_options(recipe))
    return reason


def _smaller(scheme: Scheme, in_features: int) -> Scheme:
    """The same scheme with the largest power-of-two group from 32 on that divides in_features."""
    if scheme.group_size <= 0 or in_features % scheme.group_size == 0 or scheme.is_float:
        return scheme
    size = gcd(in_features, 1 << scheme.group_size.bit_length())
    while size > scheme.group_size:
        size //= 2
    return replace(scheme, group_size=size) if size >= SMALLEST_GROUP else scheme


def _in_dtype_of(tensor: TensorInfo, scheme: Scheme) -> Scheme:
    """With scales like the weights, so that an engine's products stay in that dtype."""
    if scheme.is_float:
        return scheme
    own = {"F16": "float16", "F32": "float32"}
    return replace(scheme, scale_dtype=own.get(tensor.dtype, scheme.scale_dtype))


def fit(recipe: Recipe, tensors: Mapping[str, TensorInfo], actions: dict[str, Action]) -> None:
    """Make every scheme one that can be stored, as the recipe's `indivisible` says."""
    schemes = {name: a for name, a in actions.items() if isinstance(a, Scheme)}
    if recipe.format == "mlx":
        schemes = {name: _in_dtype_of(tensors[name], one) for name, one in schemes.items()}
    # Limits are looked up once per (scheme, shape): a mixture of experts has many equal matrices.
    memo: dict[tuple[Scheme, tuple[int, ...]], str | None] = {}

    def obstacle(name: str) -> str | None:
        key = (schemes[name], tensors[name].shape)
        if key not in memo:
            memo[key] = _obstacle(recipe, *key)
        return memo[key]

    if recipe.indivisible == "smaller-group":
        schemes = {name: _smaller(s, tensors[name].shape[1]) for name, s in schemes.items()}
        together = recipe.format in ("awq", "qserve")  # whose configs have one group_size
        smallest: dict[str, int] = {}
        for name, scheme in schemes.items():
            key = "" if together else structure.fused_key(name.removesuffix(".weight"))
            size = scheme.group_size
            smallest[key] = min(smallest.get(key, size), size)
        for name, scheme in schemes.items():
            key = "" if together else structure.fused_key(name.removesuffix(".weight"))
            schemes[name] = replace(scheme, group_size=smallest[key])
    failures = {name: reason for name in schemes if (reason := obstacle(name)) is not None}
    if failures and recipe.format == "mxfp4":
        name, reason = next(iter(failures.items()))
        raise FormatError(
            f"{name} {list(tensors[name].shape)}: {reason}, so that gpt-oss's own format does not "
            "hold it; take a GGUF recipe such as q4_k_m"
        )
    if failures and recipe.indivisible == "error":
        raise FormatError(_ways_out(recipe, failures, schemes, tensors))
    if failures and recipe.indivisible == "smaller-group":
        name, reason = next(iter(failures.items()))
        raise FormatError(
            f"{len(failures)} of {count(len(schemes), 'matrix')} cannot be stored even with a "
            "smaller "
            f"group (the first: {name} {list(tensors[name].shape)}: {reason}); leave them dense "
            "with --set indivisible=dense, or with an override"
        )
    if recipe.reorders_groups and recipe.format != "gptq":
        width = {name: tensors[name].shape[1] for name in schemes if name not in failures}
        if any(schemes[name].groups(width[name]) > 1 for name in width):
            raise FormatError(
                f"recipe {recipe.name}: gptq.static_groups: false with gptq.act_order puts columns "
                f"out of group order, which format {recipe.format} cannot store; choose --set "
                "gptq.static_groups=true, --set gptq.act_order=false, or --set format=gptq"
            )
    if recipe.format == "awq" and len({scheme.symmetric for scheme in schemes.values()}) > 1:
        raise FormatError(
            f"recipe {recipe.name}: awq's config says for all modules at once whether weights are "
            "symmetric, and overrides change it for some; leave `symmetric` out of them, or choose "
            "--set format=gptq"
        )
    mixed = FORMATS[recipe.format].supports_together(set(schemes.values()))
    if schemes and mixed is not None:
        raise FormatError(f"recipe {recipe.name}: {mixed}")
    # The parts of a layer that engines fuse must be stored alike, so they follow each other.
    followed = {structure.fused_key(n.removesuffix(".weight")): (n, r) for n, r in failures.items()}
    for name, scheme in schemes.items():
        first, reason = followed.get(
            structure.fused_key(name.removesuffix(".weight")), (name, None)
        )
        if reason is None:
            actions[name] = scheme
        else:
            actions[name] = Dense(failures.get(name) or f"as {first}, with which engines fuse it")


def _ways_out(
    recipe: Recipe,
    failures: Mapping[str, str],
    schemes: Mapping[str, Scheme],
    tensors: Mapping[str, TensorInfo],
) -> str:
    """The sentence for `indivisible: error`: what does not fit, and what can be done."""
    kinds: dict[str, dict[str, None]] = {}  # by reason
    for name, reason in failures.items():
        kinds.setdefault(reason, {})[re.sub(r"\.\d+\.", ".*.", name)] = None
    shown = []
    for reason, names in list(kinds.items())[:3]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        shown.append(f"{next(iter(names))}{more}: {reason}")
    if len(kinds) > 3:
        shown.append(f"{len(kinds) - 3} more reasons")
    smaller = {_smaller(schemes[name], tensors[name].shape[1]) for name in failures}
    sizes = sorted({scheme.group_size for scheme in smaller})
    helps = all(
        _obstacle(recipe, _smaller(schemes[name], tensors[name].shape[1]), tensors[name].shape)
        is None
        for name in failures
    )
    share = sum(prod(tensors[name].shape) for name in failures) / sum(
        prod(tensors[name].shape) for name in schemes
    )
    ways = []
    if helps:
        group = f"{sizes[0]} for every layer"
        if recipe.format != "awq":
            group = "/".join(map(str, sizes)) + " for these layers"
        ways.append(f"--set weights.group_size={sizes[0]}")
        ways.append(f"--set indivisible=smaller-group (group {group})")
    for multiple in (32, 64, 128, 256):
        wide = {n: shape_padded(n, tensors[n].shape, multiple) for n in failures}
        if all(_obstacle(recipe, schemes[name], wide[name]) is None for name in failures):
            ways.append(f"--set {KEY}={multiple} (zeros up to widths that are multiples of it)")
            break
    square = {schemes[name].group_size for name in failures if schemes[name].rows > 1}
    if len(square) == 1 and all(
        _obstacle(recipe, replace(schemes[name], rows=min(square)), tensors[name].shape) is None
        for name in failures
    ):
        ways.append(f"--set weights.rows={min(square)}")
    gptq = recipe.model_copy(update={"format": "gptq"})
    if recipe.format == "awq" and all(
        _obstacle(gptq, schemes[name], tensors[name].shape) is None for name in failures
    ):
        ways.append("--set format=gptq")
    if share < 1:
        ways.append(f"--set indivisible=dense (leaves {share:.0%} of the weights unquantized)")
    if not ways:
        ways.append("another recipe, or other weights by --set: as it is it would quantize nothing")
    return (
        f"recipe {recipe.name} does not fit {len(failures)} of {count(len(schemes), 'matrix')} "
        f"({'; '.join(shown)}). Choose: {', or '.join(ways)}"
    )
