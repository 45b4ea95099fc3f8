"""Threads for a forward pass, each computing on one core."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """A pool of threads, each of which computes on one core; results come in the order asked."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(1)
        self.threads = threads
        # OpenMP counts threads per calling thread, so each one has to be told.
        self._pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """function of each item; the first failure, in order, is raised once all have ended."""
        futures = [self._pool.submit(function, item) for item in items]
        for future in futures:
            future.exception()
        return [future.result() for future in futures]

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
