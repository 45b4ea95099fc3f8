"""GPTQ: columns are rounded one after another, and the rest compensates for each one's error.

With the Gram matrix H = X'X of the input, the output error of a candidate Q is
tr((W - Q) H (W - Q)'). After column j is rounded, the best values of the columns not yet rounded
are known in closed form. With U upper triangular and U'U the inverse of H:

    e_j = (w_j - q_j) / U_jj
    w_k = w_k - e_j U_jk        for every k > j

U is found without forming the inverse: reversed in both axes, H has an ordinary Cholesky factor
L; reversed back, that is an upper factor R with H = R R', and U = R^-1. One factorization and
one triangular inverse, where the usual way takes two factorizations and a full inverse.

`act_order` takes the columns with the largest diagonal of H first, while most columns are still
free to compensate for them. With `static_groups` the grids are found before the sweep from groups
of neighbours, so the file is the same as without act_order. Without, a group is a run of columns
in sweep order, its grid is found when the sweep reaches it, and the file needs a g_idx. Columns
that are rounded together stay neighbours: units are put in order by the sums of their diagonals.

`mse` searches each group's range, as round to nearest can, but weighs the squared error of a column
by 1 / U_jj^2: what it costs once the columns after it have compensated for it. (On SmolLM2 at 4
bits this lowers the output error by 7 % against the full range; weighing by the diagonal of H gains
nothing, since errors that others compensate for count too much.) Small floats have grids of their
own (qtool.small_floats), weighed likewise, and codes that are swept onto what these stand for;
halfway between two, the lower one is taken.

A column whose input is always zero takes no part and is rounded to nearest; where ranges are
searched, and among columns that are rounded together, it counts by the damping alone, lest those
that matter give way to it. The mean diagonal times `damp_percent` is added to the diagonal, ten
times more on each failed factorization. A Gram matrix of T tokens is itself uncertain, the more so
the wider it is: with `token_damping` another in_features / T (at most 1) is added, since what the
sweep gains from chance correlations is lost on other text. (SmolLM2 at 4 bits, 8192 tokens: the
output error on other text falls by 5 %, that on the same text grows by 6 %; where there are tens of
thousands of tokens it hardly shows.)

Source: Frantar et al., GPTQ, 2022, sections 3 and 4.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from qtool import grid, native, small_floats
from qtool.errors import SourceError
from qtool.methods import Result, qoq, tiles
from qtool.methods.tiles import Spread, in_turn
from qtool.scheme import GroupQuant, Scheme
from qtool.streaming.single_thread import single_thread

NEEDS: frozenset[str] = frozenset({"gram"})

Real = NDArray[np.floating]

_LARGEST_DAMPING = 100.0  # times the mean diagonal: the sweep is round to nearest by then
_INVERSE_BASE = 256  # below this width a triangle is inverted by LAPACK
_WHOLE = 2048  # up to this width a matrix has too few tiles to be worth it


class Stats(Protocol):
    """What is read of an input's statistics."""

    @property
    def gram(self) -> Real | None:
        """X'X, [in, in]."""

    @property
    def count(self) -> int:
        """Tokens in X."""


@dataclass(frozen=True)
class Options:
    """The recipe's `gptq:` table."""

    act_order: bool = True  # largest diagonal first
    static_groups: bool = True  # grids before the sweep, groups of neighbours
    damp_percent: float = 0.01  # a fraction, by the name everyone uses
    token_damping: bool = True  # in_features / tokens on top of it
    mse: bool = True  # search each group's range

    @classmethod
    def of(cls, table: object) -> "Options":
        """The part of a recipe's `gptq:` table that the method reads."""
        return cls(**{field.name: getattr(table, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class Factor:
    """What a sweep needs to know of an input; one serves every weight that reads it."""

    upper: Real  # [in, in], row major; U of the damped H in sweep order
    order: NDArray[np.int32]  # [in], the column taken at each step
    importance: grid.Floats  # [in], what a squared error in a column costs once those after it
    # have compensated for it: 1 / U_jj^2, in the order of the columns; the damping where the input
    # is always zero
    notes: tuple[str, ...] = ()


def factor(
    gram: Real,
    options: Options,
    tokens: int | None = None,
    dtype: type[np.floating] = np.float32,
    together: int = 1,
    spread: Spread = in_turn,
) -> Factor:
    """Damp and factor a Gram matrix [in, in] of so many tokens; None: take it as exact. With
    act_order so many neighbours at a time are put in order.

    A wide one by tiles, which `spread` has threads for; the bits do not depend on them. Raises
    SourceError where the matrix is not finite or no damping helps.
    """
    with single_thread():
        root, prepared, notes = _damped_root(gram, options, tokens, dtype, together, spread)
        cost = importance_of(root, prepared)
        _reverse(root.view(-1).numpy())
        if len(root) <= _WHOLE:
            invert_upper(root)
        else:
            tiles.invert_upper(root, spread, invert_upper)
    return Factor(np.asarray(root.numpy()), prepared.order, cost, notes)


def importance(
    gram: Real, options: Options, tokens: int | None = None, spread: Spread = in_turn
) -> grid.Floats:
    """The importance that factor() finds, for half of its work, [in]."""
    with single_thread():
        root, prepared, _ = _damped_root(gram, options, tokens, np.float32, spread=spread)
    return importance_of(root, prepared)


def importance_of(root: torch.Tensor, prepared: "Prepared") -> grid.Floats:
    """Factor.importance, [in]. root: as from _damped_root()."""
    # R's diagonal is the root's from its end, and U's is one over it.
    found = np.empty(prepared.order.size, np.float32)
    found[prepared.backwards] = torch.diagonal(root).square().cpu().numpy()
    # A column that is always zero has no others in its row of R: its square is 1 and the damping.
    found[prepared.dead] -= prepared.diagonal[prepared.dead].astype(np.float32)
    return found


@dataclass(frozen=True)
class Prepared:
    """What the diagonal of a Gram matrix says before it is factored."""

    diagonal: NDArray[np.float64]  # [in], over its mean; where the input is always zero, 1, or 0
    # of columns that are rounded together
    dead: NDArray[np.bool_]  # [in], where the input is always zero
    mean: float
    order: NDArray[np.int32]  # [in], of the sweep
    notes: tuple[str, ...]

    @property
    def backwards(self) -> NDArray[np.int32]:
        """The sweep's order from its end, [in]."""
        return np.ascontiguousarray(self.order[::-1])


def prepare(diagonal: NDArray[np.float64], options: Options, together: int = 1) -> Prepared:
    """SourceError where the diagonal [in] is not one of sums of squares. Written over. together:
    columns that stay neighbours in the sweep, a divisor of `in`."""
    wrong = diagonal[~(np.isfinite(diagonal) & (diagonal >= 0))]
    if wrong.size:
        raise SourceError(
            f"the Gram matrix has {wrong[0]:.3g} on its diagonal, where sums of squares "
            "were expected: calibration met infinite or undefined activations, so weights of this "
            "block, of one before it or of a norm are damaged or too large; see their range with "
            "`qtool inspect MODEL --tensor NAME`"
        )
    dead = diagonal == 0
    notes = []
    if dead.any():
        notes.append(f"{int(dead.sum())} of {dead.size} input channels are always zero")
    mean = float(diagonal[~dead].mean()) if not dead.all() else 1.0
    diagonal[dead] = 0.0 if together > 1 else mean
    diagonal /= mean
    if options.act_order:
        strength = np.where(dead, 0.0, diagonal).reshape(-1, together).sum(axis=1)
        first = np.argsort(-strength, kind="stable")[:, None] * together
        order = (first + np.arange(together)).ravel().astype(np.int32)
    else:
        order = np.arange(diagonal.size, dtype=np.int32)
    return Prepared(diagonal, dead, mean, order, tuple(notes))


def damped(
    attempt: Callable[[float], torch.Tensor | None],
    prepared: Prepared,
    options: Options,
    tokens: int | None,
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """The first root that attempt(damping) finds, and notes; SourceError where no damping helps."""
    uncertain = prepared.order.size / tokens if tokens and options.token_damping else 0.0
    start = damping = options.damp_percent + min(uncertain, 1.0)
    while (root := attempt(damping)) is None:
        damping *= 10
        if damping > _LARGEST_DAMPING:
            raise SourceError(
                f"the Gram matrix cannot be factored even with {damping / 10:.0%} of its mean "
                "diagonal added, so it is not a sum of squares of finite activations; calibrate "
                "on other text, or use a recipe that rounds to nearest"
            )
    if damping == start:
        return root, prepared.notes
    return root, (*prepared.notes, f"damping raised from {start:.2%} to {damping:.2%}")


def _damped_root(
    gram: Real,
    options: Options,
    tokens: int | None,
    dtype: type[np.floating],
    together: int = 1,
    spread: Spread = in_turn,
) -> tuple[torch.Tensor, Prepared, tuple[str, ...]]:
    """The lower Cholesky factor, row major, of the damped gram / its mean diagonal, reversed.

    Reversed means that its columns are in reverse order of the sweep, so that read from its end
    the factor is R. Also what it was made of, and notes. Of a wide layer each matrix here is half a
    gigabyte: at most two live at a time beside the given one.
    """
    prepared = prepare(np.diagonal(gram).astype(np.float64), options, together)
    backwards = prepared.backwards

    def attempt(damping: float) -> torch.Tensor | None:
        reversed_gram = gram[np.ix_(backwards, backwards)].astype(dtype, copy=False)
        reversed_gram /= dtype(prepared.mean)
        np.fill_diagonal(reversed_gram, prepared.diagonal[backwards] + damping)
        root = torch.from_numpy(reversed_gram)
        if len(root) > _WHOLE:
            found = tiles.cholesky(root, spread)
        else:
            # The upper factor comes stored by columns: read by rows it is the lower one.
            upper, failed = torch.linalg.cholesky_ex(root, upper=True)
            root, found = upper.mT.contiguous(), not int(failed)
        return root if found and finite(root) else None

    root, notes = damped(attempt, prepared, options, tokens)
    return root, prepared, notes


def finite(root: torch.Tensor) -> bool:
    """Whether a Cholesky factor of finite diagonal is finite: what is not makes the diagonal of its
    own row so, whose square has its square subtracted."""
    return bool(torch.isfinite(torch.diagonal(root)).all())


def _reverse(values: Real) -> None:
    """Reverse the order of values [n] in place, some at a time."""
    size, chunk = values.size, 1 << 20
    for start in range(0, size // 2, chunk):
        stop = min(start + chunk, size // 2)
        first, last = values[start:stop], values[size - stop : size - start]
        kept = first.copy()
        first[:] = last[::-1]
        last[:] = kept[::-1]


def invert_upper(matrix: torch.Tensor) -> None:
    """Invert an upper triangular matrix in place: [A B; 0 C]^-1 = [A^-1 -A^-1 B C^-1; 0 C^-1]."""
    size = matrix.shape[0]
    if size <= _INVERSE_BASE:
        identity = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
        matrix.copy_(torch.linalg.solve_triangular(matrix, identity, upper=True))
        return
    half = size // 2
    above, corner, below = matrix[:half, :half], matrix[:half, half:], matrix[half:, half:]
    invert_upper(above)
    invert_upper(below)
    corner.copy_(above @ corner @ below).neg_()


def quantize_with(
    weight: Real,
    given: Factor,
    scheme: Scheme,
    options: Options,
    threads: int = 1,
    largest: float | None = None,
) -> GroupQuant:
    """Quantize weight [out, in] with the factor of its input, in the factor's dtype.

    Rows do not depend on each other, so neither do bytes on threads. largest: of small floats,
    max|w| of all rows that share a scale of the whole matrix; None: of these. Raises
    UnsupportedError where a scale exceeds float16.
    """
    plain: NDArray[np.float32] = np.asarray(weight, np.float32)
    if scheme.outer == "rows":
        return qoq.sweep(plain, given, scheme, options.mse)
    left = np.ascontiguousarray(weight, dtype=given.upper.dtype)
    sweep = partial(native.gptq_sweep_levels, left, given.upper, order=given.order)
    if scheme.is_float:
        scales = small_floats.Search(given.importance) if options.mse else None
        quant = small_floats.grids(plain, scheme, largest, scales, threads)
        return onto_levels(quant, partial(sweep, threads=threads))
    if rounds_offsets(scheme, options):
        grids = native.quantize_groups(
            np.ascontiguousarray(weight, np.float32),
            bits=scheme.bits,
            group_size=scheme.group_size,
            symmetric=False,
            reach=grid.reach(scheme.bits),
            search=native.RangeSearch() if options.mse else None,
            importance=given.importance if options.mse else None,
            scale_dtype=scheme.scale_dtype,
            threads=threads,
        )
        grid.check_scales(grids.scale)
        quant = GroupQuant(scheme, grids.codes, grids.scale, grids.zero)
        return onto_levels(quant, partial(sweep, threads=threads))
    columns = weight.shape[1]
    whole_row = grid.group_width(scheme, columns) >= columns
    found = native.gptq_sweep(
        left,
        given.upper,
        bits=scheme.bits,
        group_size=scheme.group_size,
        symmetric=scheme.symmetric,
        reach=grid.reach(scheme.bits),
        order=given.order,
        static_groups=options.static_groups or whole_row,
        search=native.RangeSearch() if options.mse else None,
        importance=given.importance if options.mse else None,
        scale_dtype=scheme.scale_dtype,
        threads=threads,
    )
    grid.check_scales(found.scale)
    g_idx = found.g_idx if options.act_order else None
    return GroupQuant(scheme, found.codes, found.scale, found.zero, g_idx)


def rounds_offsets(scheme: Scheme, options: Options) -> bool:
    """Whether grids are known before the sweep, and their offsets are rounded as they are stored:
    of 8 bits by up to a quarter of a step. Those of middle zeros are not."""
    return scheme.outer == "offset" and not scheme.symmetric and options.static_groups


def onto_levels(quant: GroupQuant, sweep: Callable[..., NDArray[np.uint8]]) -> GroupQuant:
    """Grids of small floats, or with offsets as they are stored, and the codes that sweep(levels=)
    chooses."""
    if quant.scheme.is_float:
        return replace(quant, codes=sweep(levels=small_floats.levels(quant)))
    book = np.arange(1 << quant.scheme.bits, dtype=np.float32)
    scale = np.ascontiguousarray(quant.scale, np.float32)
    levels = native.Levels(quant.scheme.group_size, scale, -quant.row_offset(), book)
    return replace(quant, codes=sweep(levels=levels))


def quantize(
    weight: NDArray[np.float32], stats: Stats | None, scheme: Scheme, options: Options
) -> Result:
    """weight [out, in] to codes. Weights of one input share `factor`; see `quantize_with`."""
    if stats is None or stats.gram is None:
        raise SourceError(
            "GPTQ needs the Gram matrix of the input, which these statistics lack; "
            "collect it with `qtool calibrate MODEL -o STATS --recipe` and a gptq recipe"
        )
    given = factor(stats.gram, options, stats.count)
    return Result(quantize_with(weight, given, scheme, options), given.notes)
