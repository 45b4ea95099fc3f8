"""`--max-ram`: what memory a fit will need at its highest, guessed from shapes, and how many
threads may work so that it stays within a budget. No byte of the recipe depends on it.

    memory = the process itself + sensitivities of all matrices
             + the most of: rows of tables, and the backward pass to them,
                   the head as float32 + logits a thread,
                   a block as float32 + what autograd keeps of a micro-batch a thread,
                   the table of the knapsack

States and gradients are on the disk. The constants below are the only measured numbers.
"""

from dataclasses import dataclass, replace
from functools import partial

from qtool.planning.budget import Memory, choose
from qtool.planning.peak import (
    MOST_KEPT_BYTES,
    TORCH_PROCESS_BYTES,
    Peak,
    encoding,
    process_bytes,
    reading,
)
from qtool.planning.shapes import Block, Setting, Shapes, micro_batch, table_bytes, text_bytes
from qtool.recipe.file import Calibration

TOGETHER = 512  # tokens whose way through a block a thread keeps for the backward pass
STEPS = 200_000  # of a size, that the knapsack tells apart
LOGITS = 1 << 22  # that a thread has at once, of a few tokens, or of one

# What a thread has of logits at once, in copies: they, their logarithms, chances, gradients.
_LOGIT_COPIES = 7
# What autograd keeps of each token, and needs in the backward pass, in float32 numbers: in widths
# of the hidden states, of the block's widest matrix, and of what experts read and give.
_OF_HIDDEN, _OF_WIDEST, _OF_ROUTED = 26, 7, 6
_OF_TABLES = 6  # micro-batches of rows, and of gradients by them


@dataclass(frozen=True)
class Fitting:
    """What a fit needs memory for."""

    shapes: Shapes
    header_bytes: int  # of the artifact, which each plan has
    units: int  # to choose for


def passing(shapes: Shapes, settings: Calibration) -> Shapes:
    """Of the text that is measured."""
    samples, length = settings.samples, settings.length
    text, tables = text_bytes(settings), table_bytes(settings)
    return replace(shapes, tokens=samples * length, length=length, text=text, tables=tables)


def memory(fitting: Fitting, threads: int, max_ram: int | None, *, chooses_only: bool) -> Memory:
    """The most threads with which it stays within max_ram; UnsupportedError where none are so few.

    chooses_only: where all is measured already.
    """
    estimated = partial(_choosing, fitting) if chooses_only else partial(_peak, fitting)
    return choose(None, threads, max_ram, estimated)


def _choosing(fitting: Fitting, _: Setting) -> Peak:
    table = fitting.units * STEPS + 8 * 4 * STEPS
    return Peak(TORCH_PROCESS_BYTES + fitting.header_bytes + table, "what each size would lose")


def _peak(fitting: Fitting, setting: Setting) -> Peak:
    found = measuring(fitting.shapes, setting.threads)
    found = replace(found, nbytes=found.nbytes + fitting.header_bytes)
    return max(_choosing(fitting, setting), found, key=lambda one: one.nbytes)


def measuring(shapes: Shapes, threads: int, together: int = TOGETHER) -> Peak:
    """What it takes to measure sensitivities, in micro-batches of so many tokens, beside the header
    of an artifact."""
    samples = shapes.tokens // shapes.length
    shapes = replace(shapes, batch=micro_batch(samples, shapes.length, together))
    batches = min(threads, -(-shapes.tokens // shapes.batch))
    rows = min(shapes.tokens, shapes.vocabulary) + _OF_TABLES * shapes.batch
    # A place of each sample at least.
    together = max(1, shapes.batch // shapes.length)
    places = together * max(1, LOGITS // max(1, shapes.vocabulary * together))
    logits = min(shapes.batch, places) * shapes.vocabulary
    head = 4 * shapes.vocabulary * shapes.hidden + 4 * batches * _LOGIT_COPIES * logits
    stages = [
        encoding(shapes),
        Peak(
            4 * (shapes.hidden + shapes.handed.given) * rows + reading(shapes.outside),
            "looking up the words of the text",
        ),
        Peak(head + reading(shapes.outside), "the head in float32, and logits"),
        *(_block(shapes, block, batches) for block in shapes.blocks),
    ]
    most = max(stages, key=lambda stage: stage.nbytes)
    return Peak(process_bytes(shapes) + shapes.sensitivities + most.nbytes, most.of)


def _block(shapes: Shapes, block: Block, batches: int) -> Peak:
    routed = sum(one.share * one.width for one in block.inputs if one.share is not None)
    numbers = _OF_HIDDEN * shapes.passed + _OF_WIDEST * block.widest + _OF_ROUTED * routed
    given = 2 * 4 * shapes.tokens * shapes.handed.given // max(1, shapes.count)
    # A matrix that was there before leaves its room free between others.
    held = block.nbytes + min(4 * block.largest, MOST_KEPT_BYTES)
    sums = (batches + 1) * shapes.sensitivities // max(1, shapes.count)
    passing = held + given + sums + int(4 * batches * shapes.batch * numbers)
    loading = block.nbytes + reading(2 * block.largest)
    return Peak(max(passing, loading), "a block in float32, and its backward pass")
