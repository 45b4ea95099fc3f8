"""What two halves of a fold come to: channel by channel the rows of one matrix undo the columns of
another, and then so does all of it.

Columns of a reader are known up to a factor that its rows have as well, so that only both together
tell it. Of scales that belong together, channel by channel, the whole is

    log g = mean of log(rows of the maker x columns of the reader) + mean of log(rows of the reader)

which is 0, but for what clipping leaves, and rounding where codes are coarse. All scales of either
matrix were multiplied by g where it is not: nothing else shows it, since each half fits the other.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set

import numpy as np

from qtool.messages.sentences import AGAIN, some, verb
from qtool.messages.sentences import count as counted
from qtool.verification.against.compared import Compared
from qtool.verification.against.folds import block_of
from qtool.verification.against.multiples import CHECK
from qtool.verification.against.pairs import Heads, has_exact_rows, heads_of, made
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

_LEAST = 0.1  # of the logarithm; where codes are coarse, this share of the relative errors of both
_ERRORS = 0.5


def check_gains(
    subject: Subject, compared: Sequence[Compared], told: Set[str]
) -> Iterator[Finding]:
    """layer-error: no two matrices that share a fold are together a multiple of the source's. told:
    matrices of which is said by now what they are."""
    heads = heads_of(subject.config)
    blocks: dict[str, list[Compared]] = defaultdict(list)
    for c in compared:
        if (c.rows is not None or c.columns is not None) and math.isfinite(c.error):
            blocks[block_of(subject, c.name)].append(c)
    wrong: dict[str, float] = {}
    for block in blocks.values():
        for reader in block:
            if reader.columns is None or reader.norm is not None or reader.as_columns is not None:
                continue
            gains = [
                (abs(math.log(gain)), gain, maker)
                for maker in block
                if maker is not reader and (gain := _gain(maker, reader, heads)) is not None
            ]
            if not gains or told & {reader.name, *(maker.name for _, _, maker in gains)}:
                continue
            far, gain, maker = min(gains, key=lambda one: one[0])
            if far > max(_LEAST, _ERRORS * (reader.error + maker.error)):
                wrong[f"{maker.name} and {reader.name}"] = gain
    if wrong:
        first, (least, most) = next(iter(wrong)), (min(wrong.values()), max(wrong.values()))
        times = f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
        yield Finding(
            "error", CHECK, first.partition(" ")[0],
            f"{counted(len(wrong), 'pair')} of matrices that share scales "
            f"{verb(len(wrong), 'are', 'is')} together {times} times the source's, channel by "
            f"channel: {some(list(wrong))}; are the scales right? {AGAIN}",
        )  # fmt: skip


def _gain(maker: Compared, reader: Compared, heads: Heads) -> float | None:
    """What a reader's columns and the rows that they undo come to; None where they belong to
    nothing, or one of them is known up to a factor alone."""
    index = next(made(maker, reader, heads), None)
    if index is None or not has_exact_rows(maker):
        return None
    assert maker.rows is not None and reader.columns is not None
    whole = np.log(maker.rows[index] * reader.columns).mean(dtype=np.float64)
    if reader.rows is not None:
        whole += np.log(reader.rows).mean(dtype=np.float64)
    return math.exp(whole)
