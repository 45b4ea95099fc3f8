"""Threads for a forward pass, each computing on one core.

What is mapped may share out its own work once more, over the threads that have nothing left to do:
of a block's matrices one is by far the largest.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """A pool of threads, each of which computes on one core; results come in the order asked."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(1)
        self.threads = threads
        # OpenMP counts threads per calling thread, so each one has to be told.
        pool = partial(ThreadPoolExecutor, initializer=torch.set_num_threads, initargs=(1,))
        self._pool = pool(threads)
        self._helpers = pool(max(1, threads - 1))  # of those that share their work out
        self._left = 0  # items of map() that have not ended
        self._changing = threading.Lock()

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """function of each item; the first failure, in order, is raised once those have ended that
        had begun by then."""
        failed: list[int] = []  # places of items

        def counted(place: int, item: T) -> R:
            try:
                if any(other < place for other in failed):
                    raise CancelledError
                return function(item)
            except BaseException:
                failed.append(place)
                raise
            finally:
                self._count(-1)

        wanted = list(items)
        self._count(len(wanted))
        futures = [self._pool.submit(counted, place, item) for place, item in enumerate(wanted)]
        for future in futures:
            future.exception()
        return [future.result() for future in futures]

    def share(self) -> int:
        """Threads that one of the items of map(), or whoever calls outside of it, may use now."""
        return max(1, self.threads // max(1, self._left))

    def spread(self, function: Callable[[Any], None], items: Iterable[Any]) -> None:
        """function of each item, in any order, by as many threads as share() says, the caller's
        among them."""
        waiting = deque(items)
        failed = threading.Event()

        def take() -> None:
            while not failed.is_set():
                try:
                    item = waiting.popleft()
                except IndexError:
                    return
                try:
                    function(item)
                except BaseException:
                    failed.set()
                    raise

        count = min(self.share(), len(waiting))
        others = [self._helpers.submit(take) for _ in range(count - 1)]
        try:
            take()
        finally:
            # Those that have not begun find nothing to do, and may wait for this very thread.
            begun = [other for other in others if not other.cancel()]
            wait(begun)
        for other in begun:
            other.result()

    def _count(self, more: int) -> None:
        with self._changing:
            self._left += more

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._helpers.shutdown(cancel_futures=True)
