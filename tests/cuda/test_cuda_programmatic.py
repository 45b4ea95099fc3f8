"""Programmatic launches: what kernels read before they wait, what that has to be older than, and
chains of products that read each other, on the GPU where there is one."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qtool import native_gguf
from qtool.benching import cuda as bench
from qtool.cuda import compiling, pack_gemv_tasks, running
from qtool.cuda.tasks import Task
from qtool.gguf_types import BY_NAME
from support.cuda.cuda_emulation import Emulator, emulator, placed, room
from support.cuda.emulated_cuda import Cuda
from support.cuda.gemv_tasks import awq_tasks, gptq_tasks, inputs, q4_k_tasks
from support.cuda.programmatic_gpu import cuda
from support.kernels.random_matrices import random_quant

__all__ = ["cuda", "emulator"]

KINDS = ("awq", "gptq", "q4_k")
PLACE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def where_kernels_wait(emulator: Emulator) -> None:
    if not emulator.programmatic:
        pytest.skip("before sm_90 all launches are plain")


def test_what_is_read_early(emulator: Emulator) -> None:
    """Words, scales and zeros, so that they are on their way while a kernel waits, and nothing that
    another kernel may write."""
    x, out = inputs(2, 2048), room((2, 128), np.float16)
    quant = random_quant(4, (128, 2048), 128)
    blocks = placed(native_gguf.encode(quant.dequantize(), BY_NAME["Q4_K"]))
    made = [awq_tasks(quant, x), gptq_tasks(quant, x, 2), q4_k_tasks(blocks, 2048, x)]
    for tasks, names in zip(made, (("codes", "scale", "zero"),) * 2 + (("codes",),), strict=True):
        sums: list[Any] = []

        def keep(count: int, sums: list[Any] = sums) -> Any:
            sums.append(room((count,), np.float32))
            return sums[-1]

        first, second = tasks(out, keep, None)
        assert emulator.fault(first, first.fields["values_bytes"] // 4) is None
        assert emulator.early() == {first.fields[name] for name in names}
        assert emulator.fault(second, out.size) is None
        assert emulator.early() == set()


def test_kernels_that_do_not_wait_are_refused(emulator: Emulator) -> None:
    codes, out = placed(np.ones((64, 64), np.uint8)), room((64, 8), np.int32)
    task = pack_gemv_tasks.pack(codes, 4, "rows", out=out)
    assert emulator.fault(task, out.size) is None and not task.waits
    said = emulator.fault(replace(task, waits=True), out.size)
    assert said == "pack_rows_4: a thread does not wait for the kernels before, number 0 of 256"


@cache
def weights(kind: str, shape: tuple[int, int], seed: int) -> list[Any]:
    """What is stored of a matrix that leaves vectors about as long as they are."""
    rows, cols = shape
    random = np.random.default_rng(seed)
    if kind == "q4_k":
        weight = random.standard_normal(shape, np.float32) / np.float32(cols**0.5)
        return [native_gguf.encode(weight, BY_NAME["Q4_K"])]
    words = (cols, rows // 8) if kind == "awq" else (cols // 8, rows)
    found = [random.integers(-(1 << 31), 1 << 31, words, np.int64).astype(np.int32)]
    found += [random.integers(-(1 << 31), 1 << 31, (cols // 128, rows // 8), np.int64)]
    found[1] = found[1].astype(np.int32)
    return [*found, np.full((cols // 128, rows), 1 / (6.5 * cols**0.5), np.float16)]


def product(kind: str, stored: list[Any], x: Any, given: dict[str, Any]) -> tuple[Task, ...]:
    if kind == "q4_k":
        return pack_gemv_tasks.gemv_q4_k(stored[0], x.shape[1], x, **given)
    if kind == "awq":
        return pack_gemv_tasks.gemv_awq(*stored, 128, x, **given)
    return pack_gemv_tasks.gemv_gptq(*stored, 128, x, version=1, **given)


class Chain:
    """Products of all kinds in turn. Each reads what the one before it wrote, and writes one of the
    two arrays of its width, which the one before may have read; all have one room for their sums,
    and one array of counters."""

    def __init__(self, shapes: list[tuple[int, int]], batch: int, steps: int) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=PLACE)

        self.kept: list[Any] = []
        self.first = x = empty(batch, shapes[0][1])
        self.arrays = {(rows, k): empty(batch, rows) for rows, _ in shapes for k in range(2)}
        rooms = empty(8 * batch * max(shapes)[0] * 8, dtype=torch.float32)
        given: dict[str, Any] = {
            "room": lambda count: rooms[:count],
            "done": empty(pack_gemv_tasks.counters(max(shapes)[0]), dtype=torch.int32),
        }
        self.tasks: list[Task] = []
        for step in range(steps):
            kind, shape = KINDS[(step + step // 3) % 3], shapes[step % len(shapes)]
            stored = [torch.from_numpy(one).to(PLACE) for one in weights(kind, shape, step)]
            out = self.arrays[shape[0], step % 2]
            self.tasks += product(kind, stored, x, given | {"out": out})
            self.kept += [rooms, given, stored]
            x = out

    def results(self, starts: list[torch.Tensor], run: Callable[[], None]) -> list[Any]:
        """Of each start: all arrays as they are in the end."""
        found = []
        for start in starts:
            self.first.zero_().add_(start)  # kernels, as before products of `generate`
            run()
            found.append([array.clone() for array in self.arrays.values()])
        return [[array.cpu().numpy() for array in arrays] for arrays in found]


def test_chains(cuda: Cuda | None, emulator: Emulator) -> None:
    """Programmatic launches, one after the other and as a graph, leave what plain ones leave."""
    big = cuda is None
    wide = 8192 if big else 256
    shapes = [(wide, 1024), (1024, wide), (1024, 1024)]
    for batch in (1, 8) if big else (2,):
        chain = Chain(shapes, batch, 24 if big else 6)
        random = np.random.default_rng(batch)
        starts = [
            torch.from_numpy(random.standard_normal((batch, shapes[0][1])).astype(np.float16))
            for _ in range(8 if big else 2)
        ]
        starts = [start.to(PLACE) for start in starts] * (25 if big else 1)

        plain = partial(running.launch, *chain.tasks)
        programmatic = partial(plain, programmatic=True)

        want = chain.results(starts, plain)
        assert all(np.isfinite(array).all() and array.any() for array in want[0])
        ways: list[Callable[[], None]] = [programmatic]
        if big:
            ways += [graph_of(chain, way).replay for way in (plain, programmatic)]
        for way in ways:
            for number, found in enumerate(chain.results(starts, way)):
                for one, other in zip(found, want[number], strict=True):
                    assert one.tobytes() == other.tobytes(), number
    if cuda is not None:
        assert cuda.programmatic == len(chain.tasks) * len(starts)
        assert len(cuda.launched) == 2 * cuda.programmatic


def graph_of(chain: Chain, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        chain.first.mul_(1)
        run()
    return graph


@pytest.mark.parametrize("between", ["nothing", "memory", "a kernel", "an event", "the thread"])
def test_weights_are_older(between: str, cuda: Cuda | None) -> None:
    """What writes an input may be under way, but not what writes weights."""
    if cuda is None:
        pytest.skip("there is a GPU")
    stored = [torch.from_numpy(one).pin_memory() for one in weights("awq", (128, 1024), 1)]
    there = [torch.empty(one.shape, dtype=one.dtype, device=PLACE) for one in stored]
    x, out = (torch.ones(1, n, dtype=torch.float16, device=PLACE) for n in (1024, 128))
    kept: list[Any] = []

    def rooms(count: int) -> torch.Tensor:
        kept.append(torch.empty(count, device=PLACE))
        return kept[-1]

    done = torch.zeros(pack_gemv_tasks.counters(128), dtype=torch.int32, device=PLACE)
    tasks = product("awq", there, x, {"out": out, "room": rooms, "done": done})
    side = torch.cuda.Stream() if between == "an event" else torch.cuda.current_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for one, source in zip(there, stored, strict=True):
            one.copy_(source, non_blocking=True)
    if between == "memory":
        kept.append(torch.empty(8, device=PLACE))
    elif between == "a kernel":
        x.mul_(2)
    elif between == "an event":
        torch.cuda.current_stream().wait_stream(side)
    elif between == "the thread":
        torch.cuda.current_stream().synchronize()
    for _ in range(2):  # neither of them lets the other read any earlier
        running.launch(*tasks, programmatic=True)
    running.launch(*tasks)
    faults, cuda.order.faults = cuda.order.faults, []
    assert (len(faults) > 0) == (between in ("nothing", "memory")), faults
    assert all("which does not wait there" in one for one in faults)


def test_an_input_that_is_read_early_is_found(
    cuda: Cuda | None, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cuda is None:
        pytest.skip("there is a GPU")
    chain = Chain([(128, 1024), (1024, 128)], 1, 2)
    early, second = emulator.early, chain.tasks[1]
    running.launch(*chain.tasks, programmatic=True)
    assert not cuda.order.faults
    monkeypatch.setattr(emulator, "early", lambda: early() | {second.fields["inputs"]})
    running.launch(second, programmatic=True)
    assert len(cuda.order.faults) == 1
    assert "gemv_across_4" in cuda.order.faults[0] and "does not wait" in cuda.order.faults[0]
    cuda.order.faults.clear()


def test_products_are_timed_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each graph the first launch is plain: what is read early is older than that."""
    launched: list[tuple[int, bool]] = []

    def launch(*tasks: Task, programmatic: bool = False) -> None:
        launched.append((len(tasks), programmatic))

    def seconds(run: Callable[[], None], runs: int) -> float:
        run()
        return 6.0

    def filled(shape: tuple[int, ...], dtype: str) -> Any:
        return placed(np.ones(shape, dtype))

    arrays = bench.Arrays(filled, filled, filled, filled, placed)
    product, other = (bench.cases_named(name)[0] for name in ("gemv awq", "awq gemm float16"))
    shape = (128, 256)
    monkeypatch.setattr(bench, "_median_seconds", seconds)
    monkeypatch.setattr(bench, "_IN_TURN", 3 * product.prepare(arrays, *shape).nbytes)
    monkeypatch.setattr(running, "launch", launch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for can, case in ((True, product), (False, product), (True, other)):
        monkeypatch.setattr(running, "overlaps", lambda _, can=can: can)
        times = list(bench._timed(replace(case, shape=shape), arrays, 20))
        both = can and case is product
        assert [name for name, *_ in times] == [case.name, f"{case.name} programmatic"][: 1 + both]
        count, _ = launched[0]
        assert launched == [(count, False), (1, False), (count - 1, True)][: 3 if both else 1]
        assert (count == 3) == (case is product) and {s for *_, s in times} == {6.0 / count}
        launched.clear()


@pytest.mark.parametrize(
    ("capability", "version", "tells", "can"),
    [
        ((8, 9), 13000, True, False),
        ((9, 0), 12020, True, False),
        ((9, 0), 12030, False, False),
        ((9, 0), 12030, True, True),
        ((12, 0), 13000, True, True),
    ],
)
def test_where_launches_may_overlap(
    capability: tuple[int, int],
    version: int,
    tells: bool,
    can: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elsewhere they are plain, and so are those of kernels that do not wait, or of callers that do
    not ask."""
    driver = SimpleNamespace(cuDriverGetVersion=lambda: (0, version))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    seen: list[tuple[str, str]] = []

    def core() -> Any:
        return SimpleNamespace(
            Device=lambda _: SimpleNamespace(set_current=lambda: None),
            Kernel=SimpleNamespace(handle=1) if tells else SimpleNamespace(),
            Stream=SimpleNamespace(from_handle=lambda handle: handle),
            LaunchConfig=SimpleNamespace,
            launch=lambda stream, config, kernel, *arguments: seen.append(("plain", kernel)),
        )

    there = {"current_device": lambda: 0, "get_device_capability": lambda _: capability}
    there["current_stream"] = lambda: SimpleNamespace(cuda_stream=7)
    for name, one in there.items():
        monkeypatch.setattr(torch.cuda, name, one)
    monkeypatch.setattr(compiling, "core", core)
    monkeypatch.setattr(running, "_kernel", lambda name, _: name)
    overlapped = "programmatic"
    monkeypatch.setattr(
        running, "_launch_programmatic", lambda *given: seen.append((overlapped, given[2]))
    )
    running.overlaps.cache_clear()
    tasks = [Task("gemv_q4_k", (1, 1), waits=True), Task("pack_rows_4", (1, 1))]
    try:
        running.launch(*tasks)
        running.launch(*tasks, programmatic=True)
    finally:
        running.overlaps.cache_clear()
    first = overlapped if can else "plain"
    assert [how for how, _ in seen] == ["plain", "plain", first, "plain"]
    assert [kernel for _, kernel in seen] == ["gemv_q4_k", "pack_rows_4"] * 2
