"""What Workers.map does where one of its items fails."""

import threading
import time

import pytest

from qtool.streaming.workers import Workers


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_what_has_not_begun_when_one_fails_never_does(threads: int) -> None:
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 4:
            raise ValueError("the fifth")
        time.sleep(0.002)  # so that the others cannot all have been before it is known

    with Workers(threads) as workers, pytest.raises(ValueError, match="the fifth"):
        workers.map(work, range(1000))
    assert set(range(5)) <= set(begun)
    assert len(begun) < 1000


def test_the_first_failure_in_order_is_raised_though_a_later_one_was_sooner() -> None:
    later = threading.Event()

    def work(item: int) -> None:
        if item == 0:
            assert later.wait(20)
            raise ValueError("the first")
        later.set()
        raise KeyError("the second")

    with Workers(2) as workers, pytest.raises(ValueError, match="the first"):
        workers.map(work, range(50))


def test_after_a_failure_threads_work_and_are_shared_as_before() -> None:
    def fail(item: int) -> None:
        raise ValueError(str(item))

    with Workers(2) as workers:
        for _ in range(3):
            with pytest.raises(ValueError, match="0"):
                workers.map(fail, range(20))
        assert workers.share() == 2
        assert workers.map(lambda item: item * item, range(100)) == [i * i for i in range(100)]
