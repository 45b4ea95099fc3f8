"""Numbered work on a few threads, in order of the numbers, with progress and a clean end."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

_LOOK_EVERY = 0.1  # seconds
_STEPS = 200  # of a progress bar

Steps = Callable[[int], Iterable[int]]


def in_order(
    count: int, threads: int, worker: Callable[[], Callable[[int], None]], steps: Steps
) -> None:
    """Calls work(0) .. work(count - 1), on several threads at once.

    worker: makes the `work` of one thread, with buffers of its own. steps: is given a number of
    steps and iterated over as they are done. Numbers are handed out in order, and one that was is
    finished; so where some fail, the error of the lowest is raised, on every run the same.
    """
    numbers = iter(range(count))
    threads = max(1, min(threads, count))
    at, done = [0] * threads, [0] * threads
    ended = False

    def loop(thread: int) -> None:
        nonlocal ended
        good = False
        try:
            work = worker()
            while not ended and (number := next(numbers, None)) is not None:
                at[thread] = number
                work(number)
                done[thread] += 1
            good = True
        finally:
            ended = ended or not good

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(loop, thread) for thread in range(threads)]
        try:
            whole = min(count, _STEPS)
            for step in steps(whole):
                while sum(done) * whole < (step + 1) * count and not ended:
                    if not wait(futures, _LOOK_EVERY).not_done:
                        break
                if ended:
                    break
        finally:
            ended = ended or sum(done) < count
    for _, future in sorted(zip(at, futures, strict=True), key=lambda pair: pair[0]):
        future.result()
