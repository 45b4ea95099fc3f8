"""What `qtool bench` times: every kernel, with how many bytes a weight it reads and writes.

Sources are random codes with scales of ordinary size, in buffers that all cases share.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import native, native_gguf
from qtool.gguf.gptq.levels import levels
from qtool.gguf_types import BY_NAME, BlockType
from qtool.native.floats8 import dequantize_bytes, dequantize_fp4
from qtool.native.library import aligned
from qtool.native.packing import words_shape

COLUMNS = 4096
GROUP = 128
DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}

Run = Callable[[int], object]  # threads -> what the kernel returns


def _view(memory: NDArray[np.uint8], shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    found: NDArray[Any] = memory[:size].view(dtype).reshape(shape)
    return found


@dataclass(frozen=True)
class Buffers:
    """Memory that all cases read and write, touched before anything is timed."""

    size: int
    source: NDArray[np.uint8] = field(init=False)
    target: NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", aligned((self.size,), np.uint8))
        object.__setattr__(self, "target", aligned((self.size,), np.uint8))
        some = np.random.PCG64(0).random_raw(1 << 17).view(np.uint8)
        for begin in range(0, self.size, some.size):
            self.source[begin : begin + some.size] = some[: self.size - begin]
        self.target[:] = 0

    def random(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Random bits, from the first byte of the source on."""
        return _view(self.source, shape, dtype)

    def out(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """What a kernel may overwrite."""
        return _view(self.target, shape, dtype)


@dataclass(frozen=True)
class Case:
    """One kernel with one kind of result."""

    name: str
    dtype: str  # of what it writes
    read: float  # bytes a weight
    write: float
    prepare: Callable[[int, Buffers], Run]  # of a matrix of so many rows


def _normal(rows: int, columns: int = COLUMNS) -> NDArray[np.float32]:
    some = np.random.default_rng(0).standard_normal((64, columns), np.float32) * np.float32(0.02)
    return np.ascontiguousarray(np.resize(some, (rows, columns)))


def _scales(rows: int, groups: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    rng = np.random.default_rng(1)
    scale = rng.uniform(0.005, 0.02, (rows, groups)).astype(np.float32)
    return scale, rng.integers(0, 4, (rows, groups), dtype=np.uint8)


@cache
def _blocks(block: BlockType) -> NDArray[np.uint8]:
    """64 rows of blocks as their encoder makes them."""
    return native_gguf.encode(_normal(64), block, np.ones(COLUMNS, np.float32))


def _gguf(block: BlockType, dtype: str) -> Case:
    def prepare(rows: int, buffers: Buffers) -> Run:
        blocks = np.resize(_blocks(block), (rows, block.row_bytes(COLUMNS)))
        out = buffers.out((rows, COLUMNS), _NUMPY[dtype])
        return lambda threads: native_gguf.dequantize(
            blocks, block, COLUMNS, dtype, out=out, threads=threads
        )

    bytes_ = block.nbytes / block.weights
    return Case(f"dequantize gguf-{block.name}", dtype, bytes_, DTYPES[dtype], prepare)


def _encode(block: BlockType, weighted: bool) -> Case:
    def prepare(rows: int, buffers: Buffers) -> Run:
        weight = _normal(rows)
        importance = np.random.default_rng(2).exponential(1, COLUMNS).astype(np.float32)
        given = importance if weighted else None
        return lambda threads: native_gguf.encode(weight, block, given, threads=threads)

    name = f"encode gguf-{block.name}" + (" importance" if weighted else "")
    return Case(name, "blocks", 4, block.nbytes / block.weights, prepare)


def _words(name: str, bits: int, layout: str, dtype: str, ordered: bool = False) -> Case:
    groups = COLUMNS // GROUP

    def prepare(rows: int, buffers: Buffers) -> Run:
        shape = (rows, COLUMNS)
        words = buffers.random(words_shape(shape, bits, layout), np.int32)
        scale, zero = _scales(rows, groups)
        out = buffers.out(shape, _NUMPY[dtype])
        index = np.arange(COLUMNS, dtype=np.int32) // GROUP
        g_idx = np.random.default_rng(3).permutation(index) if ordered else None
        options: dict[str, Any] = {"g_idx": g_idx, "group_size": GROUP, "dtype": dtype}
        options |= {"scale": scale, "zero": zero, "out": out}
        return lambda threads: native.dequantize(
            words, shape, bits, layout, threads=threads, **options
        )

    width = np.prod(words_shape((1024, COLUMNS), bits, layout)) * 4 / (1024 * COLUMNS)
    return Case(f"dequantize {name}", dtype, float(width) + 5 / GROUP, DTYPES[dtype], prepare)


def _bytes(name: str, kind: str, block: tuple[int, int], dtype: str) -> Case:
    def prepare(rows: int, buffers: Buffers) -> Run:
        codes = buffers.random((rows, COLUMNS), np.int8 if kind == "int8" else np.uint8)
        down = rows if block[0] == -1 else block[0]
        across = COLUMNS if block[1] == -1 else block[1]
        scale, _ = _scales(-(-rows // down), -(-COLUMNS // across))
        out = buffers.out((rows, COLUMNS), _NUMPY[dtype])
        return lambda threads: dequantize_bytes(
            codes, kind, scale=scale, block=block, dtype=dtype, out=out, threads=threads
        )

    return Case(f"dequantize {name}", dtype, 1, DTYPES[dtype], prepare)


def _fp4(name: str, kind: str, group: int, dtype: str) -> Case:
    def prepare(rows: int, buffers: Buffers) -> Run:
        codes = buffers.random((rows, COLUMNS // 2), np.uint8)
        low, high = (112, 122) if kind == "e8m0" else (40, 100)
        shape = (rows, COLUMNS // group)
        scale = np.random.default_rng(4).integers(low, high, shape, dtype=np.uint8)
        divisor = 200.0 if kind == "e4m3fn" else None
        out = buffers.out((rows, COLUMNS), _NUMPY[dtype])
        return lambda threads: dequantize_fp4(
            codes, scale, kind, divisor=divisor, dtype=dtype, out=out, threads=threads
        )

    return Case(f"dequantize {name}", dtype, 0.5 + 1 / group, DTYPES[dtype], prepare)


def _pack(bits: int, layout: str, unpacking: bool) -> Case:
    def prepare(rows: int, buffers: Buffers) -> Run:
        shape = (rows, COLUMNS)
        wanted = words_shape(shape, bits, layout)
        if unpacking:
            words, out = buffers.random(wanted, np.int32), buffers.out(shape, np.uint8)
            return lambda threads: native.unpack(
                words, shape, bits, layout, out=out, threads=threads
            )
        codes = np.random.default_rng(5).integers(0, 1 << bits, (64, COLUMNS), dtype=np.uint8)
        many = np.resize(codes, shape)
        room = buffers.out(wanted, np.int32)
        return lambda threads: native.pack(many, bits, layout, out=room, threads=threads)

    width = float(np.prod(words_shape((1024, COLUMNS), bits, layout))) * 4 / (1024 * COLUMNS)
    verb, read, write = ("unpack", width, 1.0) if unpacking else ("pack", 1.0, width)
    return Case(
        f"{verb} {layout} {bits} bits", "codes" if unpacking else "words", read, write, prepare
    )


def _groups(search: bool) -> Case:
    def prepare(rows: int, buffers: Buffers) -> Run:
        weight = _normal(rows)
        tried = native.RangeSearch() if search else None
        return lambda threads: native.quantize_groups(
            weight, bits=4, group_size=GROUP, symmetric=False, search=tried, threads=threads
        )

    name = "quantize_groups 4 bits g128" + (" search" if search else "")
    return Case(name, "codes", 4, 1, prepare)


def _factor(columns: int, kind: Any) -> NDArray[Any]:
    upper = np.triu(np.random.default_rng(6).standard_normal((columns, columns)) * 0.01, 1)
    return np.ascontiguousarray(upper + np.eye(columns), kind)


def _sweep(dtype: str) -> Case:
    columns, kind = 2048, np.dtype(dtype)

    def prepare(rows: int, buffers: Buffers) -> Run:
        weight = _normal(rows, columns).astype(kind)
        hinv = _factor(columns, kind)
        return lambda threads: native.gptq_sweep(
            weight, hinv, bits=4, group_size=GROUP, symmetric=False, threads=threads
        )

    return Case(f"gptq_sweep 4 bits g128 2048 wide {dtype}", "codes", kind.itemsize, 1, prepare)


def _sweep_onto(name: str, affine: bool) -> Case:
    """As blocks of Q4_K, or of IQ4_XS, have levels."""
    columns, width = 2048, 32
    whole = np.arange(16, dtype=np.float32)
    book = whole if affine else whole * whole

    def prepare(rows: int, buffers: Buffers) -> Run:
        weight = _normal(rows, columns)
        hinv = _factor(columns, np.float32)
        scale, _ = _scales(rows, columns // width)
        offset = np.full_like(scale, 0.05) if affine else None
        levels = native.Levels(width, scale, offset, book)
        return lambda threads: native.gptq_sweep_levels(
            weight, hinv, levels=levels, threads=threads
        )

    return Case(f"gptq_sweep {name} 2048 wide", "codes", 4, 1, prepare)


def _sweep_points(type_: str) -> Case:
    """As blocks of a type have levels that stand together."""
    columns = 2048

    def prepare(rows: int, buffers: Buffers) -> Run:
        weight = _normal(rows, columns)
        hinv = _factor(columns, np.float32)
        one = np.ones(columns, np.float32)
        found = levels(native_gguf.encode(weight, BY_NAME[type_], one), BY_NAME[type_], columns)
        return lambda threads: native.gptq_sweep_levels(weight, hinv, levels=found, threads=threads)

    return Case(f"gptq_sweep {type_} 2048 wide", "codes", 4, 1, prepare)


_CONVERSIONS: dict[tuple[str, str], Callable[..., NDArray[Any]]] = {
    ("float32", "float16"): native.to_float16,
    ("float32", "bfloat16"): native.to_bfloat16,
    ("float16", "float32"): native.from_float16,
    ("bfloat16", "float32"): native.from_bfloat16,
}


def _convert(source: str, target: str) -> Case:
    function = _CONVERSIONS[source, target]

    def prepare(rows: int, buffers: Buffers) -> Run:
        exact = _normal(rows)
        values = exact if source == "float32" else _CONVERSIONS["float32", source](exact)
        out = buffers.out((rows, COLUMNS), _NUMPY[target])
        return lambda threads: function(values, threads, out=out)

    return Case(f"convert {source}", target, DTYPES[source], DTYPES[target], prepare)


def _dequantizing(dtype: str) -> Iterator[Case]:
    yield from (_gguf(block, dtype) for block in BY_NAME.values())
    yield _words("awq gemm", 4, "across", dtype)
    yield _words("awq gemv", 4, "rows", dtype)
    yield _words("awq gemv-fast", 4, "strips", dtype)
    for bits in (2, 3, 4, 8):
        yield _words(f"gptq {bits} bits", bits, "columns", dtype)
    yield _words("gptq 4 bits g_idx", 4, "columns", dtype, ordered=True)
    for bits in range(2, 9):
        yield _words(f"pack-quantized {bits} bits", bits, "rows", dtype)
    for bits in (3, 5, 6, 7):
        yield _words(f"pack-quantized {bits} bits padded", bits, "padded", dtype)
    yield _bytes("int8 channel", "int8", (1, -1), dtype)
    yield _bytes("int8 tensor", "int8", (-1, -1), dtype)
    for kind in ("e4m3fn", "e5m2"):
        yield _bytes(f"fp8 {kind} channel", f"float8_{kind}", (1, -1), dtype)
    yield _bytes("fp8 e4m3fn 128x128", "float8_e4m3fn", (128, 128), dtype)
    yield _fp4("mxfp4", "e8m0", 32, dtype)
    yield _fp4("nvfp4", "e4m3fn", 16, dtype)


def all_cases() -> list[Case]:
    """Every kernel in the order of the table."""
    cases = [case for dtype in DTYPES for case in _dequantizing(dtype)]
    cases += [_convert(source, target) for source, target in _CONVERSIONS]
    for block in BY_NAME.values():
        cases += [_encode(block, w) for w in (False, True) if w or not block.needs_importance]
    cases += [_groups(False), _groups(True), _sweep("float32"), _sweep("float64")]
    cases += [_sweep_onto("levels", affine=True), _sweep_onto("book", affine=False)]
    cases += [_sweep_points(type_) for type_ in ("IQ1_M", "IQ2_S", "IQ3_XXS")]
    layouts = [("columns", b) for b in (2, 3, 4, 8)] + [("across", 4), ("strips", 4)]
    layouts += [("rows", b) for b in range(2, 9)] + [("padded", b) for b in (3, 5, 6, 7)]
    return cases + [_pack(bits, layout, way) for way in (True, False) for layout, bits in layouts]
