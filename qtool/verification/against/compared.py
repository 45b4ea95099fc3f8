"""What is found of one matrix beside its source."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from qtool.verification.against.blanks import Blanks
from qtool.verification.against.likeness import Likeness
from qtool.verification.against.off_scales import OffScale
from qtool.verification.against.side_by_side import Floats
from qtool.verification.against.taken import Taken

# Times the expected error: GPTQ makes up to 2, a clipped range up to 3.5.
UNEXPLAINED = 4.0
WRONG = 6.0
LOST = 0.95  # relative: as far off as a matrix of zeros


@dataclass(frozen=True)
class Multiple:
    """How many times the source a matrix is; RECIPROCALS where that is not it."""

    times: float
    shows: bool  # whether a matrix of as few bits that compensates for it would be seen, too
    without: "Compared | None" = None  # the matrix, judged without it


@dataclass(frozen=True)
class Compared:
    """A matrix beside its source."""

    name: str
    error: float  # relative, with the scales taken out
    plain_error: float  # relative, as it is
    expected: float | None
    plain_expected: float | None
    columns: Floats | None  # the scales that were found, [in]
    rows: Floats | None  # likewise, [out]
    norm: str | None  # whose ratio `columns` is
    off: int  # groups whose zero is off by whole steps
    step: int  # by how many most of them are
    groups: int
    without_rows: float | None = None  # the error with the norm's ratio alone, over the expected
    could: frozenset[str] = frozenset()  # norms of which coarse codes cannot tell whether they are
    untold: bool = False  # its codes are too coarse to tell what the scales belong to
    like: Likeness | None = None  # part by part, with the scales taken out
    plainly_like: Likeness | None = None  # as it is
    pruned: bool = False  # and its source is not
    off_scales: tuple[OffScale, ...] = ()  # single ones; all else is told with them mended
    lost_codes: int = 0  # groups whose mean is as far off, which no zero explains
    as_stored: float | None = None  # the error with these, where there are any
    blanks: Blanks | None = None  # weights that are lost, their codes 0
    as_columns: Floats | None = None  # `rows` that are one factor, as scales of columns
    multiple: Multiple | None = None  # of the source
    taken: Mapping[str, Taken] = field(default_factory=dict)  # of the norms in reach

    @property
    def explained(self) -> bool:
        """Whether the error is what the scheme makes."""
        return self.expected is None or self.error <= UNEXPLAINED * self.expected

    @property
    def wrong(self) -> bool:
        """Whether it is so far off that it cannot be the matrix that was quantized."""
        over = self.expected is not None and self.error > WRONG * self.expected
        return not self.explained and (over or self.error > LOST)

    @property
    def plainly_explained(self) -> bool:
        """The same without taking any scales out."""
        expected = self.plain_expected
        return expected is not None and self.plain_error <= UNEXPLAINED * expected

    @property
    def rows_by_chance(self) -> bool:
        """Whether the scheme explains the error without the scales of rows, beside a norm's."""
        return self.without_rows is not None and self.without_rows <= UNEXPLAINED

    def as_it_is(self) -> "Compared":
        """Without the scales that were found."""
        return replace(
            self, error=self.plain_error, expected=self.plain_expected, columns=None, rows=None,
            like=self.plainly_like, as_columns=None,
        )  # fmt: skip
