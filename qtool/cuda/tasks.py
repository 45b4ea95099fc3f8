"""What a dequantizing kernel is told: one function for each way weights are stored.

Each takes arrays as they lie in a checkpoint, checks them, and gives the kernel's name, the blocks
of its grid and its fields (QT_TASK of kernels/cuda/base.h, by the same names). `out` is written:
[out, in] in float32, float16 or bfloat16 (uint16 of numpy). Layouts of words are those of
`qtool.native.packing`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qtool.cuda.arrays import Array, describe

# fmt: off
FIELDS = [
    "codes", "scale", "zero", "index", "values", "codes_bytes", "scale_bytes", "zero_bytes",
    "index_bytes", "values_bytes", "rows", "cols", "pitch", "group_size", "group_shift",
    "block_rows", "scale_dtype", "scale_row", "scale_group", "zero_kind", "zero_row",
    "zero_group", "zero_value", "bits", "outer", "divide", "batch", "splits",
    "inputs", "inputs_bytes", "sums", "sums_bytes", "done", "done_bytes", "first_row", "weight",
    "weight_bytes", "importance", "importance_bytes", "gram", "gram_bytes", "ratios",
    "ratios_bytes", "ratio_count", "symmetric", "reach",
]
# fmt: on

FLOATS = ("float32", "float16", "bfloat16", "uint16")
_STORED = {"float32": 0, "float16": 1, "bfloat16": 2, "uint16": 2}
_SUFFIX = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "uint16": "bf16"}
_WORDS = ("int32", "uint32")

# Rows, columns and threads of a block: kernels/cuda/grid.h and transposed.h.
_ALONG = (8, 1024, 256)
_TILES = {"columns": (64, 128, 256), "across": (128, 64, 128)}
_MOST_DOWN = 65535  # blocks in y
_WIDEST = 1 << 28

# Where zeros are: kernels/cuda/scales.h.
VALUE, BYTES, ALONG_ROWS, ALONG_GROUPS, PADDED, ACROSS, SCALED = range(7)


@dataclass(frozen=True)
class Task:
    """One launch."""

    kernel: str
    blocks: tuple[int, int]
    fields: Mapping[str, int] = field(default_factory=dict)
    threads: int = 256  # of a block
    waits: bool = False  # for the kernels before it, so that it may begin before they have ended
    shared: int = 0  # bytes of shared memory that a block has beside the kernel's own

    def arguments(self) -> list[int]:
        """The fields in the kernel's order; those not given are zero."""
        return [self.fields.get(name, 0) for name in FIELDS]


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def _place(name: str, array: Array) -> dict[str, int]:
    return {name: array.address, f"{name}_bytes": array.nbytes}


def _groups(in_features: int, group_size: int) -> dict[str, int]:
    """Fields of groups of columns; -1 is all of them."""
    size = in_features if group_size == -1 else group_size
    if size < 1:
        raise ValueError(f"group_size is {group_size}, expected -1 or at least 1")
    power = size & (size - 1) == 0
    shift = _WIDEST.bit_length() - 1 if size >= in_features else size.bit_length() - 1
    return {"group_size": size, "group_shift": shift if power or size >= in_features else -1}


def _dequantize(format_: str, out: Any, shape: tuple[int, int], **more: int) -> Task:
    """A task that writes `out`: columns along x, rows down y."""
    down, across, threads = _TILES.get(format_.split("_")[0], _ALONG)
    if min(shape) < 1 or shape[1] >= _WIDEST or shape[0] > down * _MOST_DOWN:
        raise ValueError(
            f"a matrix of shape {shape}, expected 1 to {down * _MOST_DOWN} rows and "
            f"{_WIDEST - 1} columns"
        )
    values = describe("out", out, FLOATS, shape)
    fields = {"rows": shape[0], "cols": shape[1], **_place("values", values), **more}
    blocks = (ceil(shape[1], across), ceil(shape[0], down))
    return Task(f"dequantize_{format_}_{_SUFFIX[values.dtype]}", blocks, fields, threads)


def _scales(
    scale: Any, out_features: int, groups: int, by_group: bool, width: int | None = None
) -> dict[str, int]:
    """Scales [out, groups], or [groups, out]; `width` is how many groups there is room for."""
    width = groups if width is None else width
    wanted = (width, out_features) if by_group else (out_features, width)
    found = describe("scale", scale, FLOATS, wanted)
    row, group = (1, out_features) if by_group else (width, 1)
    return {
        **_place("scale", found),
        "scale_dtype": _STORED[found.dtype],
        "scale_row": row,
        "scale_group": group,
    }


def _zeros(array: Array, kind: int, row: int, group: int, bits: int, more: int = 0) -> Any:
    place = _place("zero", array)
    layout = {"zero_kind": kind, "zero_row": row, "zero_group": group}
    return {**place, **layout, "zero_value": more, "bits": bits}


def _order(g_idx: Any, in_features: int) -> dict[str, int]:
    """The group of each column, if columns were reordered. The caller checks its range."""
    if g_idx is None:
        return {}
    return _place("index", describe("g_idx", g_idx, ("int32",), (in_features,)))


def _count(in_features: int, group_size: int, scale: Any, axis: int, g_idx: Any) -> int:
    """How many groups there are: as many as columns need, or as scales have with an order."""
    if g_idx is not None:
        return int(scale.shape[axis])
    return 1 if group_size == -1 else ceil(in_features, group_size)


def _codes(
    words: Any, shape: tuple[int, int], bits: int, layout: str
) -> tuple[str, dict[str, int]]:
    """Name and fields of words."""
    from qtool.native.packing import words_shape

    if layout == "columns" and bits not in (2, 3, 4, 8):
        raise ValueError(f"{bits} bits, expected 2, 3, 4 or 8 in the layout columns")
    if layout == "padded" and 32 % bits == 0:
        layout = "rows"  # the same words
    wanted = words_shape(shape, bits, layout)
    found = describe("words", words, _WORDS, wanted)
    return f"{layout}_{bits}", {**_place("codes", found), "pitch": wanted[1]}


def words(
    words: Any,
    shape: tuple[int, int],
    bits: int,
    layout: str,
    *,
    scale: Any,
    zero: Any,
    group_size: int,
    out: Any,
    g_idx: Any = None,
) -> Task:
    """As `qtool.native.dequantize`: scale [out, groups], zero uint8 [out, groups]."""
    groups = _count(shape[1], group_size, scale, 1, g_idx)
    name, fields = _codes(words, shape, bits, layout)
    fields |= _scales(scale, shape[0], groups, by_group=False)
    zeros = describe("zero", zero, ("uint8",), (shape[0], groups))
    fields |= _zeros(zeros, BYTES, groups, 1, bits)
    fields |= _groups(shape[1], group_size) | _order(g_idx, shape[1])
    return _dequantize(name, out, shape, **fields)


def awq_gemm(qweight: Any, qzeros: Any, scales: Any, group_size: int, *, out: Any) -> Task:
    """AWQ GEMM: qweight [in, out/8], qzeros [groups, out/8], scales [groups, out]."""
    shape = (int(qweight.shape[1]) * 8, int(qweight.shape[0]))
    groups = _count(shape[1], group_size, scales, 0, None)
    name, fields = _codes(qweight, shape, 4, "across")
    fields |= _scales(scales, shape[0], groups, by_group=True)
    zeros = describe("qzeros", qzeros, _WORDS, (groups, shape[0] // 8))
    fields |= _zeros(zeros, ACROSS, 0, shape[0] // 8, 4) | _groups(shape[1], group_size)
    return _dequantize(name, out, shape, **fields)


def awq_gemv(qweight: Any, qzeros: Any, scales: Any, group_size: int, *, out: Any) -> Task:
    """AWQ GEMV: qweight [out, in/8], qzeros [out, zw], scales [out, 8 zw]."""
    shape = (int(qweight.shape[0]), int(qweight.shape[1]) * 8)
    groups = _count(shape[1], group_size, scales, 1, None)
    name, fields = _codes(qweight, shape, 4, "rows")
    zeros = describe("qzeros", qzeros, _WORDS, (shape[0], None))
    width = zeros.shape[1]
    if 8 * width < groups:
        raise ValueError(f"qzeros has room for {8 * width} groups, expected {groups}")
    fields |= _scales(scales, shape[0], groups, by_group=False, width=8 * width)
    fields |= _zeros(zeros, ALONG_GROUPS, width, 0, 4) | _groups(shape[1], group_size)
    return _dequantize(name, out, shape, **fields)


def awq_gemv_fast(
    qweight: Any, scaled_zeros: Any, scales: Any, group_size: int, *, out: Any
) -> Task:
    """GEMV-fast and llm-awq: qweight int16 [out/4, in], both others float16 [8 zw, out].

    Scaled zeros that stand for no number of 0 .. 15 are not noticed here.
    """
    shape = (int(qweight.shape[0]) * 4, int(qweight.shape[1]))
    if shape[1] % 64:
        raise ValueError(f"qweight has {shape[1]} columns, expected a multiple of 64")
    groups = _count(shape[1], group_size, scales, 0, None)
    found = describe("qweight", qweight, ("int16",), (None, None))
    room = int(scales.shape[0])
    if room < groups:
        raise ValueError(f"scales has {room} groups, expected {groups}")
    fields = _place("codes", found)
    fields |= _scales(scales, shape[0], groups, by_group=True, width=room)
    zeros = describe("scaled_zeros", scaled_zeros, ("float16",), (room, shape[0]))
    fields |= _zeros(zeros, SCALED, 1, shape[0], 4) | _groups(shape[1], group_size)
    return _dequantize("strips_4", out, shape, **fields)


def gptq(
    qweight: Any,
    qzeros: Any,
    scales: Any,
    bits: int,
    group_size: int,
    *,
    version: int,
    out: Any,
    g_idx: Any = None,
) -> Task:
    """GPTQ: qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out].

    version: 1 (zeros stored less one) or 2.
    """
    if version not in (1, 2):
        raise ValueError(f"version is {version}, expected 1 or 2")
    shape = (int(qweight.shape[1]), int(qweight.shape[0]) * 32 // bits)
    groups = _count(shape[1], group_size, scales, 0, g_idx)
    name, fields = _codes(qweight, shape, bits, "columns")
    fields |= _scales(scales, shape[0], groups, by_group=True)
    width = ceil(shape[0] * bits, 32)
    zeros = describe("qzeros", qzeros, _WORDS, (groups, width))
    fields |= _zeros(zeros, ALONG_ROWS, 1, width, bits, int(version == 1))
    fields |= _groups(shape[1], group_size) | _order(g_idx, shape[1])
    return _dequantize(name, out, shape, **fields)


def pack_quantized(
    weight_packed: Any,
    weight_scale: Any,
    shape: tuple[int, int],
    bits: int,
    group_size: int,
    *,
    out: Any,
    zero_point: Any = None,
    g_idx: Any = None,
) -> Task:
    """compressed-tensors' pack-quantized, dense or padded as the width of the words tells."""
    from qtool.native.packing import words_shape

    width = int(weight_packed.shape[1])
    layouts = [n for n in ("rows", "padded") if words_shape(shape, bits, n)[1] == width]
    if not layouts:
        wanted = words_shape(shape, bits, "rows")
        have = tuple(weight_packed.shape)
        raise ValueError(
            f"weight_packed has shape {have}, expected {wanted} for {bits} bits of {shape}"
        )
    groups = _count(shape[1], group_size, weight_scale, 1, g_idx)
    name, fields = _codes(weight_packed, shape, bits, layouts[0])
    fields |= _scales(weight_scale, shape[0], groups, by_group=False)
    if zero_point is None:
        fields |= {"zero_kind": VALUE, "zero_value": 1 << (bits - 1)}
    else:
        padded = layouts[0] == "padded"
        words_down = ceil(shape[0], 32 // bits) if padded else ceil(shape[0] * bits, 32)
        zeros = describe("zero_point", zero_point, _WORDS, (words_down, groups))
        fields |= _zeros(zeros, PADDED if padded else ALONG_ROWS, groups, 1, bits)
    fields |= _groups(shape[1], group_size) | _order(g_idx, shape[1])
    return _dequantize(name, out, shape, **fields)
