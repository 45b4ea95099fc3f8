"""The plan: what happens to every source tensor, and what the artifact will hold, to the byte.

Made from headers and config.json alone, before any work. Every source tensor is quantized under
a Scheme, kept dense for a stated reason, or dropped for a stated reason. What an indivisible
width, a format's limit or an override does is decided here, and so is everything an engine will
refuse. A plan does not change while a run goes on.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import cached_property
from math import gcd, prod
from typing import Any

import numpy as np

from qtool import engines, estimate, structure
from qtool.checkpoint import Checkpoint
from qtool.errors import FormatError, SourceError, UnsupportedError
from qtool.formats import FORMATS
from qtool.formats.facts import Options
from qtool.formats.safetensors_file import Layout, TensorInfo, TensorSpec, plan_shards
from qtool.recipe import Recipe, patched
from qtool.scheme import Dense, Dropped, Scheme
from qtool.structure import BlockStack

MAX_SHARD_BYTES = 5_000_000_000
SMALLEST_GROUP = 32  # what `indivisible: smaller-group` goes down to; engines load no smaller one
_COMPARED_BYTES = 1 << 24

Action = Scheme | Dense | Dropped


@dataclass(frozen=True)
class Planned:
    """One source tensor, what becomes of it, and the tensors that are written for it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    action: Action
    outputs: tuple[TensorSpec, ...]
    block: int | None  # the decoder block it belongs to; None outside, and beyond the last one run

    @property
    def module(self) -> str:
        """The name without `.weight`."""
        return self.name.removesuffix(".weight")

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of a quantized tensor."""
        return self.action if isinstance(self.action, Scheme) else None

    @property
    def reason(self) -> str | None:
        """Why it is dense or dropped."""
        return None if isinstance(self.action, Scheme) else self.action.reason

    @property
    def nbytes(self) -> int:
        """Bytes written for it."""
        return sum(spec.nbytes for spec in self.outputs)

    @property
    def parameters(self) -> int:
        """Numbers in the source tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class Plan:
    """What a run will do. `tensors` is in the order of the source."""

    recipe: Recipe
    tensors: tuple[Planned, ...]
    blocks: BlockStack
    layout: Layout
    warnings: tuple[str, ...]
    peak_rss_bytes: int
    seconds: float

    @property
    def format(self) -> str:
        """awq, gptq or dense."""
        return self.recipe.format

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor files, exact."""
        return self.layout.size

    @property
    def bits_per_weight(self) -> float:
        """Bits written for each number that the model has; dropped copies count on neither side."""
        kept = [tensor for tensor in self.tensors if not isinstance(tensor.action, Dropped)]
        numbers = sum(tensor.parameters for tensor in kept)
        return 8 * sum(tensor.nbytes for tensor in kept) / numbers if numbers else 0.0

    @cached_property
    def by_name(self) -> Mapping[str, Planned]:
        """Source tensor name to its plan."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def by_block(self) -> Mapping[int | None, tuple[Planned, ...]]:
        """Tensors of each decoder block; under None those of no block."""
        groups: dict[int | None, list[Planned]] = defaultdict(list)
        for tensor in self.tensors:
            groups[tensor.block].append(tensor)
        return {block: tuple(group) for block, group in groups.items()}

    @property
    def quantized(self) -> tuple[Planned, ...]:
        """The tensors that get codes."""
        return tuple(tensor for tensor in self.tensors if tensor.scheme is not None)

    @property
    def counts(self) -> dict[str, int]:
        """How many tensors are quantized, dense and dropped."""
        kinds = Counter(type(tensor.action) for tensor in self.tensors)
        return {"quantized": kinds[Scheme], "dense": kinds[Dense], "dropped": kinds[Dropped]}

    def json(self) -> dict[str, Any]:
        """The --json object of `qtool plan`."""
        return {
            "recipe": self.recipe.name,
            "format": self.format,
            "blocks": {"prefix": self.blocks.prefix, "count": self.blocks.count},
            "size_bytes": self.size_bytes,
            "bits_per_weight": self.bits_per_weight,
            "peak_rss_bytes": self.peak_rss_bytes,
            "seconds": self.seconds,
            "warnings": list(self.warnings),
            "tensors": [
                {
                    "name": tensor.name,
                    "shape": list(tensor.shape),
                    "scheme": None if tensor.scheme is None else str(tensor.scheme),
                    "reason": tensor.reason
                    and ("dropped: " if isinstance(tensor.action, Dropped) else "") + tensor.reason,
                    "bytes": tensor.nbytes,
                }
                for tensor in self.tensors
            ],
        }


def make_plan(
    recipe: Recipe, checkpoint: Checkpoint, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Plan:
    """Plan `recipe` for a checkpoint. Reads tensor data only to compare a tied head's two copies.

    Raises UnsupportedError for a source that cannot be quantized at all, FormatError where the
    recipe's format cannot hold what the recipe asks for.
    """
    tensors = checkpoint.tensors
    if recipe.rounding != "none" or recipe.transform_chain:
        structure.check_source(tensors, checkpoint.config)
    blocks = structure.find_blocks(tensors, checkpoint.config)
    warnings: list[str] = []
    declared = structure.layer_count(checkpoint.config)
    if declared is not None and declared > blocks.count:
        warnings.append(
            f"config.json says {declared} layers, the checkpoint has {blocks.count}: "
            "is a part of it missing?"
        )
    parents = structure.expert_parents(tensors)
    roles = {name: structure.role(name, info, blocks, parents) for name, info in tensors.items()}
    default = recipe_scheme(recipe)
    actions: dict[str, Action] = {
        name: default if role.reason is None else Dense(role.reason) for name, role in roles.items()
    }
    warnings += _override(recipe, actions)
    _fit(recipe, tensors, actions)
    actions |= _untie(checkpoint, actions)
    if recipe.rounding != "none" and not any(isinstance(a, Scheme) for a in actions.values()):
        reasons = Counter(a.reason for a in actions.values() if isinstance(a, Dense))
        common = "; ".join(f"{count} tensors: {why}" for why, count in reasons.most_common(4))
        raise UnsupportedError(
            f"{checkpoint.path}: with recipe {recipe.name} no tensor is quantized ({common})"
        )
    options = format_options(recipe)
    planned = tuple(
        Planned(
            name,
            info.shape,
            info.dtype,
            actions[name],
            _outputs(recipe, options, name, info, actions[name]),
            roles[name].block,
        )
        for name, info in tensors.items()
    )
    layout = plan_shards([spec for tensor in planned for spec in tensor.outputs], max_shard_bytes)
    cost = estimate.run_cost(recipe, planned, structure.active_share(checkpoint.config))
    warnings += engines.warnings(recipe, planned)
    return Plan(recipe, planned, blocks, layout, tuple(warnings), cost.peak_rss_bytes, cost.seconds)


def recipe_scheme(recipe: Recipe) -> Action:
    """What a linear layer gets before overrides and limits."""
    if recipe.rounding == "none":
        return Dense("the recipe quantizes nothing (method: none)")
    return recipe.scheme


def _override(recipe: Recipe, actions: dict[str, Action]) -> list[str]:
    """Apply the recipe's overrides; the sentences about those that match nothing."""
    warnings = []
    for number, override in enumerate(recipe.overrides):
        pattern = re.compile(translate(override.match))
        hits = 0
        for name, action in actions.items():
            module = name.removesuffix(".weight")
            if not (pattern.match(module) or pattern.match(name)):
                continue
            if override.weights is None:
                hits += 1
                if isinstance(action, Scheme):
                    actions[name] = Dense(f"override {override.match!r}")
            elif isinstance(action, Scheme):
                hits += 1
                actions[name] = patched(action, override.weights)
            elif module == override.match and recipe.rounding != "none":
                raise UnsupportedError(
                    f"overrides.{number}: {name} stays dense in this version ({action.reason}); "
                    "remove the override"
                )
        if not hits:
            warnings.append(f"overrides.{number}: {override.match!r} matches no quantized tensor")
    return warnings


def format_options(recipe: Recipe) -> Options:
    """How the recipe's format is laid out, one way for the whole artifact."""
    module = FORMATS[recipe.format]
    if recipe.rounding == "none":
        dense: Options = module.choose(())
        return dense
    schemes = [recipe.scheme]
    schemes += [patched(recipe.scheme, o.weights) for o in recipe.overrides if o.weights]
    layouts = {"awq": recipe.awq.layout, "gptq": recipe.gptq.layout}
    chosen: Options = module.choose(schemes, layouts[recipe.format])
    return chosen


def _obstacle(recipe: Recipe, scheme: Scheme, shape: tuple[int, ...]) -> str | None:
    """Why a matrix [out, in] cannot be stored under a scheme."""
    if scheme.group_size > 0 and shape[1] % scheme.group_size:
        return f"in_features {shape[1]} is not divisible by group_size {scheme.group_size}"
    reason: str | None = FORMATS[recipe.format].supports(scheme, shape, format_options(recipe))
    return reason


def _smaller(scheme: Scheme, in_features: int) -> Scheme:
    """The same scheme with the largest power-of-two group from 32 on that divides in_features."""
    if scheme.group_size <= 0 or in_features % scheme.group_size == 0:
        return scheme
    size = gcd(in_features, 1 << scheme.group_size.bit_length())
    while size > scheme.group_size:
        size //= 2
    return replace(scheme, group_size=size) if size >= SMALLEST_GROUP else scheme


def _fit(recipe: Recipe, tensors: Mapping[str, TensorInfo], actions: dict[str, Action]) -> None:
    """Make every scheme one that can be stored, as the recipe's `indivisible` says."""
    schemes = {name: a for name, a in actions.items() if isinstance(a, Scheme)}
    # Limits are looked up once per (scheme, shape): a mixture of experts has many equal matrices.
    memo: dict[tuple[Scheme, tuple[int, ...]], str | None] = {}

    def obstacle(name: str) -> str | None:
        key = (schemes[name], tensors[name].shape)
        if key not in memo:
            memo[key] = _obstacle(recipe, *key)
        return memo[key]

    if recipe.indivisible == "smaller-group":
        schemes = {name: _smaller(s, tensors[name].shape[1]) for name, s in schemes.items()}
        together = recipe.format == "awq"  # whose config has one group_size
        smallest: dict[str, int] = {}
        for name, scheme in schemes.items():
            key = "" if together else structure.fused_key(name.removesuffix(".weight"))
            size = scheme.group_size
            smallest[key] = min(smallest.get(key, size), size)
        for name, scheme in schemes.items():
            key = "" if together else structure.fused_key(name.removesuffix(".weight"))
            schemes[name] = replace(scheme, group_size=smallest[key])
    failures = {name: reason for name in schemes if (reason := obstacle(name)) is not None}
    if failures and recipe.indivisible == "error":
        raise FormatError(_ways_out(recipe, failures, schemes, tensors))
    if failures and recipe.indivisible == "smaller-group":
        name, reason = next(iter(failures.items()))
        raise FormatError(
            f"{len(failures)} of {len(schemes)} matrices cannot be stored even with a smaller "
            f"group (the first: {name} {list(tensors[name].shape)}: {reason}); leave them dense "
            "with --set indivisible=dense, or with an override"
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
    kinds: dict[tuple[str, str], int] = Counter(
        (re.sub(r"\.\d+\.", ".*.", name), reason) for name, reason in failures.items()
    )
    shown = [f"{name}: {reason}" for name, reason in list(kinds)[:3]]
    if len(kinds) > 3:
        shown.append(f"{len(kinds) - 3} more kinds")
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
    ways.append(f"--set indivisible=dense (leaves {share:.0%} of the weights unquantized)")
    return (
        f"recipe {recipe.name} does not fit {len(failures)} of {len(schemes)} matrices "
        f"({'; '.join(shown)}). Choose: {', or '.join(ways)}"
    )


def _untie(checkpoint: Checkpoint, actions: Mapping[str, Action]) -> dict[str, Action]:
    """What a head that config.json ties to the embedding becomes: one copy is enough."""
    config = checkpoint.config
    tied = config.get(
        "tie_word_embeddings", structure.text_config(config).get("tie_word_embeddings")
    )
    heads = [n for n, a in actions.items() if isinstance(a, Dense) and a.reason == "output head"]
    if tied is not True or len(heads) != 1:
        return {}
    head = heads[0]
    info = checkpoint.tensors[head]
    for name, action in actions.items():
        other = checkpoint.tensors[name]
        if (
            isinstance(action, Dense)
            and action.reason == "embedding"
            and (other.shape, other.dtype) == (info.shape, info.dtype)
        ):
            if _equal_bytes(checkpoint, head, name):
                return {head: Dropped(f"tied to {name}, of which it is a copy")}
            return {head: Dense(f"output head; config.json ties it to {name}, but it differs")}
    return {}


def _equal_bytes(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Whether two tensors of one size hold the same bytes, read in pieces."""
    infos = [checkpoint.tensors[name] for name in (first, second)]
    paths = [checkpoint.file_of(name) for name in (first, second)]
    try:
        with paths[0].open("rb") as one, paths[1].open("rb") as two:
            one.seek(infos[0].start)
            two.seek(infos[1].start)
            left = infos[0].nbytes
            while left:
                count = min(left, _COMPARED_BYTES)
                a, b = one.read(count), two.read(count)
                if len(a) != count or not np.array_equal(
                    np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
                ):
                    return False
                left -= count
    except OSError as error:
        raise SourceError(f"{error.filename}: cannot be read ({error.strerror})") from None
    return True


def _outputs(
    recipe: Recipe, options: Options, name: str, info: TensorInfo, action: Action
) -> tuple[TensorSpec, ...]:
    if isinstance(action, Dropped):
        return ()
    if isinstance(action, Dense):
        return (TensorSpec(name, info.dtype, info.shape),)
    prefix = name.removesuffix(".weight")
    return tuple(FORMATS[recipe.format].specs(prefix, action, info.shape, options))
