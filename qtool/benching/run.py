"""`qtool bench`: how fast each kernel is, on each instruction set of this machine.

A kernel's time is the median of its runs. What memory allows is timed in between: a plain loop
that reads and writes as many bytes a weight and computes nothing, once with ordinary stores and
once with stores that pass the caches; the better of the two counts. Arrays are larger than the
caches, except where a kernel is so slow that a part of them is enough.

With several threads it is also measured what they gain over one: by the kernel and by the plain
loop, whose gain is all that memory has left to give, and by the kernel on 32 rows a thread, again
and again, which stay in the caches of most processors: there nothing but the threading limits it.
"""

import fnmatch
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from qtool import native
from qtool.benching.cases import COLUMNS, Buffers, Case, Run, all_cases
from qtool.errors import UnsupportedError
from qtool.native.library import repeated
from qtool.native.plain import plain

_STEP = 128  # rows
_CACHED_ROWS = 32  # a thread's, in caches
_CACHED_SECONDS = 0.01


@dataclass(frozen=True)
class Settings:
    """How long to take."""

    threads: int = 1
    traffic: float = 100e6  # bytes that a fast kernel reads and writes in a run
    seconds: float = 0.02  # that a run takes at most, unless 128 rows take longer
    runs: int = 5


QUICK = Settings(traffic=72e6, seconds=0.005)


@dataclass(frozen=True)
class Gains:
    """How many times faster than one thread."""

    kernel: float
    plain: float  # the plain loop, moving as many bytes
    cached: float  # the kernel, on rows that stay in caches

    def json(self) -> dict[str, object]:
        return {name: round(gain, 3) for name, gain in vars(self).items()}


@dataclass(frozen=True)
class Result:
    """One kernel on one instruction set."""

    kernel: str
    dtype: str
    isa: str
    weights: int  # in a run
    mweights_per_s: float
    plain_mweights_per_s: float
    gains: Gains | None = None  # with several threads, on the best instruction set

    @property
    def fraction(self) -> float:
        """Of what memory allows."""
        return self.mweights_per_s / self.plain_mweights_per_s

    def json(self) -> dict[str, object]:
        return {
            "kernel": self.kernel,
            "dtype": self.dtype,
            "isa": self.isa,
            "weights": self.weights,
            "mweights_per_s": round(self.mweights_per_s, 2),
            "plain_mweights_per_s": round(self.plain_mweights_per_s, 2),
            "fraction": round(self.fraction, 4),
            "gains": self.gains.json() if self.gains else None,
        }


@dataclass(frozen=True)
class Report:
    """All results, in the order of the cases."""

    threads: int
    isas: list[str]
    results: list[Result] = field(default_factory=list)

    def json(self) -> dict[str, object]:
        return {
            "machine": platform.machine(),
            "threads": self.threads,
            "isas": self.isas,
            "results": [result.json() for result in self.results],
        }


def cases_named(pattern: str | None) -> list[Case]:
    """Cases whose name has the pattern in it, or matches it where it has * or ?."""
    cases = all_cases()
    if pattern is None:
        return cases
    wild = any(sign in pattern for sign in "*?[")
    wanted = pattern.lower() if wild else f"*{pattern.lower()}*"
    found = [
        case
        for case in cases
        for name in [case.name.lower()]
        if fnmatch.fnmatchcase(name, wanted) or fnmatch.fnmatchcase(f"{name} {case.dtype}", wanted)
    ]
    if not found:
        names = sorted({case.name.split(" ")[0] for case in cases})
        raise UnsupportedError(f"no kernel matches {pattern!r}; there are {', '.join(names)} ...")
    return found


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class _Bench:
    """What the cases of one call share."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.buffers = Buffers(int(settings.traffic * 1.1) + (1 << 20))
        self.plain: dict[tuple[float, float], float] = {}  # seconds a weight
        self.plain_gain: dict[tuple[float, float], float] = {}

    def full(self, case: Case) -> int:
        """Rows that make the traffic."""
        rows = self.settings.traffic / (case.read + case.write) / COLUMNS
        return max(_STEP, round(rows / _STEP) * _STEP)

    def plain_runs(
        self, case: Case, weights: int, threads: int | None = None
    ) -> list[Callable[[], object]]:
        source = self.buffers.source[: int(weights * case.read)]
        target = self.buffers.target[: int(weights * case.write)]
        threads = threads or self.settings.threads
        return [
            lambda: plain(source, target, threads=threads),
            lambda: plain(source, target, streaming=True, threads=threads),
        ]

    def time(self, case: Case, isa: str, best: bool) -> Result:
        """One case on one instruction set; the plain loops beside the best one's full runs."""
        threads, settings = self.settings.threads, self.settings
        native.select(isa)
        few = case.prepare(_STEP, self.buffers)
        estimate = min(_seconds(lambda: few(threads)) for _ in range(2)) / _STEP
        full = self.full(case)
        rows = min(full, max(1, int(settings.seconds / estimate / _STEP)) * _STEP)
        run = few if rows == _STEP else case.prepare(rows, self.buffers)
        weights = rows * COLUMNS
        key = (case.read, case.write)
        runs: list[Callable[[], object]] = [lambda: run(threads)]
        if rows == full and best:
            runs += self.plain_runs(case, weights)
        elif key not in self.plain:
            self.plain[key] = self.plain_alone(case)
        medians = self.medians(runs)
        if len(medians) > 1:
            self.plain[key] = min(medians[1:]) / weights
        rate, allowed = weights / medians[0], 1 / self.plain[key]
        gains = self.gains(case, run, weights) if threads > 1 and best else None
        return Result(case.name, case.dtype, isa, weights, rate / 1e6, allowed / 1e6, gains)

    def gains(self, case: Case, run: Run, weights: int) -> Gains:
        """One thread and all of them in turn."""
        threads = self.settings.threads
        key = (case.read, case.write)
        kernel = self.gain(lambda: run(1), lambda: run(threads))
        if key not in self.plain_gain:
            # The better loop of each, which need not be the same one.
            alone, together = (self.plain_runs(case, weights, n) for n in (1, threads))
            times = self.medians([*alone, *together])
            self.plain_gain[key] = min(times[:2]) / min(times[2:])
        one, all_ = (case.prepare(_CACHED_ROWS * n, self.buffers) for n in (1, threads))
        often = max(1, int(_CACHED_SECONDS / min(_seconds(lambda: one(1)) for _ in range(3))))
        with repeated(often):
            cached = threads * self.gain(lambda: one(1), lambda: all_(threads))
        return Gains(kernel, self.plain_gain[key], cached)

    def gain(self, alone: Callable[[], object], together: Callable[[], object]) -> float:
        one, all_ = self.medians([alone, together])
        return one / all_

    def medians(self, runs: list[Callable[[], object]]) -> list[float]:
        """Of each one's time, in turn; the first turn does not count."""
        times = [[_seconds(each) for each in runs] for _ in range(self.settings.runs + 1)][1:]
        return [statistics.median(column) for column in zip(*times, strict=True)]

    def plain_alone(self, case: Case) -> float:
        native.select(native.available()[-1])
        weights = self.full(case) * COLUMNS
        return min(self.medians(self.plain_runs(case, weights))) / weights


def bench(
    cases: list[Case],
    settings: Settings,
    isas: list[str] | None = None,
    done: Callable[[Result], None] | None = None,
) -> Report:
    """Time the cases on these instruction sets (all without); `done` hears of each result."""
    chosen = isas or native.available()
    before = native.selected()
    shared = _Bench(settings)
    report = Report(settings.threads, chosen)
    try:
        for case in cases:
            for isa in reversed(chosen):
                result = shared.time(case, isa, isa == chosen[-1])
                report.results.append(result)
                if done:
                    done(result)
    finally:
        native.select(before)
    return report
