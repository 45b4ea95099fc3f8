"""Products with vectors by other kernels than qtool's (tried.h), by kernels of other sizes, and by
every number of blocks that share rows: what kernels/cuda/gemv.h and `splits_of`
(qtool/cuda/more_tasks.py) are chosen by. On a GPU machine:

    PYTHONPATH=. python3 tests/gpu/products.py [awq|gptq|q4_k ...]

Of each shape of Llama 8B and 70B the fastest of each kernel is printed for one vector: its share of
a copy's bandwidth, launched programmatically in a graph, over copies of the matrix that no cache
holds, and how many blocks share rows; and of qtool's own and the two fastest the same for eight.
Microseconds of all are kept in out/gpu-products-KIND.jsonl. The first kernel of each layout is
qtool's own, and the results of all others, for each of the matrices, are compared with its. What
fails is said and kept, and leaves the rest alone; but an error of CUDA stays one of its process, so
that each kind had better have its own. Two minutes for all three.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tried import COLUMNS, NAMES, Kernel, compiled, kernels_of

from qtool.cuda import bench, more_tasks, running
from qtool.cuda.bench_cases import GROUP, LLAMA, TOGETHER
from qtool.cuda.tasks import Task, ceil
from qtool.gguf_types import BY_NAME

OUT = Path(__file__).parent.parent.parent / "out"
SHAPES, Q4_K = [*LLAMA, *TOGETHER, (4096, 256)], BY_NAME["Q4_K"]  # the last is the shortest
IN_TURN, MOST_COPIES = 320 << 20, 160  # bytes of all copies of a matrix
LAUNCHES, BYTES = 160, 3 << 30  # that are timed together: so many, or so many of the matrix
LEAST_BLOCKS, MOST_WAVES = 60, 2


def seconds(tasks: list[Task], nbytes: int, runs: int = 9) -> float:
    """Of one task, by the median of replays of all of them, so often that where a graph begins and
    ends counts for little. nbytes: of each."""
    times = ceil(min(LAUNCHES, ceil(BYTES, nbytes)), len(tasks))

    def all_() -> None:
        running.launch(tasks[0])
        running.launch(*tasks[1:], *(tasks * (times - 1)), programmatic=True)

    running.launch(tasks[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        all_()
    graph.replay()
    took = []
    for _ in range(runs):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # what it takes to ask for one is not timed
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        took.append(before.elapsed_time(after) / 1e3)
    return statistics.median(took) / len(tasks) / times


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
    down, parts, _, resident = kernel.blocks
    slots = torch.cuda.get_device_properties(0).multi_processor_count * resident
    blocks, most = ceil(rows, down), max(1, cols // COLUMNS[kernel.kind] // parts)
    for splits in range(1, most + 1):
        few = blocks * splits < LEAST_BLOCKS and splits < most
        if splits == 1 or not (few or blocks * splits > MOST_WAVES * slots):
            yield splits


@dataclass(frozen=True)
class Timed:
    kernel: Kernel
    splits: int
    seconds: float
    nbytes: int
    failed: str  # why it does not count


def tried(
    kernels: list[Kernel], loaded: dict[Kernel, Any], batch: int, shape: tuple[int, int]
) -> Iterator[Timed]:
    """Every number of splits of every kernel."""
    all_ = [matrix(kernels[0].kind, *shape, batch)]
    more = min(MOST_COPIES, max(3, IN_TURN // all_[0].nbytes))
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
                for one in all_:
                    one.out.fill_(math.nan)  # what a kernel leaves out shows
                tasks = [replace(one.task(room), shared=kernel.shared) for one in all_]
                try:
                    took, failed = seconds(tasks, all_[0].nbytes), ""
                except RuntimeError as error:  # a launch that is refused, say
                    took, failed = math.inf, str(error)
            found = torch.stack([one.out for one in all_]).double()
            first = found if first is None else first
            off = float(((found - first).norm(dim=-1) / first.norm(dim=-1)).max())
            if not failed and not off < 1e-3:
                failed = f"{off:.2g} from {kernels[0]}"
            yield Timed(kernel, splits, took, all_[0].nbytes, failed)


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
    for one in tried(kernels, loaded, batch, shape):
        share = 0.0 if one.failed else one.nbytes / one.seconds / copy
        found = {"kernel": str(one.kernel), "rows": shape[0], "cols": shape[1], "batch": batch}
        found |= {"splits": one.splits, "us": round(one.seconds * 1e6, 3), "share": round(share, 4)}
        file.write(json.dumps(found | ({"failed": one.failed} if one.failed else {})) + "\n")
        if one.failed:
            print(f"{one.kernel}, {one.splits} splits: {one.failed}", flush=True)
        best[one.kernel] = max(best.get(one.kernel, (0.0, 0)), (share, one.splits))
    said = "  ".join(f"{k.name} {s:.0%} ({n})" for k, (s, n) in best.items())
    print(f"{kernels[0].kind} {shape[0]}x{shape[1]} of {batch}: {said}", flush=True)
    return {kernel: share for kernel, (share, _) in best.items()}


def main() -> None:
    kinds = sys.argv[1:] or list(NAMES)
    if not {*kinds} <= {*NAMES}:
        sys.exit(f"{' '.join(kinds)}: expected some of {', '.join(NAMES)}")
    running.require()
    source = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / bench._seconds_of_copy(partial(target.copy_, source), 10)
    print(f"{torch.cuda.get_device_name()}, a copy: {copy / 1e9:.0f} GB/s", flush=True)
    del source, target
    OUT.mkdir(exist_ok=True)
    for kind in kinds:
        loaded = compiled(kernels_of(kind))
        own, *others = loaded
        with (OUT / f"gpu-products-{kind}.jsonl").open("w", encoding="utf-8", buffering=1) as file:
            for shape in SHAPES:
                shares = measured(file, [own, *others], loaded, 1, shape, copy)
                fastest = sorted(others, key=lambda kernel: -shares[kernel])[:2]
                measured(file, [own, *fastest], loaded, 8, shape, copy)


if __name__ == "__main__":
    main()
