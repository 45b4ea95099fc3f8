"""Micro-batches that add to one sum in their order, whichever thread is ready first."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class FailedError(Exception):
    """Another micro-batch failed; its own error is the one to report."""


class Turns:
    """Lets micro-batches pass each point in their order."""

    def __init__(self) -> None:
        self._next: dict[object, int] = {}
        self._changed = threading.Condition()
        self._failed: int | None = None

    def wait(self, point: object, number: int) -> None:
        """Until every micro-batch before `number` has passed; FailedError if one never will."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn(point, number) or self._hopeless(number))
            if not self._turn(point, number):
                raise FailedError

    def passed(self, point: object, number: int) -> None:
        """Let the next micro-batch on."""
        with self._changed:
            self._next[point] = number + 1
            self._changed.notify_all()

    def fail(self, number: int) -> None:
        """Tell the micro-batches after this one not to wait for it."""
        with self._changed:
            self._failed = number if self._failed is None else min(number, self._failed)
            self._changed.notify_all()

    @contextmanager
    def taking(self, number: int) -> Iterator[None]:
        """The work of a micro-batch: if it fails, those after it do not wait for it."""
        try:
            yield
        except BaseException:
            self.fail(number)
            raise

    def _turn(self, point: object, number: int) -> bool:
        return self._next.get(point, 0) == number

    def _hopeless(self, number: int) -> bool:
        return self._failed is not None and self._failed < number
