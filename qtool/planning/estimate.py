"""What memory a run will need at its highest, guessed from shapes.

    memory  = the process itself + hidden states, unless they are on the disk
            + the most of: reading the embedding, writing the head,
                  a block as float32 + Gram sums + the activations of a micro-batch a thread,
                  a block as float32 + Gram matrices + a matrix being rounded a thread

A Setting says how much of that is there at once. Rounding to nearest holds some rows a thread and
needs no forward pass; where it is rotated before, the proof of that runs each block as it was and
as it is then. The constants below are the only measured numbers.
"""

from dataclasses import replace

from qtool.memory import gram_sum_bytes
from qtool.planning.duration import REPORTED_ROWS
from qtool.planning.fitting import measuring
from qtool.planning.peak import (
    KEPT_BYTES_PER_WEIGHT,
    MOST_KEPT_BYTES,
    Peak,
    encoding,
    process_bytes,
    reading,
)
from qtool.planning.shapes import ROWS_AT_ONCE, Block, Input, Setting, Shapes

# Resident bytes of the process before any tensor is read.
PLAIN_PROCESS_BYTES = 67_000_000
ROUNDING_PROCESS_BYTES = 75_000_000
PROVING_PROCESS_BYTES = 415_000_000  # torch and transformers, but no calibration text
# Temporary float32 numbers for each token of a micro-batch under way, in widths of the hidden
# states and of the block's widest matrix; and copies of what its experts read.
ACTIVATIONS_OF_HIDDEN, ACTIVATIONS_OF_WIDEST, ROUTED_COPIES = 3.0, 3.0, 1.0
# Copies of a block's widest input that rotating it takes; and bytes of the parts of a dense tensor
# that are rotated while it is written.
ROTATED_COPIES, ROTATED_BYTES = 1.5, 110_000_000
# What autograd keeps of each token that a tuned block is run for, in float32 numbers: in widths of
# the hidden states and of the block's widest matrix. Where it ends behind attention, of the hidden
# states alone, or of these and of what queries, keys and values are, whichever is more.
KEPT_OF_HIDDEN, KEPT_OF_WIDEST = 26.0, 7.0
KEPT_OF_ATTENTION, KEPT_BEFORE_ATTENTION, KEPT_OF_ATTENDING = 28.0, 9.0, 6.0
# The same of one whose parameters have no gradients, with those of what its matrices give.
BACK_OF_HIDDEN, BACK_OF_WIDEST = 15.0, 6.0
# How much more hidden states take, with what goes beside them, where tokens are guided, states of
# the original model are followed or a block is tuned.
TUNED_STATES = 1.25
# Bytes of each number of the largest parameter of a block whose gradient a thread has, with
# products.
GRADIENT_BYTES = 5
# Bytes for each number of a Gram matrix that is being factored as a whole, beside its own, and of
# the factor; wider ones than WHOLE are factored in place.
SOLVE_BYTES, FACTOR_BYTES, WHOLE = 12, 4, 2048
# Bytes for each number of a Gram matrix and of what it is compared by, when the half that is summed
# becomes whole; and where the step is found that compensates for what is lost, narrow and wide.
PAIR_BYTES, STEP_BYTES, WIDE_STEP_BYTES = 10, 27, 22
# Temporary bytes per weight while a matrix is rounded and packed (float32 copies, codes, words);
# and while it is to nearest, of a block that is there in float32.
ROUNDING_BYTES_PER_WEIGHT, NEAREST_BYTES_PER_WEIGHT = 14, 8
# Where its rows are rounded some at a time: what these take, at most, and for each number of the
# largest one, and at most of floats of 4 bits; how often each thread has a matrix as it is stored,
# and how much of it is left in memory. The same of rows so wide that the fewest of them are more
# than FREE_OF_BAND, and of those that are compared at the end; and where a view makes the matrices,
# for each byte of one.
BAND_BYTES_PER_WEIGHT, FREE_OF_BAND = 24, 20_000_000
REPORTED_BYTES_PER_WEIGHT, VIEW_BYTES_PER_BYTE = 26, 1.105
ROWS_BYTES, ROWS_BYTES_PER_WEIGHT, ROWS_BYTES_OF_FOURS = 10_000_000, 7, 15_000_000
STORED_TIMES, KEPT_BYTES_OF_ROUNDED = 1.3, 0.33
# The same of integer codes whose groups are neighbours, which the kernels read back: codes,
# what they stand for, words.
LIGHT_BYTES_PER_WEIGHT = 6
# The same of the rows of a head or an embedding that a thread rounds at once.
HEAD_BYTES_PER_WEIGHT = 19
# Bytes for each weight of a matrix whose rows compensate for each other.
FED_BACK_BYTES = 10
# What a run has open that measures gradients of the loss first, beside what `qtool fit` has.
BESIDE_GRADIENTS_BYTES = 60_000_000
PROVING = "a block in float32, as it was and rotated"


def peak(shapes: Shapes, setting: Setting) -> Peak:
    """Resident memory at its highest, and what it is for."""
    if not shapes.calibrates:
        return (_rotated_peak if shapes.rotates else _plain_peak)(shapes, setting)
    stages = [
        encoding(shapes),
        Peak(_embedding(shapes), "looking up the words of the calibration text"),
        _copying(shapes),
        Peak(proving(shapes) if shapes.rotates else 0, PROVING),
        *(stage for block in shapes.blocks for stage in _in_block(shapes, block, setting)),
        _head(shapes, setting),
    ]
    most = max(stages, key=lambda stage: stage.nbytes)
    gradients = Peak(0, "")
    if shapes.fed_back:
        fed = replace(shapes, tokens=shapes.fed_back)
        gradients = measuring(fed, setting.threads, shapes.batch)
        gradients = replace(gradients, nbytes=gradients.nbytes + BESIDE_GRADIENTS_BYTES)
    states = 0 if setting.states_on_disk else shapes.states
    apart = TUNED_STATES if shapes.follows or shapes.guides else 1.0
    base = process_bytes(shapes) + int(states * apart)
    return max(Peak(base + most.nbytes, most.of), gradients, key=lambda stage: stage.nbytes)


def _plain_peak(shapes: Shapes, setting: Setting) -> Peak:
    """The same of a run that rounds each matrix on its own: a thread has some rows of one, and all
    of what they become; then one after another is read back."""
    threads = setting.threads
    most = ROWS_BYTES_OF_FOURS if shapes.fours else ROWS_BYTES
    rows = min(most, ROWS_BYTES_PER_WEIGHT * shapes.quantized)
    band = max(0, BAND_BYTES_PER_WEIGHT * shapes.band - FREE_OF_BAND)
    reported = REPORTED_BYTES_PER_WEIGHT * REPORTED_ROWS * shapes.width
    view = int(threads * VIEW_BYTES_PER_BYTE * shapes.viewed)
    whole = threads * shapes.whole * ROUNDING_BYTES_PER_WEIGHT
    kept = int((threads - 1) * shapes.stored * KEPT_BYTES_OF_ROUNDED)
    # Twice now and then, of threads that end together; a view's come one after another.
    stored = shapes.stored if shapes.viewed else int(STORED_TIMES * shapes.stored)
    together = threads * (rows + stored) + max(band, reported)
    stages = [
        Peak(together + view, "some rows for each thread"),
        Peak(whole + view, "one tensor for each thread"),
        Peak(rows + shapes.back + kept + view, "a quantized matrix, read back"),
        Peak(rows + shapes.head, "the quantized head, read back"),
    ]
    highest = max(stages, key=lambda stage: stage.nbytes)
    return Peak(ROUNDING_PROCESS_BYTES + highest.nbytes, highest.of)


def _head(shapes: Shapes, setting: Setting) -> Peak:
    weights, stored = shapes.heads
    rounding = stored + HEAD_BYTES_PER_WEIGHT * setting.threads * min(weights, ROWS_AT_ONCE)
    back = Peak(shapes.head, "reading the quantized head back")
    return max(back, Peak(rounding, "rounding the head"), key=lambda stage: stage.nbytes)


def _rotated_peak(shapes: Shapes, setting: Setting) -> Peak:
    """The same where the tensors are rotated: those with mixed rows are kept, two at a time."""
    rounding = (2 * 4 + setting.threads * ROUNDING_BYTES_PER_WEIGHT) * shapes.quantized
    stages = [
        Peak(proving(shapes), PROVING),
        _copying(shapes),
        Peak(rounding, "one tensor for each thread"),
        _head(shapes, setting),
    ]
    most = max(stages, key=lambda stage: stage.nbytes)
    return Peak(PROVING_PROCESS_BYTES + most.nbytes, most.of)


def proving(shapes: Shapes) -> int:
    """Bytes of a block and of the same rotated, while its last tensor is read and rotated."""
    each = (2 * one.nbytes + 4 * one.largest + reading(2 * one.largest) for one in shapes.blocks)
    return max(each, default=0)


def _embedding(shapes: Shapes) -> int:
    rows = min(shapes.tokens, shapes.vocabulary)
    width = shapes.hidden + shapes.handed.given
    return 4 * width * (rows + 3 * shapes.batch) + reading(shapes.outside)


def _copying(shapes: Shapes) -> Peak:
    """A dense tensor while it is checked and written, in parts: these are small beside all else,
    unless they are rotated. Of other views the whole is there as it is stored."""
    nbytes = ROTATED_BYTES if shapes.rotates else shapes.outside if shapes.viewed else 0
    return Peak(nbytes, "copying the embedding or the head")


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
    jobs = sum(sorted((_job(shapes, one) for one in together), reverse=True)[:threads])
    most = max((one.largest for one in block.inputs), default=0) if shapes.grams else 0
    free = threads * min(KEPT_BYTES_PER_WEIGHT * most, MOST_KEPT_BYTES)
    jobs += free
    codes = block.nbytes // 2 if shapes.tunes else 0  # as they were and with other scales
    guiding = []
    counted = batches * 4 * shapes.batch * shapes.hidden if shapes.guides else 0
    if shapes.guides:
        each = KEPT_BEFORE_ATTENTION * shapes.passed + KEPT_OF_ATTENDING * block.attending
        graph = batches * int(4 * shapes.batch * max(KEPT_OF_ATTENTION * shapes.passed, each))
        guiding = [Peak(block.nbytes + graph, "gradients of keys and values")]
    backs = []
    if shapes.fed_back:
        rows = 4 * sum(out**2 for out in block.made)
        shared = shapes.hidden if block.given else 0  # by all experts
        kept = BACK_OF_HIDDEN * shapes.passed + BACK_OF_WIDEST * block.widest
        kept = max(kept, 2 * sum(block.made)) + 3 * block.given  # gradients, and as they count
        back = max(batches * int(4 * shapes.batch * kept), _solving(shared))
        back += block.nbytes + matrices + rows + 4 * shared**2 + free
        backs = [Peak(back, "gradients by what matrices of a block give")]
        jobs += rows + 4 * shared**2
    tuning = []
    if shapes.tunes:
        kept = KEPT_OF_HIDDEN * shapes.passed + KEPT_OF_WIDEST * block.widest
        gradients = min(batches, shapes.tunes) * (
            int(4 * shapes.batch * kept) + GRADIENT_BYTES * block.largest
        )
        tuning = [Peak(block.nbytes + codes + gradients, "tuning the scales of a block")]
    comparing = []
    if shapes.compensates:  # one input after another, in a block and in a copy of it as it was
        most = max((one.width for one in block.inputs if one.share is None), default=0)
        rows = batches * 4 * shapes.batch * most
        step = (STEP_BYTES if most <= WHOLE else WIDE_STEP_BYTES) * most**2
        comparing = [
            Peak(
                2 * block.nbytes + running + counted + rows + PAIR_BYTES * most**2,
                "comparing a block's inputs with the original's",
            ),
            Peak(2 * block.nbytes + step + 8 * block.largest, "compensating for what inputs lost"),
            Peak(2 * block.nbytes + 4 * most**2 + jobs, "rounding the matrices of a block"),
        ]
    return [
        *tuning,
        *comparing,
        *guiding,
        *backs,
        Peak(block.nbytes + reading(2 * block.largest), "reading a block as float32"),
        Peak(block.nbytes + running + counted + sums, "measuring a block's inputs"),
        Peak(block.nbytes + matrices + 4 * widest**2, "the Gram matrices of a block"),
        Peak(block.nbytes + matrices + proof, "proving which matrices take scales"),
        Peak(block.nbytes + codes + matrices + jobs, "rounding the matrices of a block"),
    ]


def _job(shapes: Shapes, one: Input) -> int:
    """What a thread needs to round the matrices that read one input, one after another."""
    if not shapes.grams:
        return NEAREST_BYTES_PER_WEIGHT * one.largest
    each = LIGHT_BYTES_PER_WEIGHT if shapes.light else ROUNDING_BYTES_PER_WEIGHT
    if not shapes.solves:
        return each * one.largest
    solved = FACTOR_BYTES * one.width**2
    alone = max(_solving(one.width), solved + each * one.largest)
    if not shapes.fed_back:
        return alone
    # The factor of a matrix's rows takes the place of what it is made of.
    return max(alone, solved + _solving(one.rows), solved + FED_BACK_BYTES * one.fed)


def _solving(width: int) -> int:
    """Bytes that it takes to factor a matrix [width, width], beside its own."""
    return (SOLVE_BYTES if width <= WHOLE else FACTOR_BYTES) * width**2


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
    widest = ACTIVATIONS_OF_WIDEST + (ROTATED_COPIES if shapes.rotates_online else 0)
    widest += 0 if shapes.grams else 1  # magnitudes
    dense = ACTIVATIONS_OF_HIDDEN * shapes.passed + widest * block.widest
    routed = sum(one.share * one.width for one in block.inputs if one.share is not None)
    return int(4 * shapes.batch * (dense + ROUTED_COPIES * routed))
