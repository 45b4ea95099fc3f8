"""A few of something, lent to threads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import LifoQueue
from typing import Generic, TypeVar

Thing = TypeVar("Thing")


class Lent(Generic[Thing]):
    """The last one that came back first; each is made when it is first needed."""

    def __init__(self, make: Callable[[], Thing], count: int) -> None:
        self._make = make
        self._free: LifoQueue[Thing | None] = LifoQueue()
        for _ in range(count):
            self._free.put(None)

    @contextmanager
    def one(self) -> Iterator[Thing]:
        """One for this thread alone; waits where all are in use."""
        thing = self._free.get()
        try:
            thing = self._make() if thing is None else thing
            yield thing
        finally:
            self._free.put(thing)
