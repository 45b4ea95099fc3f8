"""Rows are split over threads that stay: same results, nothing left running, forks work."""

import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from qtool import native
from qtool.native.library import over_rows, repeated


def halves(rows: int, threads: int) -> np.ndarray:
    values = np.random.default_rng(rows).standard_normal((rows, 4096), np.float32)
    return native.to_float16(values, threads)


@pytest.mark.parametrize(("rows", "threads"), [(1, 4), (64, 2), (65, 2), (320, 3), (320, 100)])
def test_ranges_cover_the_rows_once(rows: int, threads: int) -> None:
    seen = np.zeros(rows, int)
    names = set()

    def run(first: int, last: int) -> int:
        assert first % 32 == 0
        seen[first:last] += 1
        names.add(threading.get_ident())
        return 0

    over_rows(rows, threads, run)
    assert (seen == 1).all()
    assert threading.get_ident() in names


def test_threads_stay() -> None:
    for _ in range(3):
        halves(256, 3)
    before = threading.active_count()
    for _ in range(20):
        halves(256, 3)
    assert threading.active_count() <= before + 2  # not one more with each call


def test_all_are_done_when_one_fails() -> None:
    running = threading.Event()
    finished = []

    def run(first: int, last: int) -> int:
        if first == 0:
            running.wait(5)
            raise KeyError(first)
        running.set()
        time.sleep(0.05)
        finished.append(first)
        return 0

    with pytest.raises(KeyError):
        over_rows(64, 2, run)
    assert finished == [32]


@pytest.mark.parametrize(("code", "error"), [(1, ValueError), (2, MemoryError)])
def test_codes_of_any_range_are_errors(code: int, error: type[Exception]) -> None:
    for bad in (0, 32, 64):
        with pytest.raises(error):
            over_rows(96, 3, lambda first, last, bad=bad: code if first == bad else 0)


def test_callers_in_threads() -> None:
    want = halves(200, 1)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: halves(200, 4), range(32)):
            np.testing.assert_array_equal(found, want)


def test_after_a_fork() -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("no fork here")
    want = halves(200, 4).sum(dtype=np.float64)
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=lambda: send.send(halves(200, 4).sum(dtype=np.float64)))
    child.start()
    assert receive.poll(20), "kernels of a forked process wait for threads that it does not have"
    assert receive.recv() == want
    child.join(20)


def test_repeated_runs_give_the_same() -> None:
    want = halves(40, 1)
    with repeated(3):
        np.testing.assert_array_equal(halves(40, 2), want)
    np.testing.assert_array_equal(halves(40, 2), want)
