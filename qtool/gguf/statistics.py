"""What the weights, codes and scales of one stored tensor are like, in bounded memory.

Any run of whole blocks is decoded alone, so a tensor of one enormous row takes no more memory than
any other. Mean and variance of the pieces are joined by Chan's update, in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_header import TensorInfo
from qtool.gguf_types import BY_NAME, BlockType

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np

_PIECE = 1 << 20  # weights decoded at a time
_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "<i1", "I16": "<i2", "I32": "<i4",
          "I64": "<i8", "F64": "<f8"}  # fmt: skip


def pieces(file: GgufFile, info: TensorInfo) -> Iterator[NDArray[Any]]:
    """The weights in the order of storage, some at a time: [n] of float or int; with the second
    scale of their matrix, where there is one."""
    factors, at = second_scales(file, info), 0
    for raw in _raw(file, info):
        found = numbers(raw, info.type)
        if factors is not None:
            each = info.size // len(factors)
            found = found * factors[np.arange(at, at + len(found)) // each]
        at += len(found)
        yield found


def second_scales(file: GgufFile, info: TensorInfo) -> NDArray[np.float32] | None:
    """Those of the matrices of a tensor; None where it has none. FormatError where they are no
    such."""
    from qtool.gguf.from_gguf import gguf_source
    from qtool.gguf.second_scales import factors_of, name_of, scales_in

    if name_of(info.name) not in file.tensors:
        return None
    for tensor, scale in scales_in(gguf_source(file)):
        if tensor.name == info.name:
            return factors_of(tensor, scale, str(file.path))
    return None


def _raw(file: GgufFile, info: TensorInfo) -> Iterator[NDArray[np.uint8]]:
    """The bytes of whole blocks, some at a time."""
    block = info.type
    count = max(1, _PIECE // block.weights) * block.nbytes
    for first in range(0, info.nbytes, count):
        raw = np.empty(min(count, info.nbytes - first), np.uint8)
        file.read_into(info.name, first, raw.data)
        yield raw


def numbers(raw: NDArray[np.uint8], block: BlockType) -> NDArray[Any]:
    """What whole blocks stand for, [n] of float or int."""
    if block.name in BY_NAME:
        from qtool import native_gguf

        weights = len(raw) // block.nbytes * block.weights
        return native_gguf.dequantize(raw.reshape(1, -1), block, weights).reshape(-1)
    found: NDArray[Any] = raw.view(_NUMPY[block.name])
    return (found.astype(np.uint32) << 16).view(np.float32) if block.name == "BF16" else found


def statistics(file: GgufFile, info: TensorInfo) -> dict[str, Any]:
    """range, mean, std, rms and share of zeros of the finite weights; how many are not finite."""
    count = zeros = not_finite = 0
    mean = squares = 0.0  # squares: the sum of (w - mean)^2
    low, high = math.inf, -math.inf
    with np.errstate(over="ignore", invalid="ignore"):
        for piece in pieces(file, info):
            finite = piece[np.isfinite(piece)].astype(np.float64)
            not_finite += len(piece) - len(finite)
            if not len(finite):
                continue
            zeros += len(finite) - int(np.count_nonzero(finite))
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            here = float(finite.mean())
            delta, total = here - mean, count + len(finite)
            squares += float(np.square(finite - here).sum())
            squares += delta * delta * (count * len(finite) / total)
            mean += delta * (len(finite) / total)
            count = total
    found: dict[str, Any] = {"not_finite": not_finite}
    if count:
        variance = squares / count
        found["range"] = [low, high]
        found["mean"], found["std"] = mean, math.sqrt(variance)
        found["rms"] = math.sqrt(variance + mean * mean)
        found["zeros"] = zeros / count
    return found


def histograms(file: GgufFile, info: TensorInfo, found: dict[str, Any]) -> dict[str, Any]:
    """How often each code occurs, and the scales of the blocks; of a type without codes of single
    weights a histogram of the weights. found: what `statistics` said."""
    from qtool.formats.gguf_codes import CODES, block_scales, code_counts
    from qtool.inspecting.histogram import of_scales, of_values

    name = info.type.name
    if name not in CODES:
        if "range" not in found:
            return {}
        return {"histogram": of_values(pieces(file, info), *found["range"])}
    kind = CODES[name]
    codes = np.zeros(kind.levels, np.int64)
    halves = np.zeros(1 << 16, np.int64)  # how often each float16 is a scale
    for raw in _raw(file, info):
        blocks = raw.reshape(-1, info.type.nbytes)
        codes += code_counts(blocks, name)
        scales = block_scales(blocks, name)
        if scales is not None:
            halves += np.bincount(scales.astype(np.float16).view(np.uint16), minlength=1 << 16)
    values: NDArray[Any] = kind.first + np.arange(kind.levels)
    if kind.order is not None:
        from qtool.float_codes import TABLES

        values = TABLES["e2m1"][list(kind.order)]
    more: dict[str, Any] = {
        "code_values": [number.item() for number in values],
        "code_counts": [int(count) for count in codes],
    }
    if kind.scale is not None:
        there = np.flatnonzero(halves)
        values = there.astype(np.uint16).view(np.float16)
        more["scales"] = of_scales(values, halves[there])
    return more
