"""Factors by tiles: what they are, and that no bit depends on threads; threads that share work."""

import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qtool.errors import SourceError
from qtool.methods import gptq, tiles
from qtool.streaming.workers import Workers

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


@pytest.mark.parametrize("size", [20, 100])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [(1, 0), (19, 0), (19, 18), (12, 7)])
def test_what_is_not_finite_beside_the_diagonal_has_no_factor(
    size: int, value: float, at: tuple[int, int]
) -> None:
    matrix = gram(size, torch.float32)
    matrix[at] = matrix[at[::-1]] = value
    with pytest.raises(SourceError, match="cannot be factored even with"):
        gptq.factor(matrix.numpy(), gptq.Options())


def test_a_wide_matrix_is_factored_where_it_lies() -> None:
    """No step makes another one of its size."""
    size = 300
    made: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            given = [*args, *(kwargs or {}).values()]
            known = {one.untyped_storage().data_ptr() for one in given if torch.is_tensor(one)}
            for one in result if isinstance(result, tuple | list) else [result]:
                if torch.is_tensor(one) and one.untyped_storage().data_ptr() not in known:
                    made.append(one.untyped_storage().nbytes())
            return result

    matrix = gram(size, torch.float32).numpy()
    with Watch():
        gptq.factor(matrix, gptq.Options())
    assert 4 * tiles.TILE**2 <= max(made) <= 4 * tiles.TILE * size < size**2


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


def test_nobody_waits_for_a_thread_that_has_not_begun() -> None:
    """A part that spreads its own work again, while the only other thread is busy."""
    caller, both, spread_again = threading.current_thread(), threading.Barrier(2), threading.Event()
    seen: list[int] = []
    came: list[bool] = []

    def part(_: int) -> None:
        both.wait(60)
        if threading.current_thread() is caller:
            workers.spread(seen.append, range(3))
            spread_again.set()
        else:
            came.append(spread_again.wait(20))

    with Workers(2) as workers:
        workers.spread(part, range(2))
    assert came == [True] and sorted(seen) == [0, 1, 2]
