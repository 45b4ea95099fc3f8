"""Factors by tiles: what they are, and that no bit depends on threads; threads that share work."""

import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch

from qtool.calibrating.workers import Workers
from qtool.methods import gptq, tiles

SIZES = [1, 31, 32, 33, 100, 129]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 32)
    monkeypatch.setattr(gptq, "_WHOLE", 32)


def gram(size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = torch.randn(2 * size + 8, size, dtype=dtype, generator=torch.Generator().manual_seed(size))
    return x.T @ x / len(x) + 0.01 * torch.eye(size, dtype=dtype)


@pytest.mark.parametrize("size", SIZES)
def test_the_factor_is_lapacks(size: int) -> None:
    wanted = torch.linalg.cholesky(gram(size))
    above = torch.ones(size, size, dtype=torch.bool).triu(1)
    matrix = gram(size).masked_fill(above, torch.nan)  # is not read
    assert tiles.cholesky(matrix, tiles.in_turn)
    torch.testing.assert_close(matrix, wanted, rtol=1e-12, atol=1e-12)
    assert not matrix.triu(1).any()


@pytest.mark.parametrize("size", SIZES)
def test_the_inverse_is_one(size: int) -> None:
    upper = torch.linalg.cholesky(gram(size), upper=True)
    found = upper.clone()
    tiles.invert_upper(found, tiles.in_turn, gptq.invert_upper)
    eye = torch.eye(size, dtype=upper.dtype)
    torch.testing.assert_close(found @ upper, eye, rtol=0, atol=1e-12)
    assert torch.equal(found, found.triu())


@pytest.mark.parametrize("at", [0, 40, 99])
def test_what_has_no_factor_is_told(at: int) -> None:
    matrix = gram(100)
    matrix[at, at] = -1
    assert not tiles.cholesky(matrix, tiles.in_turn)


@pytest.mark.parametrize("act_order", [True, False])
def test_no_bit_depends_on_threads(act_order: bool) -> None:
    """The factor of a wide input, and its importance, and what a sweep makes of them."""
    options, matrix = gptq.Options(act_order=act_order), gram(300, torch.float32).numpy()
    found = set()
    for threads in (1, 2, 3, 8):
        with Workers(threads) as workers:
            given = gptq.factor(matrix, options, spread=workers.spread)
            cost = gptq.importance(matrix, options, spread=workers.spread)
        assert cost.tobytes() == given.importance.tobytes()
        found.add(given.upper.tobytes() + given.importance.tobytes())
    assert len(found) == 1


def test_it_is_the_factor_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, options = gram(300).numpy(), gptq.Options()
    found = gptq.factor(matrix, options, 500, np.float64)
    monkeypatch.setattr(gptq, "_WHOLE", 300)
    whole = gptq.factor(matrix, options, 500, np.float64)
    assert (found.order == whole.order).all() and found.notes == whole.notes
    np.testing.assert_allclose(found.upper, whole.upper, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.importance, whole.importance, rtol=1e-6)


def test_damping_is_raised_by_tiles_too() -> None:
    matrix = gram(100, torch.float32)
    matrix[:, 50] = matrix[50] = 3.0  # no sum of squares: more is added until it could be one
    given = gptq.factor(matrix.numpy(), gptq.Options(act_order=False))
    assert any("damping raised" in note for note in given.notes)


def test_every_item_is_done_once_by_threads_that_are_free() -> None:
    """Of four threads each of two items that are left may use two, and the last one all."""
    seen: Counter[int] = Counter()
    shares: list[int] = []
    both = threading.Barrier(2, timeout=60)
    ended = threading.Event()

    def item(number: int) -> None:
        both.wait()
        if number:
            shares.append(workers.share())
            ended.set()
            return
        assert ended.wait(60)
        until = time.monotonic() + 60
        while workers.share() < 4 and time.monotonic() < until:  # the other has not left
            time.sleep(0.001)
        shares.append(workers.share())
        workers.spread(lambda part: seen.update([part]), range(1000))

    with Workers(4) as workers:
        assert workers.share() == 4
        workers.map(item, range(2))
        assert workers.share() == 4
    assert shares == [2, 4]
    assert set(seen) == set(range(1000)) and set(seen.values()) == {1}


@pytest.mark.parametrize("threads", [1, 3])
def test_the_failure_of_a_part_ends_all(threads: int) -> None:
    def part(number: int) -> None:
        if number == 5:
            raise ValueError("five")

    with Workers(threads) as workers:
        with pytest.raises(ValueError, match="five"):
            workers.spread(part, range(100))
        assert workers.map(abs, [-1]) == [1]
