"""Tasks for codes that are numbers by themselves, and for blocks of GGUF; see tasks.py."""

import struct
from typing import Any

from qtool.cuda.arrays import describe
from qtool.cuda.tasks import (
    _STORED,
    FLOATS,
    Task,
    _dequantize,
    _groups,
    _place,
    ceil,
)
from qtool.gguf_types import BlockType

_CODES = {
    "int8": ("int8",),
    "uint8": ("uint8",),
    "float8_e4m3fn": ("uint8", "float8_e4m3fn"),
    "float8_e5m2": ("uint8", "float8_e5m2"),
}
_SCALES = {
    "e8m0": ("uint8", "float8_e8m0fnu"),
    "e4m3fn": ("uint8", "float8_e4m3fn"),
}


def bytes_(
    codes: Any, kind: str, *, scale: Any, block: tuple[int, int], out: Any, zero: Any = None
) -> Task:
    """(code - zero) * scale, as `qtool.native.floats8.dequantize_bytes`."""
    if kind not in _CODES:
        raise ValueError(f"codes are {kind!r}, expected {', '.join(_CODES)}")
    found = describe("codes", codes, _CODES[kind], (None, None))
    rows, cols = found.shape
    block_rows = rows if block[0] == -1 else block[0]
    if block_rows < 1:
        raise ValueError(f"block is {block}, expected numbers of at least 1, or -1")
    fields = _groups(cols, block[1])
    wanted = (ceil(rows, block_rows), ceil(cols, fields["group_size"]))
    scales = describe("scale", scale, FLOATS, wanted)
    fields |= _place("codes", found) | _place("scale", scales)
    fields |= {"scale_dtype": _STORED[scales.dtype], "scale_row": wanted[1]}
    fields |= {"pitch": cols, "block_rows": block_rows}
    if zero is not None:
        if kind not in ("int8", "uint8"):
            raise ValueError(f"zero is given, and {kind} has none")
        fields |= _place("zero", describe("zero", zero, (kind,), wanted))
    return _dequantize(kind, out, (rows, cols), **fields)


def fp4(
    codes: Any,
    scale: Any,
    scale_kind: str,
    *,
    out: Any,
    divisor: float | None = None,
    factor: float | None = None,
) -> Task:
    """code * (scale / divisor), or scale * factor, as `qtool.native.floats8.dequantize_fp4`."""
    if scale_kind not in _SCALES:
        raise ValueError(f"scale_kind is {scale_kind!r}, expected {', '.join(_SCALES)}")
    if divisor is not None and factor is not None:
        raise ValueError("both divisor and factor are given, expected one of them")
    found = describe("codes", codes, ("uint8",), (None, None))
    rows, cols = found.shape[0], found.shape[1] * 2
    scales = describe("scale", scale, _SCALES[scale_kind], (rows, None))
    groups = scales.shape[1]
    if not groups or not cols or cols % groups or cols // groups % 16:
        raise ValueError(
            f"scale has {groups} groups for {cols} columns, expected groups of 16 columns "
            "or a multiple"
        )
    outer = divisor if divisor is not None else 1.0 if factor is None else factor
    (bits,) = struct.unpack("<I", struct.pack("<f", outer))
    fields = _groups(cols, cols // groups) | _place("codes", found) | _place("scale", scales)
    fields |= {"pitch": cols // 2, "scale_row": groups, "outer": bits}
    fields |= {"divide": int(divisor is not None)}
    return _dequantize(f"fp4_{scale_kind}", out, (rows, cols), **fields)


def gguf(blocks: Any, block: BlockType, in_features: int, *, out: Any) -> Task:
    """Rows of blocks, uint8 [out, bytes of a row], as `qtool.native_gguf.dequantize`."""
    pitch = block.row_bytes(in_features)
    found = describe("blocks", blocks, ("uint8",), (None, pitch))
    fields = _place("codes", found) | {"pitch": pitch}
    return _dequantize(block.name.lower(), out, (found.shape[0], in_features), **fields)
