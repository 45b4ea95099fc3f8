"""Products with vectors by other kernels than qtool's (tried.h), by kernels of other sizes, and by
every number of blocks that share rows: what kernels/cuda/gemv.h and `splits_of`
(qtool/cuda/pack_gemv_tasks.py) are chosen by. On a GPU machine:

    PYTHONPATH=. python3 tests/gpu/gemv.py [awq|gptq|q4_k ... | KIND:FAMILY]

Of each shape of Llama 8B and 70B the fastest of each kernel is printed for one vector: its share of
a copy's bandwidth, launched programmatically in a graph, over copies of the matrix that no cache
holds, and how many blocks share rows; and of qtool's own and the two fastest the same for eight.
Microseconds of all are kept in out/gpu-gemv-KIND-FAMILY.jsonl. The first kernel of each layout
is qtool's own, and the results of all others are compared with its: first of a small matrix, which
a kernel has to be right of to be timed, and then of each of the matrices. What fails is said and
kept, and leaves the rest alone. An error of CUDA stays one of its process, and a kernel may wait
for ever: so every family of kernels of a kind has a process of its own, which ends after two
minutes, and those that nothing like them has run on a GPU come last.
"""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tried import COLUMNS, NAMES, Kernel, compiled, kernels_of

from qtool.benching import cuda as bench
from qtool.benching.cuda_cases import GROUP, LLAMA, TOGETHER
from qtool.cuda import pack_gemv_tasks, running
from qtool.cuda.tasks import Task, ceil
from qtool.gguf_types import BY_NAME

OUT = Path(__file__).parent.parent.parent / "out"
SHAPES, Q4_K = [*LLAMA, *TOGETHER, (4096, 256)], BY_NAME["Q4_K"]  # the last is the shortest
IN_TURN, MOST_COPIES = 320 << 20, 160  # bytes of all copies of a matrix
LAUNCHES, BYTES = 160, 3 << 30  # that are timed together: so many, or so many of the matrix
LEAST_BLOCKS, MOST_WAVES = 60, 2
FAMILIES = ["", "wide", "ahead", "early", "ring", "broad", "bulk"]
MOST_SECONDS = 120.0  # of a family of kernels
COPIED = 1 << 30  # bytes
SMALL = (256, 2816)  # several turns of every warp


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
            (task,) = pack_gemv_tasks.gemv_q4_k(self.stored[0], self.cols, self.x, **given)
        elif self.kind == "awq":
            (task,) = pack_gemv_tasks.gemv_awq(*self.stored, GROUP, self.x, **given)
        else:
            (task,) = pack_gemv_tasks.gemv_gptq(*self.stored, GROUP, self.x, version=1, **given)
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


def candidates(kernel: Kernel, rows: int, cols: int, *, own: bool) -> Iterator[int]:
    """Numbers of blocks that share rows, but those with few blocks, or with many turns of them; of
    `own`, which others are compared with, what qtool takes."""
    down, parts, _, resident = kernel.blocks
    slots = torch.cuda.get_device_properties(0).multi_processor_count * resident
    blocks, runs = ceil(rows, down), cols // COLUMNS[kernel.kind]
    if own:
        yield pack_gemv_tasks.splits_of(blocks, runs, parts, slots)
        return
    most = max(1, runs // parts)
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


@contextmanager
def in_use(kernel: Kernel, loaded: dict[Kernel, Any], splits: int) -> Iterator[None]:
    """In the place of qtool's own."""
    with (
        patch.dict(pack_gemv_tasks._BLOCKS, {NAMES[kernel.kind]: kernel.blocks}),
        patch.object(pack_gemv_tasks, "splits_of", lambda *_: splits),
        patch.object(running, "_kernel", lambda *_: loaded[kernel]),
    ):
        yield


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far results are from qtool's own, the vector that is furthest."""
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def alike(kernels: list[Kernel], loaded: dict[Kernel, Any]) -> Iterator[Kernel]:
    """Those that give what qtool's own gives, of a small matrix; what the others do is told."""
    first, *_ = kernels
    small = matrix(first.kind, *SMALL, 8)
    wanted = None
    for kernel in kernels:
        small.out.fill_(math.nan)
        try:
            with in_use(kernel, loaded, 1):
                running.launch(replace(small.task([]), shared=kernel.shared))
            torch.cuda.synchronize()
            found, failed = small.out.double(), ""
            wanted = found.clone() if wanted is None else wanted
            if not (far := off(found, wanted)) < 1e-3:
                failed = f"{far:.2g} from {first}"
        except RuntimeError as error:
            failed = str(error)
        if not failed:
            yield kernel
        else:
            print(f"{kernel}, {'x'.join(map(str, SMALL))}: {failed}", flush=True)


def tried(
    kernels: list[Kernel],
    loaded: dict[Kernel, Any],
    batch: int,
    shape: tuple[int, int],
    *,
    own: bool,
) -> Iterator[Timed]:
    """Every number of splits of every kernel; own: but of the first, see `candidates`."""
    all_ = [matrix(kernels[0].kind, *shape, batch)]
    more = min(MOST_COPIES, max(3, IN_TURN // all_[0].nbytes))
    all_ += [matrix(kernels[0].kind, *shape, batch) for _ in range(more)]
    first = None
    for kernel in kernels:
        for splits in [*candidates(kernel, *shape, own=own and kernel is kernels[0])]:
            room: list[torch.Tensor] = []
            with in_use(kernel, loaded, splits):
                for one in all_:
                    one.out.fill_(math.nan)  # what a kernel leaves out shows
                tasks = [replace(one.task(room), shared=kernel.shared) for one in all_]
                try:
                    took, failed = seconds(tasks, all_[0].nbytes), ""
                except RuntimeError as error:  # a launch that is refused, say
                    took, failed = math.inf, str(error)
            found = torch.stack([one.out for one in all_]).double()
            first = found if first is None else first
            if not failed and not (far := off(found, first)) < 1e-3:
                failed = f"{far:.2g} from {kernels[0]}"
            yield Timed(kernel, splits, took, all_[0].nbytes, failed)


def measured(
    file: Any,
    kernels: list[Kernel],
    loaded: dict[Kernel, Any],
    batch: int,
    shape: tuple[int, int],
    copy: float,
    *,
    own: bool,
) -> dict[Kernel, float]:
    """Prints and keeps what was timed; the best share of each kernel."""
    best: dict[Kernel, tuple[float, int]] = {}
    for one in tried(kernels, loaded, batch, shape, own=own):
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


def families_of(kinds: list[str]) -> list[tuple[str, str]]:
    """Kinds of weights and families of kernels, in the order in which they are timed."""
    found = {(kernel.kind, kernel.family): None for kind in kinds for kernel in kernels_of(kind)}
    return sorted(found, key=lambda one: (FAMILIES.index(one[1]), [*NAMES].index(one[0])))


def family(kind: str, name: str) -> None:
    """All of one, beside qtool's own."""
    running.require()
    source = torch.randint(0, 256, (COPIED,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / bench._seconds_of_copy(partial(target.copy_, source), 10)
    print(f"{torch.cuda.get_device_name()}, a copy: {copy / 1e9:.0f} GB/s", flush=True)
    del source, target
    own, *others = kernels_of(kind)
    loaded = compiled([own, *(kernel for kernel in others if kernel.family == name)])
    own, *others = [*loaded]
    right = [*alike([own, *others], loaded)]
    if own not in right:
        sys.exit(f"{own} itself does not run")
    others = [kernel for kernel in others if kernel in right]
    OUT.mkdir(exist_ok=True)
    kept = OUT / f"gpu-gemv-{kind}-{name or 'usual'}.jsonl"
    with kept.open("w", encoding="utf-8", buffering=1) as file:
        for shape in SHAPES:
            shares = measured(file, [own, *others], loaded, 1, shape, copy, own=name != own.family)
            fastest = sorted(others, key=lambda kernel: -shares[kernel])[:2]
            measured(file, [own, *fastest], loaded, 8, shape, copy, own=name != own.family)


def main() -> None:
    given = sys.argv[1:] or list(NAMES)
    kind, both, name = given[0].partition(":")
    if both and len(given) == 1 and (kind, name) in families_of([*NAMES]):
        return family(kind, name)
    if not {*given} <= {*NAMES}:
        sys.exit(f"{' '.join(given)}: expected some of {', '.join(NAMES)}")
    failed = []
    for kind, name in families_of(given):
        command = [sys.executable, __file__, f"{kind}:{name}"]
        try:
            subprocess.run(command, timeout=MOST_SECONDS, check=True)
        except subprocess.SubprocessError as error:  # another one may still do
            failed.append(f"{kind}:{name}")
            print(error, flush=True)
    if failed:
        sys.exit(f"failed: {' '.join(failed)}")


if __name__ == "__main__":
    main()
