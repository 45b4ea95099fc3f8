"""What a person sees while work goes on: a bar on a terminal, plain lines elsewhere, and seconds per stage.

Everything goes to stderr, so that stdout stays clean for --json and for pipes.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

STAGES = ("download", "calibrate", "transform", "quantize", "pack", "export", "verify")
_PLAIN_EVERY = 10.0  # seconds between two plain progress lines


class Progress:
    """Seconds spent per stage, and how far along the blocks are."""

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._began = time.monotonic()
        self._stream = stream if stream is not None else sys.stderr
        self._quiet = quiet
        self._bar = not quiet and self._stream.isatty()
        self._blocks_began = self._began
        self._last_plain = self._began

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time inside towards one of STAGES."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began

    def say(self, text: str) -> None:
        """One line that stays."""
        if not self._quiet:
            self._erase()
            print(text, file=self._stream, flush=True)

    def start_blocks(self) -> None:
        """Begin the clock that the estimate of the time left is made from."""
        self._blocks_began = time.monotonic()

    def block(self, done: int, total: int) -> None:
        """Show that `done` of `total` blocks are finished, with an estimate of the time left."""
        if self._quiet:
            return
        now = time.monotonic()
        elapsed = now - self._blocks_began
        left = elapsed / done * (total - done) if done else 0.0
        text = f"block {done}/{total}, {elapsed:.0f} s, about {left:.0f} s left"
        if self._bar:
            width = 24
            filled = width * done // max(total, 1)
            self._stream.write(f"\r  [{'#' * filled}{'.' * (width - filled)}] {text}\x1b[K")
            self._stream.flush()
            if done == total:
                self._erase()
        elif done == total or now - self._last_plain >= _PLAIN_EVERY:
            self._last_plain = now
            print(f"  {text}", file=self._stream, flush=True)

    def total(self) -> float:
        """Seconds since this run began."""
        return time.monotonic() - self._began

    def _erase(self) -> None:
        if self._bar:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
