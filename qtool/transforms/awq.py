"""AWQ: channels whose input is large get a larger scale, so that rounding hurts them less.

    s = mean|x|^a / mean|w|^b            normalized: s / sqrt(max s * min s)
    y = (x / s) (W s)'                   W s is quantized; x / s is folded into what makes x

a lies on a grid in [0, 1), b is a quarter of 0 to 4; b = 0 is the paper's search, b = 1 - a what
its authors' code has since done. The exponents are those with the least error over all matrices
that read the input, E = Q(W s) / s - W, evaluated through the Gram matrix H = X'X without any
forward pass. Candidates are sifted by the diagonal, sum of E_oj^2 H_jj, since roundings of
different columns hardly go together; the best few, and no scales at all, are compared by
tr(E H E'), the exact squared error of the outputs on the calibration tokens. (The paper's search
measures the output of the parent module.)

Where GPTQ rounds afterwards, errors of a column are compensated for by those after it, and the
diagonal counts too much: each column then weighs 1 / U_jj^2 (see `qtool.methods.gptq`). With the
scales of the plain search GPTQ ends worse than with none at all; with these it ends better.

Readers that stay dense are compensated, not measured. Where there are any, scales are powers of
two, which a 16-bit matrix takes without losing a bit, but for two cases: float16 numbers that
become subnormal, and norms that multiply by 1 + weight, since the rounded weight makes another
ratio than the power of two. Such a matrix is rounded once more to its own dtype, and so is a bias
that is divided along: for it alone scales stay free, since weights of few bits lose far more.

Experts that saw too few tokens (`qtool.calibrating.stats.is_rare`) have no say in the scales of
a norm's output, and none of their own.

Which producer can take x / s is proved by numbers (`qtool.transforms.fold`); where none can, the
input keeps its scale and a note says so. What rounds afterwards is another module's business, the
clipping of the paper included: `qtool.methods.rtn` with clip, or GPTQ.

Source: Lin et al., AWQ, 2023, section 3.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from qtool import grid, native, small_floats
from qtool.calibrating.sites import Site
from qtool.calibrating.stats import SiteStats, gram_on, is_rare
from qtool.checkpoints.scaled import Factor
from qtool.methods import gptq, named
from qtool.scheme import Scheme
from qtool.transforms.proved import (
    Applied,
    Floats,
    Subject,
    Workers,
    apply_fold,
    dense_parts,
    factors_of,
    listed,
    powers_of_two,
    proved_folds,
    too_large,
)

NEEDS: frozenset[str] = frozenset({"gram", "mean_abs"})

# Rows of a fold group that the search looks at: two exponents for all of them show on a part.
_ROWS = 256
_FEWEST_OF_A_READER = 16
_WEIGHT_EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
_FINALISTS = 4
_LEAST = 1e-4  # of the largest channel, for channels that are nearly silent
# Beyond it, weights divided by a scale need float16 scales too small to be exact.
_LARGEST_SCALE = 128.0


@dataclass(frozen=True)
class Measured:
    """Some rows of a matrix that will be quantized, and what its errors cost."""

    weight: Floats  # [rows, in]
    scheme: Scheme
    importance: Floats  # [in], of a squared error in a column
    gram: NDArray[np.floating] | None  # [in, in]; None where importance says all
    share: float = 1.0  # of the matrix' rows that these are


def candidates(mean_abs: Floats, mean_weight: Floats, count: int) -> list[Floats]:
    """Scales for `count` exponents of mean|x| and five of mean|w|, the first all ones; [in] each.

    A channel that is always zero keeps scale 1; it would stretch the range of all others.
    """
    live = mean_abs > 0
    if not live.any():
        return [np.ones_like(mean_abs)]
    x, w = (
        np.log(np.maximum(level.astype(np.float64), _LEAST * max(float(level.max()), 1e-30)))
        for level in (mean_abs, mean_weight)
    )
    found = []
    for step in range(count):
        for exponent in _WEIGHT_EXPONENTS:
            scale = step / count * x - exponent * w
            scale -= (scale[live].max() + scale[live].min()) / 2
            scale = np.exp(scale).clip(1 / _LARGEST_SCALE, _LARGEST_SCALE)
            found.append(np.where(live, scale, 1).astype(np.float32))
    return found


def diagonal_error(measured: Measured, scale: Floats) -> float:
    """Weighted squared error of the weights when they are quantized scaled by scale [in]."""
    error = _error(measured, scale)
    error *= error
    cost = measured.importance / np.square(scale)
    # numpy's own sum: BLAS's depends on its threads.
    total = (error.sum(0, dtype=np.float64) * cost).sum(dtype=np.float64)
    return float(total) / measured.share


def output_error(measured: Measured, scale: Floats) -> float:
    """Squared error of the outputs, tr(E H E')."""
    assert measured.gram is not None
    error = torch.from_numpy(_error(measured, scale) / scale)
    product = error @ torch.from_numpy(measured.gram)
    return float((product * error).sum(dtype=torch.float64)) / measured.share


def _error(measured: Measured, scale: Floats) -> Floats:
    """Q(W s) - W s, [rows, in]; of small floats as if these rows were all, where others share their
    scale."""
    scaled = measured.weight * scale
    if measured.scheme.is_float:
        return small_floats.rounded(scaled, measured.scheme) - scaled
    found = native.quantize_groups(
        scaled,
        bits=measured.scheme.bits,
        group_size=measured.scheme.group_size,
        symmetric=measured.scheme.symmetric,
        reach=grid.reach(measured.scheme.bits),
        dequantize=True,
        threads=1,
    )
    error = found.dequantized
    assert error is not None
    error -= scaled
    return error


def search(readers: Sequence[Measured], scales: Sequence[Floats], workers: Workers) -> int:
    """Which of the scales has the least error over all readers; the first is the one to beat."""

    def sift(scale: Floats) -> float:
        return sum(diagonal_error(reader, scale) for reader in readers)

    def compare(number: int) -> float:
        return sum(output_error(reader, scales[number]) for reader in readers)

    errors = np.array(workers.map(sift, scales))
    if any(reader.gram is None for reader in readers):
        return int(errors.argmin())
    best = [int(number) for number in np.argsort(errors, kind="stable")[:_FINALISTS]]
    finalists = sorted({0, *best})
    return finalists[int(np.argmin(workers.map(compare, finalists)))]


def apply(subject: Subject, stats: Mapping[str, SiteStats]) -> Applied:
    """Search and fold the scales of a block, in place.

    Sites without a quantized reader stay as they are. Errors of an expert count by the tokens it
    saw. stats are used up.
    """
    block, plan, recipe = subject.block, subject.plan, subject.recipe
    result = dict(stats)
    changed: set[str] = set()
    notes: list[str] = []
    factors: list[Factor] = []
    rounding = gptq.Options.of(recipe.gptq) if recipe.rounding == "gptq" else None
    for sites, chosen in proved_folds(block, subject.found, stats, subject.stream):
        measured = _measured(subject, sites, stats, rounding)
        if not measured:
            continue
        names = [name for site in sites for name in site.names]
        said = listed([name.removeprefix(block.prefix) for name in names])
        if chosen is None:
            notes.append(f"no AWQ scales for the input of {said}: nothing before it takes them")
            continue
        scales = candidates(
            chosen.tied(_mean_abs(sites, stats)),
            chosen.tied(_mean_weight(measured)),
            recipe.awq.grid,
        )
        if dense_parts(chosen, sites, plan):
            scales = [powers_of_two(scale) for scale in scales]
        if subject.device is None:
            best = search(measured, scales, subject.workers)
        else:
            from qtool.transforms import awq_device

            best = awq_device.search(subject.device, measured, scales, _FINALISTS)
        if (scales[best] == 1).all():
            continue
        lost = too_large(block, chosen, scales[best], plan)
        if lost is not None:
            notes.append(
                f"no AWQ scales for the input of {said}: {lost} could not hold them in float16"
            )
            continue
        changed |= apply_fold(block, chosen, sites, scales[best], plan, result)
        factors += factors_of(block, chosen, scales[best])
    return Applied(result, frozenset(changed), tuple(notes), tuple(factors))


def _importance(stats: SiteStats, rounding: gptq.Options, subject: Subject) -> Floats:
    device = subject.device
    if device is None:
        assert stats.gram is not None
        return gptq.importance(stats.gram, rounding, stats.count, subject.workers.spread)
    from qtool.methods import gptq_device

    with device.alone, device.explained():
        return gptq_device.importance(gram_on(device, stats), rounding, stats.count)


def _mean_abs(sites: Sequence[Site], stats: Mapping[str, SiteStats]) -> Floats:
    """mean|x| over the rows that a group's sites saw, [in]."""
    whole = [site for site in sites if site.expert is None and site.id in stats]
    seen = [stats[site.id] for site in whole or sites if site.id in stats]
    total = np.zeros(sites[0].in_features)
    for one in seen:
        if one.mean_abs is not None:
            total += one.count * one.mean_abs.astype(np.float64)
    return (total / max(1, sum(one.count for one in seen))).astype(np.float32)


def _mean_weight(readers: Sequence[Measured]) -> Floats:
    """mean|w| over the rows of all readers, [in]."""
    total = sum(np.abs(r.weight).sum(0, dtype=np.float64) / r.share for r in readers)
    return np.asarray(total / sum(len(r.weight) / r.share for r in readers), dtype=np.float32)


def _measured(
    subject: Subject,
    sites: Sequence[Site],
    stats: Mapping[str, SiteStats],
    rounding: gptq.Options | None,
) -> list[Measured]:
    """Evenly spaced rows of every quantized reader whose input was seen often enough."""
    readers = [
        (site.id, name, scheme)
        for site in sites
        if site.id in stats and stats[site.id].gram is not None
        if not is_rare(site, stats[site.id])
        for name in site.names
        if (scheme := subject.plan.target(name)) is not None
    ]
    costs: dict[str, tuple[Floats, NDArray[np.floating] | None]] = {}
    for site_id in dict.fromkeys(site_id for site_id, _, _ in readers):
        gram = stats[site_id].gram
        assert gram is not None
        if rounding is None:
            costs[site_id] = np.diagonal(gram).astype(np.float32), gram
        else:
            live = int(np.count_nonzero(np.diagonal(gram))) or 1  # as gptq.prepare has it
            mean = float(np.trace(gram, dtype=np.float64)) / live
            with named(site_id):
                cost = _importance(stats[site_id], rounding, subject)
            costs[site_id] = cost * np.float32(mean), None
    rows = sum(subject.block.weights[name].shape[0] for _, name, _ in readers)
    result = []
    for site_id, name, scheme in readers:
        weight = subject.block.weights[name]
        count = max(_FEWEST_OF_A_READER, weight.shape[0] * _ROWS // rows)
        count = min(count, weight.shape[0])
        picked = np.linspace(0, weight.shape[0] - 1, count).astype(np.int64)
        part = weight[torch.from_numpy(picked)].numpy()
        importance, gram = costs[site_id]
        result.append(Measured(part, scheme, importance, gram, count / weight.shape[0]))
    return result
