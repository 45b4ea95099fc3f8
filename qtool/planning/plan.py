"""The plan: what happens to every source tensor, and what the artifact will hold, to the byte.

Made from headers and config.json alone, before any work. Every source tensor is quantized under
a Scheme, kept dense for a stated reason, or dropped for a stated reason. What an indivisible
width, a format's limit or an override does is decided here, and so is everything an engine will
refuse. A plan does not change while a run goes on.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from qtool.artifacts.cache_scales import Kept, planned_scales
from qtool.checkpoints import beside, padding, structure
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.roles import FUSED_EXPERTS, roles_of
from qtool.checkpoints.structure import BlockStack
from qtool.formats import FORMATS
from qtool.formats.dtypes import byte_size, written_dtype
from qtool.formats.facts import Options
from qtool.formats.safetensors_file import Layout, TensorInfo, TensorSpec, plan_shards
from qtool.messages.remarks import told_apart
from qtool.native.library import default_threads
from qtool.planned import Planned
from qtool.planning import (
    budget,
    duration,
    engines,
    estimate,
    mlx,
    mxfp4,
    notes,
    shapes,
    unseen,
    whole,
)
from qtool.planning.actions import decided
from qtool.planning.budget import Memory
from qtool.planning.fit import format_options
from qtool.planning.handed import handed_on
from qtool.planning.mlx import stacks
from qtool.recipe.recipe import Recipe
from qtool.scheme import UNROUNDED, Action, Dense, Dropped, Scheme
from qtool.streaming.weights import is_view

__all__ = ["BlockStack", "Plan", "format_options", "make_plan"]

MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Plan:
    """What a run will do. `tensors` is in the order of the source."""

    recipe: Recipe
    tensors: tuple[Planned, ...]
    blocks: BlockStack
    layout: Layout
    warnings: tuple[str, ...]
    memory: Memory
    seconds: float
    cache: Mapping[int, Kept] = field(default_factory=dict)  # of blocks whose keys get scales

    @property
    def peak_rss_bytes(self) -> int:
        """Estimated."""
        return self.memory.estimated.nbytes

    @property
    def disk_bytes(self) -> int:
        """What a run keeps on the disk beside the artifact, to go on with."""
        return self.memory.disk_bytes

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

    @property
    def unquantized_share(self) -> float:
        """Share of the model's numbers that are stored dense; as `qtool inspect` counts it."""
        return notes.dense_share(self.tensors)

    @cached_property
    def by_name(self) -> Mapping[str, Planned]:
        """Source tensor name to its plan."""
        return {tensor.name: tensor for tensor in self.tensors}

    def target(self, name: str) -> Scheme | None:
        """The scheme that transforms make a tensor ready for: its own or, where the recipe leaves
        the rounding to another tool (method: none), the recipe's."""
        planned = self.by_name[name]
        if planned.action != UNROUNDED or self.recipe.weights is None:
            return planned.scheme
        scheme = self.recipe.scheme
        fits = scheme.group_size < 0 or planned.shape[1] % scheme.group_size == 0
        return scheme if fits else None

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
            "unquantized_share": self.unquantized_share,
            "peak_rss_bytes": self.peak_rss_bytes,
            "memory": self.memory.json(),
            "seconds": self.seconds,
            **told_apart(self.warnings),
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
    recipe: Recipe,
    checkpoint: Checkpoint,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    compare_all: bool = False,
    unknown: Collection[str] = (),
    threads: int | None = None,
    max_ram: int | None = None,
    from_stats: bool = False,
) -> Plan:
    """Plan `recipe` for a checkpoint. Reads tensor data only to compare a tied head's two copies:
    a megabyte at each end, or with `compare_all`, for a run, every byte.

    unknown: tensors that the model class was seen to have no place for; they are copied. Only a
    run that opens the class knows any. threads: by default every core. max_ram: bytes that a run
    may take; UnsupportedError where it cannot do with them. from_stats: a file says what was
    measured, so that no text passes back.
    Raises UnsupportedError for a source that cannot be quantized at all, FormatError where the
    recipe's format cannot hold what the recipe asks for, RecipeError for overrides of no tensor.
    """
    said: list[str] = []
    source = checkpoint
    beside.refuse_adapter(checkpoint)
    whole.refuse_no_config(checkpoint)
    mxfp4.refuse_others(recipe, checkpoint)
    if recipe.rotates:
        checkpoint, said = _rotated(recipe, checkpoint)
    tensors = checkpoint.tensors
    if recipe.rounding != "none" or recipe.transform_chain:
        structure.check_source(tensors, checkpoint.config)
    mxfp4.refuse_incomplete(recipe, checkpoint)
    whole.refuse_other_config(source)
    seems = whole.check_whole(source)
    blocks = structure.find_blocks(tensors, checkpoint.config)
    warnings = [
        *notes.idle(recipe),
        *notes.missing_files(checkpoint, recipe.calibrates and not from_stats),
    ]
    warnings += [*seems, *beside.said(checkpoint), *padding.said(checkpoint), *said]
    if recipe.calibrates and not from_stats:
        warnings += notes.past_positions(checkpoint.config, recipe.calibration.length)
    roles = roles_of(tensors, blocks)
    actions, more = decided(recipe, checkpoint, roles, unknown, compare_all)
    warnings += more
    options = format_options(recipe)
    cache: dict[str, Kept] = {}
    if recipe.kv_cache is not None and recipe.measures_cache:
        cache = planned_scales(roles, checkpoint.config, recipe.kv_cache.scale == "head")
    planned = tuple(
        Planned(
            name,
            info.shape,
            info.dtype,
            actions[name],
            (
                *_outputs(recipe, options, name, info, actions[name]),
                *(cache[name].specs() if name in cache else ()),
            ),
            roles[name].block,
            roles[name].reason == FUSED_EXPERTS,
        )
        for name, info in tensors.items()
    )
    mxfp4.refuse(recipe, checkpoint, planned)
    unseen.refuse(recipe, checkpoint, planned)
    mlx.refuse(recipe, checkpoint, planned)
    layout = plan_shards(
        [spec for tensor in planned for spec in tensor.outputs],
        max_shard_bytes,
        stack_of=stacks(recipe.format, checkpoint.config),
    )
    active = structure.active_share(checkpoint.config)
    counted = _counted(recipe, checkpoint, planned, active, from_stats)
    memory = budget.choose(
        counted if recipe.calibrates else None,
        threads or default_threads(),
        max_ram,
        partial(estimate.peak, counted),
    )
    seconds = duration.seconds(recipe, planned, counted, active, memory.setting)
    warnings += engines.warnings(recipe, planned, checkpoint.config)
    if recipe.format != "mxfp4":  # of which experts are all that is quantized
        warnings += notes.much_dense(planned)
    warnings += notes.wide_codes(planned) + notes.doubles(planned)
    of_block = {tensor.block: cache[tensor.name] for tensor in planned if tensor.name in cache}
    return Plan(
        recipe, planned, blocks, layout, tuple(warnings), memory, seconds,
        {block: kept for block, kept in of_block.items() if block is not None},
    )  # fmt: skip


def _counted(
    recipe: Recipe,
    checkpoint: Checkpoint,
    planned: tuple[Planned, ...],
    active: float,
    from_stats: bool,
) -> shapes.Shapes:
    """What memory and time depend on. active: the share of experts that a token passes."""
    handed = handed_on(checkpoint.config, recipe.calibration.length)
    counted = shapes.shapes_of(recipe, planned, active, handed)
    if is_view(checkpoint):
        inside = [one for one in planned if one.scheme is not None and one.block is not None]
        sizes = (byte_size(one.dtype, one.shape) for one in inside)
        counted = replace(counted, viewed=max(sizes, default=0))
    return replace(counted, guides=False, fed_back=0, text=0) if from_stats else counted


def _rotated(recipe: Recipe, checkpoint: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """The checkpoint with the head that a rotation unties, and sentences on it."""
    from qtool.transforms.rotated import Rotated, untied

    view = checkpoint
    if not isinstance(view, Rotated):
        view = untied(checkpoint, stream=recipe.rotate.r1)
    said = []
    if view.head is not None:
        head, embedding = view.head
        said.append(
            f"note: rotating unties the head from {embedding}, as it reads the last norm's gain: "
            f"{head} takes {view.tensors[head].nbytes:,} bytes more"
        )
    if view.refused is not None:
        said.append(f"note: rotate: the residual stream is not rotated: {view.refused}")
    return view, said


def _outputs(
    recipe: Recipe, options: Options, name: str, info: TensorInfo, action: Action
) -> tuple[TensorSpec, ...]:
    if isinstance(action, Dropped):
        return ()
    if isinstance(action, Dense):
        return (TensorSpec(name, written_dtype(info.dtype), info.shape),)
    prefix = name.removesuffix(".weight")
    return tuple(FORMATS[recipe.format].specs(prefix, action, info.shape, options))
