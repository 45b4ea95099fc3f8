"""CUDA kernels that encode GGUF blocks, on the host: the CPU's bytes, and the CPU's sums."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool import native_gguf
from qtool.cuda import encode_tasks
from qtool.gguf_types import BY_NAME, BlockType
from qtool.native.sums import squares
from support.cuda.cuda_emulation import Emulator, emulator, placed, room
from support.cuda.encoded_blocks import encoded
from support.kernels import gguf_data
from support.kernels import packed_definitions as define

__all__ = ["emulator"]

ENCODED = [*BY_NAME.values()]


def same(
    emulator: Emulator, found: NDArray[np.uint8], want: NDArray[np.uint8], block: BlockType, of: str
) -> None:
    """Every byte; where a NaN has another sign, as on a GPU, not of blocks that are no numbers.

    Weights that are so large are refused, here and there.
    """
    if emulator.own_nan:
        columns = want.shape[1] // block.nbytes * block.weights
        good = [
            np.isfinite(native_gguf.dequantize(b, block, columns)).reshape(-1, block.weights).all(1)
            for b in (found, want)
        ]
        np.testing.assert_array_equal(*good, of)
        found, want = (b.reshape(-1, block.nbytes)[good[0]] for b in (found, want))
    np.testing.assert_array_equal(found, want, of)


@pytest.mark.parametrize("block", ENCODED, ids=lambda block: block.name)
def test_bytes_are_the_cpus(emulator: Emulator, block: BlockType) -> None:
    """Every kind of weights that the CPU's digests are of, hostile ones among them."""
    weight = np.concatenate([gguf_data.digested(kind) for kind in gguf_data.DIGESTED])
    for importance in gguf_data.IMPORTANCE[block.needs_importance :]:
        factors = gguf_data.importance(importance, weight.shape[1])
        found = encoded(emulator, weight, block, factors)
        want = native_gguf.encode(weight, block, factors)
        same(emulator, found, want, block, importance)


@pytest.mark.parametrize("block", ENCODED, ids=lambda block: block.name)
def test_grids_and_tails(emulator: Emulator, block: BlockType) -> None:
    """Fewer blocks than threads, as many, and one more; threads in either order."""
    for rows, row_blocks in [(1, 1), (64, 1), (13, 5)]:
        columns = row_blocks * block.weights
        weight = gguf_data.weights("bell", rows, columns, seed=rows)
        factors = gguf_data.importance("spread", columns)
        for chosen in (None, factors)[block.needs_importance :]:
            found = encoded(emulator, weight, block, chosen, order=rows % 2)
            np.testing.assert_array_equal(found, native_gguf.encode(weight, block, chosen))


@pytest.mark.parametrize("block", ENCODED, ids=lambda block: block.name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_in_half_precision(emulator: Emulator, dtype: str, block: BlockType) -> None:
    weight = gguf_data.weights("mixed", 2, 512)
    stored = weight.astype(np.float16) if dtype == "float16" else define.bfloat16_of(weight)
    wide = (
        stored.astype(np.float32)
        if dtype == "float16"
        else (stored.astype(np.uint32) << 16).view(np.float32)
    )
    factors = gguf_data.importance("spread", 512)
    found = encoded(emulator, stored, block, factors)
    np.testing.assert_array_equal(found, native_gguf.encode(wide, block, factors))


@pytest.mark.parametrize("name", ["Q4_1", "Q4_K", "Q6_K"])
def test_rows_of_several_matrices(emulator: Emulator, name: str) -> None:
    """Experts: rows 5 to 12 of three matrices of four rows, each with importance of its own."""
    block, weight = BY_NAME[name], gguf_data.weights("bell", 12, 512)
    factors = [gguf_data.importance("spread", 512, seed) for seed in range(3)]
    own = [
        native_gguf.encode(weight[4 * n : 4 * n + 4].copy(), block, factors[n]) for n in range(3)
    ]
    lines = np.stack([line for line in factors if line is not None])
    found = encoded(emulator, weight[5:], block, lines, first_row=5, matrix_rows=4)
    np.testing.assert_array_equal(found, np.concatenate(own)[5:])


def test_weights_that_are_not_finite_end(emulator: Emulator) -> None:
    """They are refused by their sum of squares; what is encoded until then has no meaning."""
    for odd in (np.nan, np.inf, -np.inf):
        weight = gguf_data.weights("bell", 2, 256)
        weight[1, 7:9] = odd
        for block in ENCODED:
            spread = gguf_data.importance("spread", 256)
            for factors in (None, spread)[block.needs_importance :]:
                encoded(emulator, weight, block, factors)
        edges, out = placed(np.array([0, 1, 2], np.int32)), room((2, 2), np.float64)
        here, back = placed(weight), placed(np.zeros_like(weight))
        task = encode_tasks.squares(here, back, edges, out=out)
        assert np.isfinite(emulator.run(task, out)).tolist() == [[True] * 2, [False] * 2]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sums_are_the_cpus(emulator: Emulator, dtype: str) -> None:
    """To the last bit, of runs of one row and of many, of columns that are no multiple of 16."""
    for columns, edges in [(256, [0, 64, 65, 70]), (40, [0, 1, 2, 9]), (1000, list(range(20)))]:
        weight = gguf_data.weights("heavy", edges[-1], columns)
        stored: NDArray[Any] = weight
        if dtype == "float16":
            stored = (weight / 64).astype(np.float16)
            weight = stored.astype(np.float32)
        elif dtype == "bfloat16":
            stored = define.bfloat16_of(weight)
            weight = (stored.astype(np.uint32) << 16).view(np.float32)
        here, back = placed(stored), placed(weight * np.float32(1.01))
        at, out = placed(np.array(edges, np.int32)), room((len(edges) - 1, 2), np.float64)
        task = encode_tasks.squares(here, back, at, out=out)
        found = emulator.run(task, out)
        for (first, last), sums in zip(pairwise(edges), found, strict=True):
            x, y = weight[first:last].copy(), back[first:last].copy()
            assert sums.tolist() == [squares(x), squares(x, y)]


def test_refusals() -> None:
    weight, out = room((2, 256), np.float32), room((2, 144), np.uint8)
    block, line = BY_NAME["Q4_K"], room((1, 256), np.float32)
    with pytest.raises(ValueError, match="IQ2_XS needs importance weights"):
        tables = [placed(array) for array in native_gguf.lattice(BY_NAME["IQ2_XS"])]
        encode_tasks.encode(weight, BY_NAME["IQ2_XS"], out=room((2, 74), np.uint8), lattice=tables)
    with pytest.raises(ValueError, match="Q4_K is encoded on no lattice"):
        native_gguf.lattice(BY_NAME["Q4_K"])
    with pytest.raises(ValueError, match=r"out has shape \(2, 144\), expected \(2, 210\)"):
        encode_tasks.encode(weight, BY_NAME["Q6_K"], out=out)
    with pytest.raises(ValueError, match="importance is of 1 matrices, expected 3"):
        encode_tasks.encode(weight, block, out=out, importance=line, first_row=5, matrix_rows=3)
    with pytest.raises(ValueError, match="edges has 1 numbers"):
        edges = room((1,), np.int32)
        encode_tasks.squares(weight, weight, edges, out=room((1, 2), np.float64))
