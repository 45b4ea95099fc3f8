"""Products with vectors by other kernels than qtool's (tried.h), by kernels of other sizes, and by
every number of blocks that share rows: what kernels/cuda/gemv.h and `splits_of`
(qtool/cuda/more_tasks.py) are chosen by. On a GPU machine:

    PYTHONPATH=. python3 tests/gpu/products.py [awq|gptq|q4_k ...]

Of each shape of Llama 8B and 70B the fastest of each kernel is printed for one vector: its share of
a copy's bandwidth, launched programmatically in a graph, over copies of the matrix that no cache
holds, and how many blocks share rows; and of qtool's own and the two fastest the same for eight.
Microseconds of all are kept in out/gpu-products.jsonl. The first kernel of each layout is qtool's
own; the results of others are compared with its. About a minute and a half.
"""

import json
import math
import multiprocessing
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, repeat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from qtool.cuda import bench, compiling, more_tasks, running
from qtool.cuda.bench_cases import GROUP, LLAMA, TOGETHER
from qtool.cuda.tasks import Task, ceil
from qtool.gguf_types import BY_NAME

OUT = Path(__file__).parent.parent.parent / "out" / "gpu-products.jsonl"
TRIED = Path(__file__).parent / "tried.h"
# Threads of a block, warps next to each other, (turns of a ring,) blocks an SM has registers for,
# (and for how many runs it asks ahead).
WORDS = [(256, 2, 2), (256, 1, 2), (512, 1, 1)]
BLOCKS = [(128, 1, 2, 4), (128, 1, 1, 4)]
AHEAD = [(256, 2, 2, 0), (256, 2, 2, 1), (256, 2, 2, 3), (256, 1, 2, 1), (256, 1, 2, 3)]
AHEAD += [(512, 1, 1, 1)]
RINGS = [(128, 1, 2, 4), (128, 1, 3, 3), (256, 1, 1, 2), (256, 1, 2, 2), (256, 2, 2, 2)]
RINGS += [(512, 1, 2, 1)]
LAYOUTS = {
    ("awq", ""): "GemvWords<true, {}>", ("gptq", ""): "GemvWords<false, {}>",
    ("awq", "ahead"): "WordsAhead<true, {}>", ("gptq", "ahead"): "WordsAhead<false, {}>",
    ("awq", "ring"): "WordsRing<true, {}>", ("gptq", "ring"): "WordsRing<false, {}>",
    ("q4_k", ""): "GemvQ4K<{}>", ("q4_k", "ring"): "RowsRing<{}>",
}  # fmt: skip
NAMES = {"awq": "across", "gptq": "columns", "q4_k": "q4_k"}
ROWS = {"awq": 64, "gptq": 64, "q4_k": 32}  # of a warp, and columns that it takes at a time
COLUMNS = {"awq": 128, "gptq": 128, "q4_k": 256}
PLACES = {"awq": 4256, "gptq": 4256, "q4_k": 5120}  # bytes of a warp's turn of a ring
VECTORS = 8  # that a block has sums for
OWN_ROOM = 48 << 10  # bytes of shared memory that a kernel has by itself, at most
SHAPES, Q4_K = [*LLAMA, *TOGETHER, (4096, 256)], BY_NAME["Q4_K"]  # the last is the shortest
IN_TURN = 320 << 20  # bytes of all copies of a matrix
LEAST_BLOCKS, MOST_WAVES = 60, 2


@dataclass(frozen=True)
class Kernel:
    kind: str
    family: str
    numbers: tuple[int, ...]

    @property
    def layout(self) -> str:
        numbers = ", ".join(map(str, self.numbers))
        return f"qt::Gemv<qt::{LAYOUTS[self.kind, self.family].format(numbers)}>"

    @property
    def room(self) -> int:
        """Bytes of shared memory of a block of a ring: sums of all warps, a flag, and the ring."""
        threads, _, turns, _ = self.numbers
        sums = VECTORS * (ROWS[self.kind] + 4) * 4
        return threads // 32 * (sums + turns * PLACES[self.kind]) + 16

    @property
    def shared(self) -> int:
        """Bytes that its launch has to ask for."""
        return self.room if self.family == "ring" and self.room > OWN_ROOM else 0

    @property
    def source(self) -> str:
        macro = "QT_ROOMY_KERNEL" if self.shared else "QT_KERNEL"
        found = f"{TRIED.read_text()}\n{macro}(gemv_tried, {self.layout})\n"
        if self.family == "ring":
            found += f"static_assert(sizeof({self.layout}::Room) == {self.room});\n"
        return found

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """As `_BLOCKS` of more_tasks has it."""
        threads, abreast = self.numbers[:2]
        resident = self.numbers[2 if self.family == "ahead" else -1]
        slots = torch.cuda.get_device_properties(0).multi_processor_count * resident
        return ROWS[self.kind] * abreast, threads // 32 // abreast, threads, slots

    @property
    def name(self) -> str:
        return "-".join([*([self.family] if self.family else []), *map(str, self.numbers)])

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def kernels_of(kind: str) -> list[Kernel]:
    """qtool's own first."""
    families = {"": WORDS, "ahead": AHEAD, "ring": RINGS}
    if kind == "q4_k":  # of a row a block has no more threads than vectors
        families = {"": BLOCKS, "ring": [one for one in RINGS if one[0] <= VECTORS * ROWS[kind]]}
    return [Kernel(kind, name, numbers) for name, all_ in families.items() for numbers in all_]


def loaded_kernel(kernel: Kernel, code: Any) -> Any:
    """A kernel as running has it, which may be launched with all the memory that it shares."""
    found = code.get_kernel("gemv_tried")
    if kernel.shared:
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(attribute, kernel.shared, int(found.handle), 0)
        assert int(status) == 0, f"{kernel}: {status}"
    return found


def seconds(tasks: list[Task], runs: int = 9) -> float:
    """Of one task, by the median of replays of all of them."""

    def all_() -> None:
        running.launch(tasks[0])
        running.launch(*tasks[1:], programmatic=True)

    all_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        all_()
    graph.replay()
    times = []
    for _ in range(runs):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # what it takes to ask for one is not timed
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return statistics.median(times) / len(tasks)


@dataclass(frozen=True)
class Matrix:
    """One that is stored, with inputs and results."""

    kind: str
    cols: int
    stored: tuple[torch.Tensor, ...]
    x: torch.Tensor
    out: torch.Tensor
    done: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.stored, self.x, self.out))

    def task(self, room: list[torch.Tensor]) -> Task:
        def more(count: int) -> torch.Tensor:
            room.append(torch.empty(count, dtype=torch.float32, device="cuda"))
            return room[-1]

        given: dict[str, Any] = {"out": self.out, "room": more, "done": self.done}
        if self.kind == "q4_k":
            (task,) = more_tasks.gemv_q4_k(self.stored[0], self.cols, self.x, **given)
        elif self.kind == "awq":
            (task,) = more_tasks.gemv_awq(*self.stored, GROUP, self.x, **given)
        else:
            (task,) = more_tasks.gemv_gptq(*self.stored, GROUP, self.x, version=1, **given)
        return task


def bits(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    found = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    return found.view(dtype).reshape(shape)


def matrix(kind: str, rows: int, cols: int, batch: int) -> Matrix:
    if kind == "q4_k":
        blocks = bits(rows, Q4_K.row_bytes(cols), dtype=torch.uint8)
        blocks.view(-1, Q4_K.nbytes)[:, :4].view(torch.float16)[...] = 0.01
        stored: tuple[torch.Tensor, ...] = (blocks,)
    else:
        words = bits(cols, rows // 8) if kind == "awq" else bits(cols // 8, rows)
        scales = torch.full((cols // GROUP, rows), 0.01, dtype=torch.float16, device="cuda")
        stored = (words, bits(cols // GROUP, rows // 8), scales)
    x = torch.randn(batch, cols, device="cuda").half()
    out = torch.empty(batch, rows, dtype=torch.float16, device="cuda")
    done = torch.zeros(ceil(rows, 32), dtype=torch.int32, device="cuda")
    return Matrix(kind, cols, stored, x, out, done)


def candidates(kernel: Kernel, rows: int, cols: int) -> Iterator[int]:
    """Numbers of blocks that share rows, but those with few blocks, or with many turns of them."""
    down, parts, _, slots = kernel.blocks
    blocks, most = ceil(rows, down), max(1, cols // COLUMNS[kernel.kind] // parts)
    for splits in range(1, most + 1):
        few = blocks * splits < LEAST_BLOCKS and splits < most
        if splits == 1 or not (few or blocks * splits > MOST_WAVES * slots):
            yield splits


def tried(
    kernels: list[Kernel], loaded: dict[Kernel, Any], batch: int, shape: tuple[int, int]
) -> Iterator[tuple[Kernel, int, float, int]]:
    """Kernel, splits, seconds and bytes, of every number of splits of every kernel."""
    all_ = [matrix(kernels[0].kind, *shape, batch)]
    more = max(3, IN_TURN // all_[0].nbytes)
    all_ += [matrix(kernels[0].kind, *shape, batch) for _ in range(more)]
    first = None
    for kernel in kernels:
        for splits in candidates(kernel, *shape):
            room: list[torch.Tensor] = []
            with (
                patch.dict(more_tasks._BLOCKS, {NAMES[kernel.kind]: kernel.blocks}),
                patch.object(more_tasks, "splits_of", lambda *_, n=splits: n),
                patch.object(running, "_kernel", lambda *_, own=loaded[kernel]: own),
            ):
                all_[0].out.fill_(math.nan)  # what a kernel leaves out shows
                tasks = [replace(one.task(room), shared=kernel.shared) for one in all_]
                took = seconds(tasks)
            found = all_[0].out.double()
            first = found if first is None else first
            off = float((found - first).norm() / first.norm())
            assert off < 1e-3, f"{kernel}, {splits} splits: {off:.2g} from {kernels[0]}"
            yield kernel, splits, took, all_[0].nbytes


def measured(
    file: Any,
    kernels: list[Kernel],
    loaded: dict[Kernel, Any],
    batch: int,
    shape: tuple[int, int],
    copy: float,
) -> dict[Kernel, float]:
    """Prints and keeps what was timed; the best share of each kernel."""
    best: dict[Kernel, tuple[float, int]] = {}
    for kernel, splits, took, nbytes in tried(kernels, loaded, batch, shape):
        share = nbytes / took / copy
        found = {"kernel": str(kernel), "rows": shape[0], "cols": shape[1], "batch": batch}
        found |= {"splits": splits, "us": round(took * 1e6, 3), "share": round(share, 4)}
        file.write(json.dumps(found) + "\n")
        best[kernel] = max(best.get(kernel, (0.0, 0)), (share, splits))
    said = "  ".join(f"{k.name} {s:.0%} ({n})" for k, (s, n) in best.items())
    print(f"{kernels[0].kind} {shape[0]}x{shape[1]} of {batch}: {said}", flush=True)
    return {kernel: share for kernel, (share, _) in best.items()}


def main() -> None:
    kinds = sys.argv[1:] or list(NAMES)
    if not {*kinds} <= {*NAMES}:
        sys.exit(f"{' '.join(kinds)}: expected some of {', '.join(NAMES)}")
    running.require()
    kernels = {kind: kernels_of(kind) for kind in kinds}
    every = [kernel for own in kernels.values() for kernel in own]
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        sources = [kernel.source for kernel in every]
        codes = list(pool.map(compiling.compile_source, repeat("tried"), sources, repeat(arch)))
    code_of = compiling.core().ObjectCode.from_cubin
    loaded = {k: loaded_kernel(k, code_of(code)) for k, code in zip(every, codes, strict=True)}
    source = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / bench._seconds_of_copy(partial(target.copy_, source), 10)
    print(f"{torch.cuda.get_device_name()}, a copy: {copy / 1e9:.0f} GB/s", flush=True)
    del source, target
    OUT.parent.mkdir(exist_ok=True)
    with OUT.open("w", encoding="utf-8") as file:
        for kind, shape in product(kinds, SHAPES):
            own, *others = kernels[kind]
            shares = measured(file, [own, *others], loaded, 1, shape, copy)
            fastest = sorted(others, key=lambda kernel: -shares[kernel])[:2]
            measured(file, [own, *fastest], loaded, 8, shape, copy)


if __name__ == "__main__":
    main()
