"""Matrices of more than 2^31 numbers: rows before, across and behind that many become what they
become as a matrix of their own. Where there is no GPU, or a small one, the same of small ones."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from qtool.cuda import encode_tasks, float_tasks, pack_gemv_tasks, quantize_tasks, running, tasks
from qtool.gguf_types import BY_NAME
from support.cuda.cuda_emulation import emulator
from support.cuda.emulated_cuda import Cuda
from support.cuda.programmatic_gpu import cuda

__all__ = ["cuda", "emulator"]

PIECE, GROUP, BATCH = 128, 128, 8
Q4_K = BY_NAME["Q4_K"]
Parts = list[torch.Tensor]
Of = Callable[[Parts, int], torch.Tensor]  # what kernels make of parts of a matrix of so many rows


@pytest.fixture
def shape(cuda: Cuda | None) -> tuple[int, int]:
    """[out, in], 2^31 numbers and 512 rows more where there is room for several of them."""
    if cuda is None and torch.cuda.mem_get_info()[0] > 40 << 30:
        return 66_048, 32_768
    return 384, 512


def bits(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Random ones; written in parts, as the sum of all arrays is large."""
    found = torch.empty(shape, dtype=dtype, device="cuda")
    for row in found.view(torch.uint8).chunk(16):
        row.copy_(torch.randint(0, 256, row.shape, dtype=torch.uint8, device="cuda"))
    return found


def near_one(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (torch.randint(1, 64, shape, device="cuda") / 64).to(dtype)


def room(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Filled with what no kernel makes of these matrices."""
    return torch.full(shape, 77, dtype=dtype, device="cuda")


def along(parts: Parts, start: int, stop: int) -> Parts:
    """Rows, of parts whose first axis they are."""
    return [part[start:stop] for part in parts]


def across(parts: Parts, start: int, stop: int) -> Parts:
    """The same of their second axis, eight rows to a word of zeros or of AWQ's codes."""
    rows = max(part.shape[1] for part in parts)
    each = [rows // part.shape[1] for part in parts]
    ends = [(start // n, stop // n) for n in each]
    return [part[:, a:b].contiguous() for part, (a, b) in zip(parts, ends, strict=True)]


def cases(rows: int, cols: int) -> Iterator[tuple[str, Parts, Callable[..., Parts], Of]]:
    """A name, what is stored, how rows of it are taken, and what is made of it: [rows, ...]."""
    groups, int32 = cols // GROUP, torch.int32

    def made(task: Callable[[torch.Tensor], Any], *shape: int, dtype: Any) -> torch.Tensor:
        out = room(shape, dtype)
        found = task(out)
        running.launch(*(found if isinstance(found, tuple) else (found,)))
        return out

    def dense(task: Callable[..., Any]) -> Of:
        def make(parts: Parts, rows: int) -> torch.Tensor:
            return made(lambda out: task(parts, rows, out), rows, cols, dtype=torch.float16)

        return make

    def product(task: Callable[..., Any]) -> Of:
        x = torch.randn(BATCH, cols, device="cuda").mul_(1 / 64).to(torch.float16)

        def make(parts: Parts, rows: int) -> torch.Tensor:
            done = torch.zeros(pack_gemv_tasks.counters(rows), dtype=int32, device="cuda")
            kept: list[torch.Tensor] = []

            def sums(count: int) -> torch.Tensor:
                kept.append(torch.empty(count, device="cuda"))
                return kept[-1]

            given = {"room": sums, "done": done}
            y = made(lambda out: task(parts, x, given | {"out": out}), BATCH, rows, dtype=x.dtype)
            return y.T.float()

        return make

    fp8 = [bits(rows, cols), near_one(rows, 1, dtype=torch.float32)]
    yield "fp8", fp8, along, dense(lambda parts, _, out: float_tasks.bytes_(
        parts[0], "float8_e5m2", scale=parts[1], block=(1, -1), out=out))  # fmt: skip
    del fp8
    packed = [bits(rows, cols // 8, dtype=int32), near_one(rows, groups)]
    yield "pack-quantized", packed, along, dense(lambda parts, n, out: tasks.pack_quantized(
        *parts, (n, cols), 4, GROUP, out=out))  # fmt: skip
    del packed
    for name, words in (("gptq", (cols // 8, rows)), ("awq", (cols, rows // 8))):
        parts = [bits(*words, dtype=int32), bits(groups, rows // 8, dtype=int32)]
        parts.append(near_one(groups, rows))
        if name == "gptq":
            yield name, parts, across, dense(lambda parts, _, out: tasks.gptq(
                *parts, 4, GROUP, version=1, out=out))  # fmt: skip
            yield f"{name} times x", parts, across, product(lambda parts, x, given:
                pack_gemv_tasks.gemv_gptq(*parts, GROUP, x, version=1, **given))  # fmt: skip
        else:
            yield name, parts, across, dense(lambda parts, _, out: tasks.awq_gemm(
                *parts, GROUP, out=out))  # fmt: skip
            yield f"{name} times x", parts, across, product(lambda parts, x, given:
                pack_gemv_tasks.gemv_awq(*parts, GROUP, x, **given))  # fmt: skip
        del parts

    def encoded(parts: Parts, n: int) -> torch.Tensor:
        return made(lambda out: encode_tasks.encode(parts[0], Q4_K, out=out),
                    n, Q4_K.row_bytes(cols), dtype=torch.uint8)  # fmt: skip

    weight = [torch.randn(rows, cols, dtype=torch.float16, device="cuda")]
    yield "encode", weight, along, encoded
    blocks = [encoded(weight, rows)]
    del weight
    yield "q4_k", blocks, along, dense(lambda parts, _, out: float_tasks.gguf(
        parts[0], Q4_K, cols, out=out))  # fmt: skip
    yield "q4_k times x", blocks, along, product(lambda parts, x, given:
        pack_gemv_tasks.gemv_q4_k(parts[0], cols, x, **given))  # fmt: skip
    del blocks

    def codes(parts: Parts, n: int) -> torch.Tensor:
        pairs = room((groups, n, 2), torch.float32)
        grid = quantize_tasks.Grid(4, False, 1.0)
        running.launch(quantize_tasks.find_groups(parts[0], grid, GROUP, out=pairs))
        found = made(lambda out: quantize_tasks.round_weights(
            parts[0], pairs, 4, GROUP, out=out), cols, n, dtype=torch.uint8)  # fmt: skip
        return found.T

    yield "quantize", [torch.randn(cols, rows, device="cuda")], across, codes


def test_pieces_of_large_matrices(cuda: Cuda | None, shape: tuple[int, int]) -> None:
    rows, cols = shape
    at = [0, rows // 2 // PIECE * PIECE, rows - 5 * PIECE, rows - 4 * PIECE, rows - PIECE]
    seen = []
    for name, parts, taken, make in cases(rows, cols):
        whole = make(parts, rows)
        for start in (start for start in at if start >= 0):
            piece = make(taken(parts, start, start + PIECE), PIECE)
            own = whole[start : start + PIECE]
            if "times" in name:  # other blocks share rows, and so other sums are added
                assert bool(torch.isfinite(piece).all()) and float(piece.abs().amax()) > 0.01, name
                torch.testing.assert_close(own, piece, rtol=4e-3, atol=4e-3 * float(piece.std()))
            else:
                one, other = (part.contiguous().view(torch.uint8) for part in (own, piece))
                assert torch.equal(one, other), f"{name} {start}"
        seen.append(name)
        del parts, whole, piece, own  # before the next matrix is made
    assert len(seen) == 10
