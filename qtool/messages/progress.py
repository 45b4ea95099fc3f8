"""What a person sees while work goes on: a bar or plain lines, and seconds per stage.

Everything goes to stderr, so that stdout stays clean for --json and for pipes. A log file gets a
line of JSON for each event, whatever is shown: time (seconds since 1970), event (begin, stage,
message, step, failed, end) and what belongs to it.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress

from qtool import __version__
from qtool.errors import QtoolError, SourceError
from qtool.messages.printable import printable

STAGES = ("download", "calibrate", "transform", "quantize", "pack", "export", "verify")
STAGE_TITLES = {"transform": "smooth/rotate"}
_PLAIN_EVERY = 10.0  # seconds between two plain progress lines


class Progress:
    """Seconds spent per stage, and how far along the blocks are."""

    def __init__(
        self,
        quiet: bool = False,
        log: Path | None = None,
        words: Callable[[str], str] = lambda text: text,
    ) -> None:
        """log: a file to append to; SourceError where that cannot be. words: for what speaks of
        options of the command line, as every sentence does (qtool/api/words.py)."""
        self._words = words
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._began = time.monotonic()
        self._quiet = quiet
        self._console = Console(stderr=True)
        self._last_plain = self._began
        self._log = log

    def event(self, kind: str, /, **what: object) -> None:
        """A line for the log file. Each is written by itself, so that a killed run has all.

        SourceError where the first cannot be written. Later, on a disk that is full meanwhile, the
        work is worth more than its log, and why it ends more than why the log does.
        """
        if self._log is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": kind, **what})
        try:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            path, self._log = self._log, None
            said = f"{path}: the log cannot be written ({error.strerror})"
            if kind == "begin":
                raise SourceError(f"{said}; choose another --log-file") from None
            warning = f"warning: {said}; the work goes on without it"
            print(printable(warning), file=sys.stderr, flush=True)

    @contextmanager
    def logged(self, command: str, **what: object) -> Iterator[None]:
        """The body is one run of a command: how it begins and ends goes into the log."""
        self.event("begin", command=command, version=__version__, **what)
        try:
            yield
        except BaseException as error:
            said = str(error) if isinstance(error, QtoolError | OSError) else ""
            notes = list(getattr(error, "__notes__", ()))
            self.event("failed", error=said or type(error).__name__, notes=notes)
            raise
        self.event("end", seconds=round(self.total(), 3))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time inside towards one of STAGES, or a stage of another command."""
        began = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + took
            self.event("stage", name=name, seconds=round(took, 3))

    def apart(self, whole: str, part: str, seconds: float) -> None:
        """Count seconds that lie inside stage `whole` towards `part` instead."""
        self.seconds[whole] = max(0.0, self.seconds[whole] - seconds)
        self.seconds[part] += seconds

    def say(self, text: str) -> None:
        """One line that stays."""
        text = self._words(text)
        self.event("message", text=text)
        self._show(text)

    def _show(self, text: str) -> None:
        if not self._quiet:
            text = printable(text)
            if self._console.is_terminal:
                self._console.print(text, markup=False, highlight=False)
            else:
                print(text, file=sys.stderr, flush=True)

    def say_stages(self) -> None:
        """A line with its seconds per stage that there was."""
        for name in (name for name in STAGES if self.seconds[name]):
            self.say(f"{STAGE_TITLES.get(name, name):>13}  {self.seconds[name]:8.2f} s")

    def blocks(self, count: int, title: str = "block", first: int = 0) -> Iterator[int]:
        """Yield first .. count-1, showing how many are done and an estimate of the time left."""
        for index in self._shown(count, title, first):
            yield index
            self.event("step", kind=title, done=index + 1, of=count)

    def _shown(self, count: int, title: str, first: int) -> Iterator[int]:
        if self._quiet:
            yield from range(first, count)
        elif self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            with RichProgress(*columns, console=self._console, transient=True) as bar:
                yield from bar.track(
                    range(first, count), total=count, completed=first, description=f"{title}s"
                )
        else:
            yield from self._plain_blocks(count, title, first)

    def _plain_blocks(self, count: int, title: str, first: int) -> Iterator[int]:
        began = time.monotonic()
        for index in range(first, count):
            yield index
            now = time.monotonic()
            done = index + 1
            if done == count or now - self._last_plain >= _PLAIN_EVERY:
                self._last_plain = now
                left = (now - began) / (done - first) * (count - done)
                self._show(
                    f"  {title} {done}/{count}, {now - began:.0f} s, about {left:.0f} s left"
                )

    @contextmanager
    def transfer(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Inside, a function that is told of bytes as they come, by several threads."""
        lock = threading.Lock()
        done = 0
        began = time.monotonic()
        self.event("step", kind="transfer", title=title, done=0, of=total)
        with ExitStack() as stack:
            show: Callable[[int], object] | None = None
            if not self._quiet and self._console.is_terminal:
                columns = (
                    TextColumn("{task.description}"),
                    BarColumn(),
                    DownloadColumn(),
                    TransferSpeedColumn(),
                    TimeRemainingColumn(),
                )
                bar = stack.enter_context(
                    RichProgress(*columns, console=self._console, transient=True)
                )
                task = bar.add_task(printable(title), total=total)
                show = partial(bar.advance, task)
            elif not self._quiet:
                self._show(f"  {title}: {total / 1e6:,.1f} MB")

            def count(nbytes: int) -> None:
                nonlocal done
                with lock:
                    done += nbytes
                    now = time.monotonic()
                    if show is not None:
                        show(nbytes)
                    elif now - self._last_plain >= _PLAIN_EVERY:
                        self._last_plain = now
                        rate = done / max(now - began, 1e-9)
                        self._show(
                            f"  {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s"
                        )

            yield count
        self.event("step", kind="transfer", title=title, done=done, of=total)

    def total(self) -> float:
        """Seconds since this run began."""
        return time.monotonic() - self._began
