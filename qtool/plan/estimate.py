"""What a run will need, guessed from shapes: peak resident memory and seconds.

    memory  = the process itself + hidden states, unless they are on the disk
            + the most of: reading the embedding, writing the head,
                  a block as float32 + Gram sums + the activations of a micro-batch a thread,
                  a block as float32 + Gram matrices + a matrix being rounded a thread
    seconds = tokens * flops of the forward passes and Gram matrices, flops of the solves,
              and bytes read and written, each over a measured rate

A Setting says how much of that is there at once. Rounding to nearest holds one matrix a thread and
needs no forward pass; where it is rotated before, the proof of that runs each block as it was and
as it is then. The constants below are the only measured numbers.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qtool.plan.planned import Planned
    from qtool.recipe.recipe import Recipe

# Resident bytes of the process before any tensor is read.
PLAIN_PROCESS_BYTES = 55_000_000
TORCH_PROCESS_BYTES = 461_000_000
PROVING_PROCESS_BYTES = 395_000_000  # torch and transformers, but no calibration text
# Bytes of a tensor that are read at once, and how often they are in memory while that lasts.
READ_BYTES, READ_COPIES = 1 << 25, 2
# What a dense tensor takes while it is checked and written, in copies.
OUTSIDE_COPIES = 1.0
# Temporary float32 numbers for each token of a micro-batch under way, in widths of the hidden
# states and of the block's widest matrix; and copies of what its experts read.
ACTIVATIONS_OF_HIDDEN, ACTIVATIONS_OF_WIDEST, ROUTED_COPIES = 3.0, 3.0, 1.0
# Bytes for each number of a Gram matrix that is being factored, beside its own, and of the factor.
SOLVE_BYTES, FACTOR_BYTES = 8, 4
MICRO_BATCH_TOKENS = 1024  # as qtool.calibrating.skeleton has it, which needs torch
# Temporary bytes per weight while a matrix is rounded and packed (float32 copies, codes, words),
# and while it is swept column by column.
ROUNDING_BYTES_PER_WEIGHT, SWEEP_BYTES_PER_WEIGHT = 14, 18
# Gram matrices that are in memory together, where the recipe leaves a choice. Of a dense block of
# 32 billion parameters all fit; of 256 experts a few dozen.
GRAM_BYTES = 4 << 30
# Rates of one core: matrix products, element-wise rounding (weights per second).
FLOPS_PER_CORE = 8.5e10
ROUNDED_PER_CORE = 1.5e8
STORAGE_BYTES_PER_SECOND = 4.0e8
STARTUP_SECONDS = {False: 0.3, True: 4.0}
# Weights that one core rotates in a second, and how often: for the proof, and for what is written.
TURNED_PER_CORE, TURNS = 2.0e7, 2
# What a search over clipped ranges costs, in roundings of the matrix.
CLIP_TRIALS = 7
# The part of X'X that is computed: strips on and above the diagonal.
GRAM_SHARE = 0.55
# AWQ's search looks at this many rows of a site, for so many exponents of the weights each, and
# compares so many finalists exactly.
AWQ_ROWS, AWQ_EXPONENTS, AWQ_FINALISTS = 256, 5, 5
# Smoothing's search multiplies this many rows of a site with its Gram matrix, for each exponent.
SMOOTH_ROWS = 128

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Setting:
    """How much of a run is in memory at once. No byte of what it writes depends on it."""

    threads: int
    states_on_disk: bool = False
    gram_bytes: int = GRAM_BYTES


@dataclass(frozen=True)
class Peak:
    """Resident bytes, and in words what most of them are."""

    nbytes: int
    of: str


@dataclass(frozen=True)
class Cost:
    """An estimate."""

    peak_rss_bytes: int
    seconds: float


@dataclass(frozen=True)
class Input:
    """What matrices of a block read together."""

    width: int
    largest: int  # numbers in the largest of the matrices
    share: float | None = None  # of an expert's: of the tokens that come here


@dataclass(frozen=True)
class Block:
    """What a decoder block needs memory for."""

    nbytes: int  # as float32
    largest: int  # numbers in its largest tensor
    widest: int  # the longer side of its largest matrix that every token meets
    inputs: tuple[Input, ...]  # the widest first
    folded: int = 0  # most numbers in matrices of one kind of input, those of all experts together


def gram_sum_bytes(width: int) -> int:
    """Bytes of a Gram matrix while it is summed: half of it, in float64."""
    return width**2 * 9 // 2


def usable_cores() -> int:
    """The cores this process may run on, which in a container are fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class Shapes:
    """What the memory of a run depends on, beside its setting."""

    calibrates: bool
    tokens: int
    batch: int  # tokens of a micro-batch
    hidden: int  # width of the hidden states
    vocabulary: int
    outside: int  # bytes of the largest tensor of no block
    largest: int  # numbers in the largest tensor
    quantized: int  # numbers in the largest matrix that is quantized
    blocks: tuple[Block, ...]  # one of each kind
    grams: bool  # whether Gram matrices are measured
    chained: bool  # of all of a block's inputs together, since transforms share scales
    solves: bool  # whether they are factored
    rotates: bool = False
    turned: tuple[int, ...] = ()  # bytes of each tensor of no block, in float32 and as it is stored

    @property
    def states(self) -> int:
        """Bytes of the hidden states of all tokens."""
        return 4 * self.tokens * self.hidden


def micro_batch(samples: int, length: int) -> int:
    """Tokens that pass through a block together."""
    return length * min(samples, -(-MICRO_BATCH_TOKENS // length))


def shapes_of(recipe: "Recipe", tensors: "Iterable[Planned]", active: float = 1.0) -> Shapes:
    """What counts of a plan. active: the share of a block's experts that a token visits."""
    from qtool import structure  # not where only the constants above are wanted

    inside: dict[int, list[Planned]] = defaultdict(list)
    outside = vocabulary = quantized = largest = hidden = 0
    turned: list[int] = []
    for tensor in tensors:
        largest = max(largest, tensor.parameters)
        if tensor.scheme is not None:
            quantized = max(quantized, tensor.parameters)
        if tensor.block is not None:
            inside[tensor.block].append(tensor)
        elif len(tensor.shape) == 2:
            outside = max(outside, tensor.nbytes)
            turned.append(4 * tensor.parameters + tensor.nbytes)
            vocabulary = max(vocabulary, tensor.shape[0])
            hidden = max(hidden, tensor.shape[1])
    blocks = set()
    for group in inside.values():
        inputs: dict[str, Input] = {}
        alike: dict[str, int] = defaultdict(int)
        widest = 0
        for tensor in group:
            if len(tensor.shape) != 2:
                continue
            share = active if structure.expert_of(tensor.name) is not None else None
            if share is None:
                widest = max(widest, *tensor.shape)
            if tensor.scheme is not None:
                site = structure.input_site(tensor.module)
                alike[_NUMBER.sub("*", site)] += tensor.parameters
                before = inputs.get(site, Input(tensor.shape[1], 0, share))
                inputs[site] = replace(before, largest=max(before.largest, tensor.parameters))
        ordered = sorted(inputs.values(), key=lambda one: (-one.width, -one.largest))
        numbers = [tensor.parameters for tensor in group]
        folded = max(alike.values(), default=0)
        blocks.add(Block(4 * sum(numbers), max(numbers), widest, tuple(ordered), folded))
    settings = recipe.calibration
    grams = "awq" in recipe.transform_chain or recipe.rounding == "gptq" or recipe.searches_scales
    return Shapes(
        calibrates=recipe.calibrates,
        tokens=settings.samples * settings.length,
        batch=micro_batch(settings.samples, settings.length),
        hidden=hidden,
        vocabulary=vocabulary,
        outside=outside,
        largest=largest,
        quantized=quantized,
        blocks=tuple(blocks),
        grams=grams,
        chained=recipe.shares_scales,
        solves=recipe.rounding == "gptq",
        rotates=recipe.rotates,
        turned=tuple(sorted(turned, reverse=True)),
    )


def peak(shapes: Shapes, setting: Setting) -> Peak:
    """Resident memory at its highest, and what it is for."""
    if not shapes.calibrates:
        return (_rotated_peak if shapes.rotates else _plain_peak)(shapes, setting)
    stages = [
        Peak(_embedding(shapes), "looking up the words of the calibration text"),
        Peak(int(OUTSIDE_COPIES * shapes.outside), "copying the embedding or the head"),
        *(stage for block in shapes.blocks for stage in _in_block(shapes, block, setting)),
    ]
    most = max(stages, key=lambda stage: stage.nbytes)
    base = TORCH_PROCESS_BYTES + (0 if setting.states_on_disk else shapes.states)
    return Peak(base + most.nbytes, most.of)


def _plain_peak(shapes: Shapes, setting: Setting) -> Peak:
    """The same of a run that rounds each tensor on its own: one a thread is there."""
    rounding = setting.threads * shapes.quantized * ROUNDING_BYTES_PER_WEIGHT
    return Peak(
        PLAIN_PROCESS_BYTES + max(rounding, 4 * shapes.largest),
        "one tensor for each thread",
    )


def _rotated_peak(shapes: Shapes, setting: Setting) -> Peak:
    """The same where the tensors are rotated: those with mixed rows are kept, two at a time."""
    rounding = (2 * 4 + setting.threads * ROUNDING_BYTES_PER_WEIGHT) * shapes.quantized
    stages = [
        Peak(proving(shapes), "a block in float32, as it was and rotated"),
        Peak(rounding, "one tensor for each thread"),
        Peak(sum(shapes.turned[: setting.threads]), "rotating the embedding and the head"),
    ]
    most = max(stages, key=lambda stage: stage.nbytes)
    return Peak(PROVING_PROCESS_BYTES + most.nbytes, most.of)


def proving(shapes: Shapes) -> int:
    """Bytes of a block and of the same rotated, while its last tensor is read and rotated."""
    each = (2 * one.nbytes + 4 * one.largest + reading(2 * one.largest) for one in shapes.blocks)
    return max(each, default=0)


def turning(weights: int) -> float:
    """Seconds that the proof of a rotation takes, and making the `weights` that it changes."""
    return STARTUP_SECONDS[True] + TURNS * weights / TURNED_PER_CORE


def groups(shapes: Shapes, block: Block, setting: Setting) -> int:
    """How many times the inputs of a block are measured, some at a time."""
    if not shapes.grams or shapes.chained:
        return 1
    total = sum(gram_sum_bytes(one.width) for one in block.inputs)
    return max(1, -(-total // setting.gram_bytes))


def reading(nbytes: int) -> int:
    """Bytes that it takes to read a tensor of `nbytes`, beside what is made of it."""
    return READ_COPIES * min(nbytes, READ_BYTES)


def _embedding(shapes: Shapes) -> int:
    rows = min(shapes.tokens, shapes.vocabulary)
    return 4 * shapes.hidden * (rows + 3 * shapes.batch) + reading(shapes.outside)


def _in_block(shapes: Shapes, block: Block, setting: Setting) -> list[Peak]:
    """What a block needs while it is read, measured, quantized and run."""
    together = _together(shapes, block, setting)
    threads = setting.threads
    measured = together if shapes.grams else []
    sums = sum(gram_sum_bytes(one.width) for one in measured)
    widest = max((one.width for one in measured), default=0)
    matrices = sum(4 * one.width**2 for one in measured)
    proof = 4 * block.folded if shapes.chained else 0
    batches = min(threads, -(-shapes.tokens // max(1, shapes.batch)))
    running = batches * activations(shapes, block)
    jobs = sum(_job(shapes, one) for one in together[:threads])
    return [
        Peak(block.nbytes + reading(2 * block.largest), "reading a block as float32"),
        Peak(block.nbytes + running + sums, "measuring a block's inputs"),
        Peak(block.nbytes + matrices + 4 * widest**2, "the Gram matrices of a block"),
        Peak(block.nbytes + matrices + proof, "proving which matrices take scales"),
        Peak(block.nbytes + matrices + jobs, "rounding the matrices of a block"),
    ]


def _job(shapes: Shapes, one: Input) -> int:
    """What a thread needs to round the matrices that read one input, one after another."""
    if not shapes.solves:
        return ROUNDING_BYTES_PER_WEIGHT * one.largest
    sweep = FACTOR_BYTES * one.width**2 + SWEEP_BYTES_PER_WEIGHT * one.largest
    return max(SOLVE_BYTES * one.width**2, sweep)


def _together(shapes: Shapes, block: Block, setting: Setting) -> list[Input]:
    """The inputs that are measured together, at worst; the widest first."""
    if not shapes.grams or shapes.chained:
        return list(block.inputs)
    found: list[Input] = []
    room = setting.gram_bytes
    for one in block.inputs:
        if not found or gram_sum_bytes(one.width) <= room:
            found.append(one)
            room -= gram_sum_bytes(one.width)
    return found


def activations(shapes: Shapes, block: Block) -> int:
    """Bytes that one thread needs to run a micro-batch, and keeps of it for experts."""
    dense = ACTIVATIONS_OF_HIDDEN * shapes.hidden + ACTIVATIONS_OF_WIDEST * block.widest
    routed = sum(one.share * one.width for one in block.inputs if one.share is not None)
    return int(4 * shapes.batch * (dense + ROUTED_COPIES * routed))


def seconds(
    recipe: "Recipe",
    tensors: "Sequence[Planned]",
    shapes: Shapes,
    active: float,
    setting: Setting,
) -> float:
    """How long a run over `tensors`, with these shapes, takes. active: as shapes_of has it."""
    from qtool import structure

    cores = setting.threads
    written = sum(tensor.nbytes for tensor in tensors)
    read = sum(tensor.parameters for tensor in tensors) * 2
    seconds = STARTUP_SECONDS[recipe.calibrates] + (read + written) / STORAGE_BYTES_PER_SECOND
    weights = sum(tensor.parameters for tensor in tensors if tensor.scheme is not None)
    trials = CLIP_TRIALS if recipe.clips else 1
    seconds += trials * weights / (ROUNDED_PER_CORE * cores)
    if not recipe.calibrates:
        proof = turning(sum(tensor.parameters for tensor in tensors)) if recipe.rotates else 0.0
        return round(seconds + proof, 1)
    grams: dict[int, set[str]] = defaultdict(set)  # block -> input sites
    flops = 0.0
    # Each group of inputs takes a forward pass, and so does going on to the next block.
    passes = 1 + max((groups(shapes, block, setting) for block in shapes.blocks), default=1)
    for tensor in tensors:
        if tensor.block is None or tensor.scheme is None or len(tensor.shape) != 2:
            continue
        out, width = tensor.shape
        seen = shapes.tokens * (active if structure.expert_of(tensor.name) is not None else 1.0)
        site = structure.input_site(tensor.module)
        if site not in grams[tensor.block]:
            grams[tensor.block].add(site)
            if shapes.grams:
                flops += GRAM_SHARE * 2.0 * seen * width * width
            if recipe.searches_scales:
                flops += recipe.smooth.grid * 2.0 * SMOOTH_ROWS * width * width
            if "awq" in recipe.transform_chain:
                flops += AWQ_FINALISTS * 2.0 * AWQ_ROWS * width * width
                searched = recipe.awq.grid * AWQ_EXPONENTS * AWQ_ROWS * width
                seconds += searched / (ROUNDED_PER_CORE * cores)
            if recipe.rounding == "gptq":
                flops += 2.0 * width**3
        flops += passes * 2.0 * seen * out * width
        if recipe.rounding == "gptq":
            flops += 2.0 * out * width * width
    seconds += flops / (FLOPS_PER_CORE * cores)
    if setting.states_on_disk:
        seconds += 2 * (1 + passes) * shapes.states * len(grams) / STORAGE_BYTES_PER_SECOND
    return round(seconds, 1)
