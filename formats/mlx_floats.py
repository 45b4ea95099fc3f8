"""MLX's modes of small floats: codes and scales are bytes or less, and there are no biases.

    mode     weight                            scales                      w, in float32
    mxfp4    uint32 [out, in / 8]    e2m1      uint8 [out, in / 32]  e8m0  value(q) * scale
    mxfp8    uint32 [out, in / 4]    e4m3      uint8 [out, in / 32]  e8m0  value(q) * scale
    nvfp4    uint32 [out, in / 8]    e2m1      uint8 [out, in / 16]  e4m3  value(q) * scale
             global_scale  float32, of each expert of a stack        value(q) * (scale * (g / 2688))

Codes lie in the words as affine ones do, a little-endian bitstream: the bytes are those of
compressed-tensors and of gpt-oss. global_scale is max|w| (2688 = 448 * 6); of mlx-lm's layers those
of experts alone have one, and it is read, not written. The byte 255 of an e8m0 scale is infinite in
mlx, no number in the standard and here: nobody writes it.

Source: mlx 0.32.4 (mx.quantize, mx.dequantize; all 256 scales with all codes compared).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError
from qtool.formats import bits, stored_codes
from qtool.formats.facts import Look, Stored, check_shape, find
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np

MODES = {
    "mxfp4": Scheme(4, 32, True, "e8m0", "e2m1"),
    "nvfp4": Scheme(4, 16, True, "float8_e4m3", "e2m1"),
    "mxfp8": Scheme(8, 32, True, "e8m0", "e4m3"),
}
_LARGEST = 448 * 6  # the largest scale times the largest code, of nvfp4


def mode_of(scheme: Scheme) -> str:
    """What MLX calls a scheme that it has."""
    return next((mode for mode, one in MODES.items() if one == scheme), "affine")


def check_mode(module: str, look: Look, scheme: Scheme) -> None:
    """FormatError where a config says another mode than the stored tensors are of."""
    scales = find(look, f"{module}.scales")
    small = str(scales.dtype) in ("U8", "uint8")
    words = find(look, f"{module}.weight").shape[1]
    found = _mode_of_bytes(words, scales) if small else "affine"
    said = mode_of(scheme)
    if found != said and (small or scheme.is_float):
        raise FormatError(
            f"{module}: config.json says mode {said}, and the tensors are of mode {found} (scales "
            f"are {scales.dtype} {list(scales.shape)}); correct its table `quantization`"
        )


def _mode_of_bytes(words: int, scales: Stored) -> str:
    """The mode of scales that are bytes, by the words that share one."""
    count = {scheme.group_size * scheme.bits // bits.WORD: mode for mode, scheme in MODES.items()}
    groups = scales.shape[1]
    whole = groups > 0 and words % groups == 0
    return count.get(words // groups, "unknown") if whole else "unknown"


def scheme_in(module: str, look: Look, scheme: Scheme) -> tuple[Scheme, tuple[int, int]]:
    """The scheme and shape [out, in] of a stored matrix; FormatError where shapes disagree."""
    rows, words = find(look, f"{module}.weight").shape
    shape = (rows, words * bits.WORD // scheme.bits)
    if 0 in shape:
        raise FormatError(f"{module}: it is empty")
    check_shape(f"{module}.scales", find(look, f"{module}.scales").shape, scheme.grid(shape))
    if look(f"{module}.biases") is not None:
        raise FormatError(
            f"{module}: has biases, which mode {mode_of(scheme)} has not; the file is damaged"
        )
    outer = look(f"{module}.global_scale")
    if outer is None:
        return scheme, shape
    if scheme != MODES["nvfp4"] or str(outer.dtype) not in ("F32", "float32"):
        raise FormatError(f"{module}.global_scale: expected one float32 number, of mode nvfp4")
    return replace(scheme, outer="multiplies"), shape


def unpack(module: str, get: Callable[[str], NDArray[Any]], scheme: Scheme) -> GroupQuant:
    """Read one matrix under a scheme of scheme_in; `get` gives a stored tensor by name."""
    words, scales = get(f"{module}.weight"), get(f"{module}.scales")
    columns = words.shape[1] * bits.WORD // scheme.bits
    outer = None
    if scheme.outer:
        whole = stored_codes.one_number(module, get(f"{module}.global_scale"))
        outer = float(np.float32(whole) / np.float32(_LARGEST))
    shape = (len(words), columns)
    return GroupQuant(
        scheme,
        bits.unpack(words, scheme.bits, columns),
        stored_codes.scale_grid(scales, scheme, shape),
        stored_codes.middle_zeros(scheme, shape),
        None,
        outer,
    )
