"""The tensors of a checkpoint's packed matrix to floats: AWQ, GPTQ and compressed-tensors.

    AWQ GEMM       qweight [in, out/8], qzeros [groups, out/8], scales [groups, out]
    AWQ GEMV       qweight [out, in/8], qzeros [out, zw], scales [out, 8 zw]
    GEMV-fast      qweight int16 [out/4, in], qzeros float16 [8 zw, out] = -(scale * zero), scales
    GPTQ           qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales
                   [groups, out], g_idx [in]; version 1 stores (zero - 1) mod 2^bits
    pack-quantized weight_packed [out, in * bits / 32], weight_scale [out, groups],
                   weight_zero_point [out * bits / 32, groups] or none (then it is 2^(bits-1))

Each gives (code - zero) * scale as `packing.dequantize` does, and takes its options: dtype, rows,
out, threads. Scales are float16, float32 or bfloat16 (as uint16).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.native.packing import dequantize, unpack, words_shape

Words = NDArray[np.int32]


def _upright(matrix: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(matrix.T)


def awq_gemm(
    qweight: Words, qzeros: Words, scales: NDArray[Any], group_size: int, **options: Any
) -> NDArray[Any]:
    """AWQ GEMM, [out, in]."""
    shape = (qweight.shape[1] * 8, qweight.shape[0])
    zero = unpack(qzeros, (shape[0], qzeros.shape[0]), 4, "across")
    grid: dict[str, Any] = {"scale": _upright(scales), "zero": zero, "group_size": group_size}
    return dequantize(qweight, shape, 4, "across", **grid, **options)


def awq_gemv(
    qweight: Words, qzeros: Words, scales: NDArray[Any], group_size: int, **options: Any
) -> NDArray[Any]:
    """AWQ GEMV, [out, in]; the padding of zeros and scales is left out."""
    shape = (qweight.shape[0], qweight.shape[1] * 8)
    groups = 1 if group_size == -1 else -(-shape[1] // group_size)
    zero = unpack(qzeros, (shape[0], qzeros.shape[1] * 8), 4, "rows")[:, :groups]
    grid: dict[str, Any] = {"scale": scales[:, :groups], "zero": np.ascontiguousarray(zero)}
    return dequantize(qweight, shape, 4, "rows", group_size=group_size, **grid, **options)


def awq_gemv_fast(
    qweight: NDArray[np.int16],
    scaled_zeros: NDArray[np.float16],
    scales: NDArray[np.float16],
    group_size: int,
    **options: Any,
) -> NDArray[Any]:
    """GEMV-fast and llm-awq, [out, in]; ValueError unless the scaled zeros stand for 0 .. 15."""
    shape = (qweight.shape[0] * 4, qweight.shape[1])
    groups = 1 if group_size == -1 else -(-shape[1] // group_size)
    scale = _upright(scales[:groups]).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = -_upright(scaled_zeros[:groups]).astype(np.float32) / scale
    zero = np.rint(np.where(scale == 0, 0, ratio))
    if not (np.isfinite(zero) & (zero >= 0) & (zero < 16)).all():
        raise ValueError("the scaled zeros are no 4-bit zeros times the scales")
    words = qweight.view(np.int32)
    grid: dict[str, Any] = {"scale": scale, "zero": zero.astype(np.uint8)}
    return dequantize(words, shape, 4, "strips", group_size=group_size, **grid, **options)


def gptq(
    qweight: Words,
    qzeros: Words,
    scales: NDArray[Any],
    bits: int,
    group_size: int,
    *,
    version: int,
    g_idx: NDArray[np.int32] | None = None,
    **options: Any,
) -> NDArray[Any]:
    """GPTQ, [out, in]. version: 1 (zeros stored less one) or 2."""
    if version not in (1, 2):
        raise ValueError(f"version is {version}, expected 1 or 2")
    groups, out_features = scales.shape
    shape = (out_features, qweight.shape[0] * 32 // bits)
    stored = unpack(qzeros, (groups, out_features), bits, "rows")
    # The sum wraps round in a field of its own, never into the next.
    zero = (stored + np.uint8(version == 1)) & np.uint8((1 << bits) - 1)
    grid: dict[str, Any] = {"scale": _upright(scales), "zero": _upright(zero), "g_idx": g_idx}
    return dequantize(qweight, shape, bits, "columns", group_size=group_size, **grid, **options)


def pack_quantized(
    weight_packed: Words,
    weight_scale: NDArray[Any],
    shape: tuple[int, int],
    bits: int,
    group_size: int,
    *,
    zero_point: Words | None = None,
    g_idx: NDArray[np.int32] | None = None,
    **options: Any,
) -> NDArray[Any]:
    """compressed-tensors' pack-quantized, [out, in]: dense words, or the older padded ones.

    The width of the words tells which (dense where both have it: a few columns only); ValueError
    where it is neither.
    """
    layouts = [
        name for name in ("rows", "padded") if words_shape(shape, bits, name) == weight_packed.shape
    ]
    if not layouts:
        raise ValueError(
            f"weight_packed has shape {weight_packed.shape}, expected "
            f"{words_shape(shape, bits, 'rows')} for {bits} bits of {shape}"
        )
    scale = np.ascontiguousarray(weight_scale)
    if zero_point is None:
        zero = np.full(scale.shape, 1 << (bits - 1), np.uint8)
    else:
        across = (scale.shape[1], shape[0])
        zero = _upright(unpack(_upright(zero_point), across, bits, layouts[0]))
    grid: dict[str, Any] = {"scale": scale, "zero": zero, "g_idx": g_idx}
    return dequantize(
        weight_packed, shape, bits, layouts[0], group_size=group_size, **grid, **options
    )
