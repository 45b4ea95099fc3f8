"""Each layer's error against what its bit width explains.

    coarseness = (rms of W - Q / typical |W|) / the same of normally distributed weights

with the same scheme, always the same ones, as wide as the layer's: what the bits and the group size
explain. The typical weight is the median. The norm, which relative errors are counted in, hides
what outliers do: where they are so large that every other weight of their groups is rounded to
zero, they make up the norm themselves, and the relative error stays small.

Real weights have longer tails than normally distributed ones, of which each model has its own; so a
layer stands out whose coarseness is above 1 and above what is usual in the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from qtool.errors import FormatError
from qtool.messages.summary import LayerReport

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from qtool.gguf_types import BlockType
    from qtool.scheme import Scheme
else:
    from qtool.lazy_numpy import np

FACTOR = 2.5  # times what is explained and what is usual in the model
_ALWAYS = 12.0  # times what is explained, however usual
_NO_ERROR = 1e-3  # relative: of this size an error is none to be told of
_ROWS = 256  # of a matrix that are looked at
_WEIGHTS = 1 << 15  # of a sample, at least
_SHOWN = 5
_OF_MEDIAN = 1.4826  # a normal distribution's deviation in medians of the magnitude


def checked(layers: Sequence[LayerReport]) -> str | None:
    """One sentence that names the layers that stand out; None where none does.

    FormatError where an error is no number: what was made is worth nothing.
    """
    for layer in layers:
        if not math.isfinite(layer.relative_error) or layer.coarseness == math.inf:
            raise FormatError(
                f"{layer.name}: what was made of it is not finite, or nothing like it (relative "
                f"error {layer.relative_error}); leave it dense with an override, or choose "
                "another recipe"
            )
    known = sorted(layer.coarseness for layer in layers if layer.coarseness is not None)
    if not known:
        return None
    most = min(FACTOR * max(1.0, known[len(known) // 2]), _ALWAYS)
    odd = [
        (-layer.coarseness, layer.name)
        for layer in layers
        if layer.coarseness is not None
        and layer.coarseness > most
        and layer.relative_error > _NO_ERROR
    ]
    if not odd:
        return None
    named = [f"{name} ({-times:.1f} times)" for times, name in sorted(odd)[:_SHOWN]]
    more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
    what = "1 layer is" if len(odd) == 1 else f"{len(odd)} layers are"
    return (
        f"{what} rounded more coarsely than the bit width explains: {', '.join(named)}{more}; "
        "outliers among the weights do so, such as smoothing moves there, or a damaged source: "
        f"compare with `qtool eval`, and {_advice(layers)}"
    )


def _advice(layers: Sequence[LayerReport]) -> str:
    """What an override can do: of small floats there is one kind in a recipe."""
    if any(layer.scheme.startswith(("nvfp4", "mxfp", "fp8")) for layer in layers):
        return "leave such layers dense with an override (`dense: true`)"
    return "give such layers more bits or smaller groups, or leave them dense, with an override"


def coarseness(
    weight: NDArray[np.float32], dequantized: NDArray[np.float32], scheme: Scheme
) -> float | None:
    """That of a matrix [out, in] and what was made of it; None where all of it is zero."""
    rows = np.linspace(0, len(weight) - 1, min(_ROWS, len(weight))).astype(int)
    some = weight[rows]
    return _coarseness(some, _mean_square(some - dequantized[rows], some != 0), scheme)


def coarseness_of_blocks(
    some: NDArray[np.float32], mean_square: float, block: BlockType
) -> float | None:
    """The same of a type of GGUF. some: rows of the weights; mean_square: of all the errors."""
    return _coarseness(some, mean_square, block)


def _coarseness(
    some: NDArray[np.float32], mean_square: float, scheme: Scheme | BlockType
) -> float | None:
    size = np.abs(some[some != 0])
    if not size.size:
        return None
    typical = _OF_MEDIAN * float(np.median(size))
    known = explained(scheme, some.shape[1])
    found = math.sqrt(mean_square) / typical / known if known else 0.0
    return float(f"{found:.4g}") if math.isfinite(found) else math.inf


def _mean_square(off: NDArray[np.float32], where: NDArray[np.bool_]) -> float:
    count = int(where.sum())
    with np.errstate(over="ignore"):
        return float((off[where] ** 2).sum(dtype=np.float64)) / count if count else 0.0


@lru_cache(maxsize=256)
def explained(scheme: Scheme | BlockType, in_features: int) -> float:
    """The relative error that a scheme makes of normally distributed weights this wide."""
    from qtool.scheme import Scheme

    rows = max(8, _WEIGHTS // in_features)
    if isinstance(scheme, Scheme) and scheme.rows > 1:
        rows = -(-rows // scheme.rows) * scheme.rows
    weight = np.random.default_rng(0).standard_normal((rows, in_features), np.float32)
    size = float((weight * weight).sum(dtype=np.float64))
    lost = _lost(weight, scheme) if isinstance(scheme, Scheme) else _lost_in_blocks(weight, scheme)
    return math.sqrt(lost / size)


def _lost(weight: NDArray[np.float32], scheme: Scheme) -> float:
    """The sum of the squared errors of rounding to nearest."""
    from qtool.methods import rtn

    off = weight - rtn.quantize(weight, None, scheme, rtn.Options()).quant.dequantize()
    return float((off * off).sum(dtype=np.float64))


def _lost_in_blocks(weight: NDArray[np.float32], block: BlockType) -> float:
    """The same of a type of GGUF, every weight being as important as the next."""
    from qtool import native_gguf
    from qtool.gguf_types import F32

    rows, width = weight.shape
    out = np.empty((rows, block.row_bytes(width)), np.uint8)
    alike = np.ones(width, np.float32) if block.needs_importance else None
    raw = weight.view(np.uint8).reshape(rows, -1)
    scratch = np.empty(2 * max(width, 1 << 12), np.float32)
    return native_gguf.convert(raw, F32, block, width, alike, out, scratch)[1]
