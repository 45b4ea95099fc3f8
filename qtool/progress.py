"""What a person sees while work goes on: a bar or plain lines, and seconds per stage.

Everything goes to stderr, so that stdout stays clean for --json and for pipes.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

from qtool.printable import printable

STAGES = ("download", "calibrate", "transform", "quantize", "pack", "export", "verify")
STAGE_TITLES = {"transform": "smooth/rotate"}
_PLAIN_EVERY = 10.0  # seconds between two plain progress lines


class Progress:
    """Seconds spent per stage, and how far along the blocks are."""

    def __init__(self, quiet: bool = False) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._began = time.monotonic()
        self._quiet = quiet
        self._console = Console(stderr=True)
        self._last_plain = self._began

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time inside towards one of STAGES, or a stage of another command."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def apart(self, whole: str, part: str, seconds: float) -> None:
        """Count seconds that lie inside stage `whole` towards `part` instead."""
        self.seconds[whole] = max(0.0, self.seconds[whole] - seconds)
        self.seconds[part] += seconds

    def say(self, text: str) -> None:
        """One line that stays."""
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
                self.say(f"  {title} {done}/{count}, {now - began:.0f} s, about {left:.0f} s left")

    def total(self) -> float:
        """Seconds since this run began."""
        return time.monotonic() - self._began
