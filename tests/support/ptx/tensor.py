"""mma of halves with sums in float32, by the model of a tensor core that kernels/cuda/tensor.h has.

Of a warp, lane 4 g + t holds of the first matrix (16 rows) columns 2 t and 2 t + 1 of rows g and
g + 8, then those eight columns further on; the same columns of column g of the second; of the sums
columns 2 t and 2 t + 1 of row g, then of row g + 8.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.ptx.arithmetic import NAN

_LANE = np.arange(32)
_G, _T = _LANE // 4, _LANE % 4


def _halves(words: list[NDArray[np.uint32]]) -> NDArray[np.uint16]:
    """[warps, lanes, words, 2] of float16's bits."""
    all_words = np.ascontiguousarray(np.stack(words, -1).reshape(-1, 32, len(words)))
    return all_words.view(np.uint16).reshape(-1, 32, len(words), 2)


def _parts(bits: NDArray[np.uint16]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A half as part * 2^(exponent - 10), subnormal ones with the least exponent of others."""
    bits = bits.astype(np.int64)
    exponent = bits >> 10 & 31
    part = (bits & 1023) + np.where(exponent > 0, 1024, 0)
    return np.where(bits & 0x8000, -part, part), np.where(exponent > 0, exponent, 1) - 15


def _cut(part: Any, places: int, down: Any, fraction: int) -> Any:
    """A term whose exponent is `down` below the largest one's, cut off at `fraction` places."""
    shift = fraction - places - down
    size = np.abs(part)
    size = np.where(shift >= 0, size << np.clip(shift, 0, 62), size >> np.clip(-shift, 0, 62))
    return np.where(part < 0, -size, size)


def fused(a: Any, b: Any, sums: Any, fraction: int) -> Any:
    """sums [...] + products [..., columns] of halves, cut off at so many bits behind the point of
    the largest exponent, added exactly, and cut off to float32. All are finite."""
    (pa, ea), (pb, eb) = _parts(a), _parts(b)
    product, exponent = pa * pb, ea + eb
    here = product != 0
    most = np.where(here, exponent, -1000).max(-1)
    none = most == -1000
    bits = sums.view(np.uint32).astype(np.int64)
    own = bits >> 23 & 255
    part = (bits & 0x7FFFFF) + np.where(own > 0, 1 << 23, 0)
    own = np.where(own > 0, own, 1) - 127
    most = np.where((part > 0) & (own > most), own, most)
    total = _cut(np.where(bits >> 31, -part, part), 23, most - own, fraction)
    cut = _cut(product, 20, most[..., None] - exponent, fraction)
    total = total + np.where(here, cut, 0).sum(-1)
    size = np.abs(total)
    # The highest 24 bits: sums are below 2^53, and so exact in float64.
    drop = np.maximum(np.frexp(size.astype(np.float64))[1] - 24, 0)
    with np.errstate(all="ignore"):
        scaled = np.ldexp(
            (size >> drop).astype(np.float64), (most - fraction + drop).astype(np.int32)
        )
        found = scaled.astype(np.float32)
    return np.where(none, sums, np.where(total < 0, -found, found)).astype(np.float32)


def _special(bits: NDArray[np.uint16]) -> Any:
    return (bits & 0x7C00) == 0x7C00


def multiply(
    a: list[Any], b: list[Any], c: list[Any], fraction: int, columns: int
) -> list[NDArray[np.float32]]:
    """d = a b + c of whole warps; a core sums so many columns at once."""
    halves_a, halves_b = _halves(a), _halves(b)
    warps, deep = len(halves_a), 8 * len(b)
    rows = np.zeros((warps, 16, deep), np.uint16)
    vectors = np.zeros((warps, 8, deep), np.uint16)
    for half in (0, 1):
        for k in range(len(a)):
            rows[:, _G + 8 * (k & 1), 2 * _T + half + 8 * (k >> 1)] = halves_a[:, :, k, half]
        for k in range(len(b)):
            vectors[:, _G, 2 * _T + half + 8 * k] = halves_b[:, :, k, half]
    sums = np.zeros((warps, 16, 8), np.float32)
    for k in range(4):
        sums[:, _G + 8 * (k >> 1), 2 * _T + (k & 1)] = c[k].reshape(-1, 32)
    odd = (_special(rows).any((1, 2)) | _special(vectors).any((1, 2)))[:, None, None]
    odd = odd | ~np.isfinite(sums)
    x, y = np.broadcast_arrays(rows[:, :, None], vectors[:, None])
    found = sums.copy()
    for k in range(0, deep, columns):
        found = fused(x[..., k : k + columns], y[..., k : k + columns], found, fraction)
    if odd.any():  # NaN and infinity as ever
        plain = sums.copy()
        p, q = (z.view(np.float16).astype(np.float32) for z in (x.copy(), y.copy()))
        with np.errstate(all="ignore"):
            for k in range(deep):
                plain = plain + p[..., k] * q[..., k]
        found = np.where(odd, np.where(np.isnan(plain), NAN, plain), found)
    return [
        np.ascontiguousarray(found[:, _G + 8 * (k >> 1), 2 * _T + (k & 1)]).reshape(-1)
        for k in range(4)
    ]
