"""How long a run will take, guessed from shapes.

    seconds = tokens * flops of the forward passes and Gram matrices, flops of the solves,
              and bytes read and written, each over a measured rate

The constants below are the only measured numbers.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qtool.formats.layer_names import is_head
from qtool.planning.shapes import Setting, Shapes, groups, is_last

if TYPE_CHECKING:
    from qtool.planned import Planned
    from qtool.recipe.methods import TuneOptions
    from qtool.recipe.recipe import Recipe
    from qtool.scheme import Scheme

# Rates of one core: matrix products, element-wise rounding (weights per second).
FLOPS_PER_CORE = 8.5e10
ROUNDED_PER_CORE = 1.5e8
STORAGE_BYTES_PER_SECOND = 4.0e8
STARTUP_SECONDS = {False: 0.3, True: 6.0}
# Of each matrix that is quantized, whatever its size: small arrays of its factor, scales and codes,
# looks at what it lost, and files.
MATRIX_SECONDS = 5e-3
# What a forward pass does beside products with matrices, for each token and column of a block:
# attention, as operations for each token that another looks at, and all that reads and writes
# states, in seconds of a core. (Blocks of Llama, 576 to 4096 wide, samples of 512: 7e-8 to 1.1e-7.)
ATTENTION, ELEMENTWISE_SECONDS = 5.0, 5.0e-8
# And for each column that an expert's matrix reads or gives, of each token that it meets.
EXPERT_SECONDS = 3.5e-9
REPORTED_ROWS = 256  # of each matrix, for its relative error
# Weights that one core rotates in a second, and how often: for the proof, and for what is written.
TURNED_PER_CORE, TURNS = 2.0e7, 2
# What a search costs, in roundings of the matrix: over clipped ranges; over the E4M3 numbers around
# the scale of a group of small floats; and of scales that are powers of two, of which the better of
# two is always taken. (A Llama 4096 wide.)
CLIP_TRIALS, LADDER_TRIALS, POWER_TRIALS = 7.0, 3.0, 1.5
# The part of X'X that is computed: strips on and above the diagonal.
GRAM_SHARE = 0.55
# AWQ's search looks at this many rows of a site, for so many exponents of the weights each, and
# compares so many finalists exactly.
AWQ_ROWS, AWQ_EXPONENTS, AWQ_FINALISTS = 256, 5, 5
# A step of tuning takes so many times a forward pass: for what a block gives back, for gradients by
# inputs and by weights, and for what autograd adds.
STEP_PASSES = 4.0
# Smoothing's search multiplies this many rows of a site with its Gram matrix, for each exponent.
SMOOTH_ROWS = 128
# Forward passes to each of a block's four inputs, of two models, and one on.
COMPARING_PASSES = 4.5
# To where keys and values are read, and back.
GUIDED_PASSES = 0.8
# Forward and backward passes of some tokens through all blocks and the head, and of each block
# again back, with products of what its matrices give.
FED_BACK_PASSES = 7.0


def feeding_back(shapes: Shapes, weights: float) -> float:
    """Operations that it takes to measure sensitivities. weights: that a token meets, the head's
    included."""
    return 2.0 * FED_BACK_PASSES * shapes.fed_back * weights


def fed_back(shapes: Shapes, out: int, width: int) -> float:
    """Operations by which the rows of a matrix compensate for each other, beside its being swept:
    products of gradients, their factor, and what rows are told."""
    if not shapes.fed_back:
        return 0.0
    return 2.0 * out * (shapes.fed_back * out + out**2 + out * width)


def fed_back_experts(shapes: Shapes, met: float, experts: int, out: int, width: int) -> float:
    """The same of the last matrices of experts, of which a token meets `met`; but for the factor,
    which a block has one of."""
    if not shapes.fed_back:
        return 0.0
    return 2.0 * out * (met * shapes.fed_back * out + experts * out * width)


def beside(shapes: Shapes, passes: float) -> float:
    """Seconds of a core that passes through all blocks take beside products with matrices. Those
    of GUIDED_PASSES, FED_BACK_PASSES and STEP_PASSES were measured with all that they do."""
    each = ATTENTION * shapes.length / FLOPS_PER_CORE + ELEMENTWISE_SECONDS
    return passes * each * shapes.tokens * shapes.hidden * shapes.count


def beside_experts(met: float, columns: int, passes: float) -> float:
    """The same of an expert's matrix, which meets so many tokens. columns: out and in."""
    return EXPERT_SECONDS * passes * met * columns


def rotating(weights: int) -> float:
    """Seconds that the proof of a rotation takes, and making the `weights` that it changes, beside
    starting up with torch."""
    return TURNS * weights / TURNED_PER_CORE


def tuning(options: "TuneOptions", shapes: Shapes, share: float, weights: int, cores: int) -> float:
    """Seconds that the scales of a matrix take. share: of the tokens that come to it."""
    stepped = STEP_PASSES * options.steps * options.batch * shapes.batch * share
    stepped /= FLOPS_PER_CORE * min(cores, options.batch)
    original = shapes.tokens * share / (FLOPS_PER_CORE * cores)
    return 2.0 * weights * (stepped + original)


def sweeping_head(shapes: Shapes, head: tuple[int, ...]) -> float:
    """Operations that GPTQ's sweep of the output head takes beside its being rounded."""
    out, width = head
    return 2.0 * width**2 * (GRAM_SHARE * shapes.tokens + width + out)


def trials(recipe: "Recipe", scheme: "Scheme") -> float:
    """How many roundings it takes as long as to round a matrix."""
    if scheme.scale_dtype == "e8m0":
        return POWER_TRIALS
    if not recipe.clips:
        return 1.0
    return LADDER_TRIALS if scheme.is_float else CLIP_TRIALS


def seconds(
    recipe: "Recipe",
    tensors: "Sequence[Planned]",
    shapes: Shapes,
    active: float,
    setting: Setting,
) -> float:
    """How long a run over `tensors`, with these shapes, takes. active: as shapes_of has it."""
    from qtool.checkpoints import structure

    cores = setting.threads
    written = sum(tensor.nbytes for tensor in tensors)
    read = sum(tensor.parameters for tensor in tensors) * 2
    with_torch = recipe.calibrates or recipe.rotates
    seconds = STARTUP_SECONDS[with_torch] + (read + written) / STORAGE_BYTES_PER_SECOND
    rounded = sum(
        tensor.parameters * trials(recipe, tensor.scheme)
        for tensor in tensors
        if tensor.scheme is not None
    )
    seconds += rounded / (ROUNDED_PER_CORE * cores)
    if recipe.rotates:
        seconds += rotating(sum(tensor.parameters for tensor in tensors))
    if not recipe.calibrates:
        return round(seconds, 1)
    grams: dict[int, set[str]] = defaultdict(set)  # block -> input sites
    flops = 0.0
    # Each group of inputs takes a forward pass, and so does going on to the next block.
    passes = 1.0 + max((groups(shapes, block, setting) for block in shapes.blocks), default=1)
    if recipe.compensates:
        passes += COMPARING_PASSES
    seconds += beside(shapes, passes) / cores
    if shapes.guides:
        passes += GUIDED_PASSES
    for tensor in tensors:
        if tensor.scheme is None or len(tensor.shape) != 2:
            continue
        if tensor.block is None:
            if recipe.rounding == "gptq" and is_head(tensor.module):  # not an embedding
                flops += sweeping_head(shapes, tensor.shape)
            continue
        out, width = tensor.shape
        routed = structure.expert_of(tensor.name) is not None
        seen = shapes.tokens * (active if routed else 1.0)
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
            if recipe.compensates:
                flops += 3.1 * seen * width**2 + 6.0 * width**3
        flops += passes * 2.0 * seen * out * width
        seconds += (MATRIX_SECONDS + routed * beside_experts(seen, out + width, passes)) / cores
        if shapes.grams:
            flops += 4.0 * min(out, REPORTED_ROWS) * width**2
        if recipe.tunes:
            seconds += tuning(recipe.tune, shapes, seen / shapes.tokens, out * width, cores)
        if recipe.rounding == "gptq":
            flops += 2.0 * out * width * width
            if not routed:
                flops += fed_back(shapes, out, width)
            elif is_last(tensor.module):
                flops += fed_back_experts(shapes, active, 1, out, width)
    if shapes.fed_back:
        met = (
            tensor.parameters * (active if structure.expert_of(tensor.name) is not None else 1.0)
            for tensor in tensors
            if len(tensor.shape) == 2
        )
        flops += feeding_back(shapes, sum(met))
    seconds += flops / (FLOPS_PER_CORE * cores)
    if setting.states_on_disk:
        seconds += 2 * (1 + passes) * shapes.states * len(grams) / STORAGE_BYTES_PER_SECOND
    return round(seconds, 1)
