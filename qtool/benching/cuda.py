"""`qtool bench --device cuda`: GB/s of each kernel beside a device-to-device copy of this run.

A kernel's bytes are those it must read and write, each once. Its time is the median of replays of a
graph of launches, whose arrays take turns so that no cache holds them; the copy, of a buffer larger
than the caches, counts what it reads and writes, and is the faster of one in a graph and one on a
stream. What a GPU needs from one kernel to the next counts: of matrices of a few megabytes it is as
much as reading them. Products are therefore timed twice, launched as other kernels are and by
programmatic launches, each of which asks for its weights while the one before it still works
(qtool.cuda.running). Encoders compute more than they move: what counts there is seconds for 10^9
weights.
"""

import fnmatch
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from qtool.benching.cuda_cases import Arrays, Case, Work, all_cases
from qtool.cuda.tasks import ceil
from qtool.errors import UnsupportedError

_IN_TURN = 1 << 30  # bytes of all copies of a case
_WARM = 0.03  # seconds of replays that are not counted: a GPU that waited runs at low clocks
_SHORT = 0.01  # seconds of a replay, beside which what it takes to ask for one can be seen
_LONGEST = 2.0  # seconds of replays, after which three are enough


def cases_named(pattern: str | None) -> list[Case]:
    """Cases whose name has the pattern in it, or matches it where it has * or ?."""
    cases = list(all_cases())
    if pattern is None:
        return cases
    wild = any(sign in pattern for sign in "*?[")
    wanted = pattern.lower() if wild else f"*{pattern.lower()}*"
    found = [case for case in cases if fnmatch.fnmatchcase(case.name.lower(), wanted)]
    if not found:
        raise UnsupportedError(
            f"no CUDA kernel matches {pattern!r}; names begin with dequantize awq, gptq, "
            "pack-quantized, int8, fp8, mxfp4, nvfp4 or gguf-, with encode gguf-, quantize or gemv"
        )
    return found


@dataclass(frozen=True)
class Result:
    """Bytes a second of a kernel, and of the copy in the same run."""

    name: str
    bytes_per_s: float
    copy_bytes_per_s: float
    encoded_per_s: float = 0.0  # weights, of an encoder

    @property
    def fraction(self) -> float:
        return self.bytes_per_s / self.copy_bytes_per_s

    @property
    def seconds_per_billion(self) -> float | None:
        """Of weights, to encode them."""
        return 1e9 / self.encoded_per_s if self.encoded_per_s else None

    def json(self) -> dict[str, object]:
        seconds = self.seconds_per_billion
        more = {} if seconds is None else {"seconds_per_1e9_weights": round(seconds, 4)}
        return {
            "kernel": self.name,
            "gb_per_s": round(self.bytes_per_s / 1e9, 1),
            "copy_gb_per_s": round(self.copy_bytes_per_s / 1e9, 1),
            "fraction": round(self.fraction, 4),
            **more,
        }


def _median_seconds(run: Callable[[], object], runs: int, recorded: bool = True) -> float:
    """Of `runs` replays of what `run` launches, by events, after some that are not counted; fewer
    are replayed where they take long.

    recorded: launches are recorded once and replayed as a graph, so that what Python takes for
    them is not timed, only what lies between one kernel and the next on a GPU. What it takes to ask
    for a replay is not timed, either: a GPU that had nothing to do would wait for it after the
    first event, so before a short one there is one that is not timed.
    """
    import torch

    event: Any = torch.cuda.Event
    run()  # compiles, loads, and allocates what it needs
    torch.cuda.synchronize()
    again = run
    if recorded:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            run()
        again = graph.replay

    def replay(busy: bool = False) -> float:
        before, after = event(enable_timing=True), event(enable_timing=True)
        if busy:
            again()
        before.record()
        again()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    warm = last = replay()
    while warm < _WARM:
        last = replay()
        warm += last
    times: list[float] = []
    while len(times) < runs and (len(times) < 3 or sum(times) < _LONGEST):
        times.append(replay(busy=last < _SHORT))
    return statistics.median(times)


def _seconds_of_copy(copy: Callable[[], object], runs: int) -> float:
    """The faster way: a driver may copy by other means in a graph than on a stream."""
    return min(_median_seconds(copy, runs, recorded) for recorded in (True, False))


def _timed(case: Case, arrays: Arrays, runs: int) -> Iterator[tuple[str, Work, float]]:
    """A name, one of the works, and its seconds: as many copies of its arrays take turns as have no
    room in any cache, and keep the GPU busy for much longer than events can tell. Then the same of
    programmatic launches, where it may have them."""
    import torch

    from qtool.cuda.running import launch, overlaps

    works = [case.prepare(arrays, *case.shape)]
    works += [case.prepare(arrays, *case.shape) for _ in range(1, ceil(_IN_TURN, works[0].nbytes))]
    tasks = [task for work in works for task in work.tasks]
    yield case.name, works[0], _median_seconds(partial(launch, *tasks), runs) / len(works)
    if not all(task.waits for task in tasks) or not overlaps(torch.cuda.current_device()):
        return

    def overlapping() -> None:
        launch(tasks[0])
        launch(*tasks[1:], programmatic=True)  # all arrays are older than the replays above

    name = f"{case.name} programmatic"
    yield name, works[0], _median_seconds(overlapping, runs) / len(works)


def bench(cases: list[Case], runs: int = 20) -> Iterator[Result]:
    """Times cases on torch's current GPU, one when it is asked for; a copy of 1 GiB is timed before
    each."""
    import torch

    from qtool.cuda.running import require

    require()
    source = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def random(shape: tuple[int, ...], dtype: str) -> Any:
        kind = getattr(torch, dtype)
        size = kind.itemsize
        for n in shape:
            size *= n
        found = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
        return found.view(kind).reshape(shape)

    arrays = Arrays(
        random,
        lambda shape, dtype: torch.ones(shape, dtype=getattr(torch, dtype), device="cuda"),
        lambda shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype), device="cuda"),
        lambda shape, dtype: torch.randn(shape, dtype=getattr(torch, dtype), device="cuda"),
        lambda array: torch.from_numpy(array).cuda(),
    )
    for case in cases:
        copied = 2 * source.nbytes / _seconds_of_copy(partial(target.copy_, source), runs)
        for name, work, seconds in _timed(case, arrays, runs):
            yield Result(name, work.nbytes / seconds, copied, work.encoded / seconds)
