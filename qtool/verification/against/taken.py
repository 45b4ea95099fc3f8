"""How far a matrix has taken up what a norm was divided by.

Q beside R W diag(r), r the norm's ratio (old weight over new one), R the scales of rows that fit:

    gain          the rows' R, where they are alike; those that have another fold tell nothing
    channels[k]   sum Q R W / sum (R W)^2 over r[k]
    slope         of the logarithm of these sums (not over r) over that of r: 1 where the columns
                  have r's form, 0 where they are the source's

Where the matrices that read the norm compensate for it, all of them are 1. A weight's noise is far
larger than theirs: only what rounding and clipping take away from all weights is in them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qtool.verification.against.side_by_side import Floats, SideBySide

_MOST = 0.8  # of the rows: so many have to be alike
_ALIKE = 0.15  # of the logarithm
# Of a channel's weights: more, and rounding itself takes a part of it away; for the form of all
# channels, and for single ones.
_NOISE, _CLEAR = 0.6, 0.35
_KNOWN = 0.5  # of the channels
_SURELY = 6  # standard errors


@dataclass(frozen=True)
class Taken:
    """In logarithms, but for the slope; NaN is what cannot be told."""

    gain: float
    slope: float
    unlike: float  # how far channels are from one factor, on average
    channels: Floats  # [in], less the gain of all
    reach: Floats  # [in], how far noise may take them
    rows: Floats  # [out]


def taken(
    pair: SideBySide, ratios: Mapping[str, Floats], rows: Mapping[str, Floats]
) -> dict[str, Taken]:
    """By norm. rows: the scales of rows [out] with each ratio."""
    sums = np.zeros((len(ratios), 3, pair.shape[1]))
    for at, stored, weight in pair.pieces() if ratios else ():
        square = np.einsum("ij,ij->j", stored, stored)
        for number, name in enumerate(ratios):
            by = rows[name][at, None] * weight
            shared, source = (np.einsum("ij,ij->j", one, by) for one in (stored, by))
            sums[number] += np.stack([shared, source, square])
    return {
        name: _taken(one, ratio.astype(np.float64), rows[name])
        for one, (name, ratio) in zip(sums, ratios.items(), strict=True)
    }


def _taken(sums: NDArray[np.float64], ratio: NDArray[np.float64], rows: Floats) -> Taken:
    shared, source, stored = sums
    with np.errstate(all="ignore"):
        scale = shared / source
        noise = np.sqrt(np.maximum(stored - scale * shared, 0) / (scale * shared))
        known = (shared > 0) & (source > 0) & (noise < _NOISE)
        found = np.where(known, np.log(scale), np.nan)
    wanted = np.log(ratio)
    channels = found - wanted
    slope = unlike = np.nan
    if known.mean() >= _KNOWN:
        away = wanted[known] - np.median(wanted[known])
        here = found[known] - np.median(found[known])
        slope = float(away @ here / (away @ away)) if away.any() else np.nan
        channels = channels - np.median(channels[known])
        unlike = float(np.minimum(np.abs(channels[known]), 1).mean())
    reach = np.where(noise < _CLEAR, _SURELY * noise / np.sqrt(len(rows)), np.inf)
    known_channels = channels.astype(np.float32), reach.astype(np.float32)
    return Taken(gain_of(rows), slope, unlike, *known_channels, rows)


def gain_of(scales: Floats) -> float:
    """The mean of those rows that lie within the least width; NaN where these are too unlike."""
    rows = np.log(scales[scales > 0].astype(np.float64))
    count = int(np.ceil(_MOST * rows.size))
    if not count:
        return np.nan
    ordered = np.sort(rows)
    widths = ordered[count - 1 :] - ordered[: rows.size - count + 1]
    first = int(widths.argmin())
    if not widths[first] <= _ALIKE:
        return np.nan
    return float(ordered[first : first + count].mean())
