"""What is too large for the caches is written past them, where it begins at a cache line: the
same bits as what begins elsewhere, which is written through them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool import native, native_gguf
from qtool.gguf_types import BY_NAME
from qtool.native.floats8 import dequantize_bytes
from qtool.native.library import aligned
from qtool.native.packing import words_shape

COLUMNS = 1024
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
ROWS = {"float32": 1024, "float16": 2048, "bfloat16": 2048}  # of 4 MiB
SOURCE = np.random.default_rng(0).integers(0, 256, 1 << 22, dtype=np.uint8)


def _same(dtype: str, run: Callable[[NDArray[Any]], object]) -> None:
    """Both ways, with a row after the last that must stay as it was."""
    kind = np.dtype(DTYPES[dtype])
    rows = ROWS[dtype]
    room = aligned(((rows + 1) * COLUMNS + 64,), kind)
    found = []
    for begin in (0, 1):
        room.view(np.uint8)[:] = 0xA5
        run(room[begin : begin + rows * COLUMNS].reshape(rows, COLUMNS))
        assert (room[begin + rows * COLUMNS :].view(np.uint8) == 0xA5).all()
        assert (room[:begin].view(np.uint8) == 0xA5).all()
        found.append(room[begin : begin + rows * COLUMNS].copy().view(np.uint8))
    assert not (found[0][-4096:] == 0xA5).all()
    assert np.array_equal(found[0], found[1])


@pytest.fixture(params=native.available())
def isa(request: pytest.FixtureRequest) -> Any:
    before = native.selected()
    native.select(request.param)
    yield request.param
    native.select(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gguf(isa: str, dtype: str) -> None:
    for block in BY_NAME.values():
        rows, row_bytes = ROWS[dtype], block.row_bytes(COLUMNS)
        blocks = SOURCE[: rows * row_bytes].reshape(rows, row_bytes)

        def run(out: NDArray[Any], block: Any = block, blocks: Any = blocks) -> None:
            native_gguf.dequantize(blocks, block, COLUMNS, dtype, out=out, threads=1)

        _same(dtype, run)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("block", [(1, -1), (128, 128)])
def test_bytes(isa: str, dtype: str, kind: str, block: tuple[int, int]) -> None:
    rows = ROWS[dtype]
    codes = SOURCE[: rows * COLUMNS].reshape(rows, COLUMNS)
    codes = codes.view(np.int8) if kind == "int8" else codes
    shape = (rows, 1) if block[0] == 1 else (rows // 128, COLUMNS // 128)
    scale = np.random.default_rng(1).uniform(0.5, 2, shape).astype(np.float32)

    def run(out: NDArray[Any]) -> None:
        dequantize_bytes(codes, kind, scale=scale, block=block, dtype=dtype, out=out, threads=1)

    _same(dtype, run)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [32, 96, 128])
@pytest.mark.parametrize("layout", ["strips", "across", "columns", "rows"])
def test_four_bits(isa: str, dtype: str, group: int, layout: str) -> None:
    shape = (ROWS[dtype], COLUMNS)
    wanted = words_shape(shape, 4, layout)
    words = SOURCE[: int(np.prod(wanted)) * 4].view(np.int32).reshape(wanted)
    rng = np.random.default_rng(2)
    groups = (shape[0], -(-COLUMNS // group))
    scale = rng.uniform(0.5, 2, groups).astype(np.float32)
    zero = rng.integers(0, 16, groups, dtype=np.uint8)

    def run(out: NDArray[Any]) -> None:
        native.dequantize(
            words, shape, 4, layout,
            scale=scale, zero=zero, group_size=group, dtype=dtype, out=out, threads=1,
        )  # fmt: skip

    _same(dtype, run)
