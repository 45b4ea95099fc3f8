"""gptq.yaqa: products of gradients, and rows that compensate for others."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qtool.blockwise import row_rounding
from qtool.blockwise.row_rounding import RowFactor, round_rows
from qtool.cuda.device import Device
from qtool.methods.tiles import in_turn
from qtool.quantizing.gguf.gptq import in_block, swept_site
from qtool.streaming.workers import Workers
from support.cuda.cuda_device import device, emulator

__all__ = ["device", "emulator"]

Vector = NDArray[np.float64]


def products(out: int, seed: int = 0) -> NDArray[np.float32]:
    """Of rows whose errors go together in part."""
    rng = np.random.default_rng(seed)
    gradients = rng.normal(size=(3 * out, out)) @ rng.normal(size=(out, out)) / out**0.5
    found: NDArray[np.float32] = (gradients.T @ gradients).astype(np.float32)
    return found


def halves(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.round(rows * 2) / np.float32(2)


def fed_back(
    weight: NDArray[np.float32],
    h: NDArray[np.float32] | RowFactor,
    rounded: Callable[[NDArray[np.float32]], NDArray[np.float32]],
    device: Device | None = None,
) -> NDArray[np.float32]:
    """The rows as they are when they are rounded."""
    made = np.full_like(weight, np.nan)

    def noted(rows: NDArray[np.float32], which: NDArray[np.int32]) -> NDArray[np.float32]:
        assert np.isnan(made[which]).all()
        made[which] = rows
        return rounded(rows)

    round_rows(weight, h, noted, device=device)
    return made


def solved(weight: Vector, h: Vector, together: int, rounded: Any) -> tuple[Vector, list[int]]:
    """The rows that are rounded, by the least squares that they stand for, in float64."""
    h = h / np.diagonal(h).mean() + np.eye(len(h))
    order = list(np.argsort(-np.diagonal(h), kind="stable"))
    left = weight.copy()
    for first in range(0, len(order), together):
        now, rest = order[first : first + together], order[first + together :]
        lost = left[now] - rounded(left[now].astype(np.float32))
        if rest:
            left[rest] += np.linalg.solve(h[np.ix_(rest, rest)], h[np.ix_(rest, now)] @ lost)
    return left, order


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize(("out", "part"), [(5, 16), (16, 16), (40, 16), (300, 16), (600, 32)])
def test_rows_are_those_of_least_squares(
    out: int, part: int, factored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 and 600: whole blocks of rows are told at once. Factored: once, for several matrices."""
    assert [row_rounding.rows_of_a_part(rows) for rows in (1023, 4096, 11008)] == [16, 64, 160]
    monkeypatch.setattr(row_rounding, "_PARTS", 16)
    h = products(out)
    rows = RowFactor.of(torch.from_numpy(h), in_turn, None) if factored else h
    weight = np.random.default_rng(1).normal(size=(out, 24)).astype(np.float32)
    seen: list[NDArray[np.float32]] = []

    def watched(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        seen.append(rows.copy())
        return halves(rows)

    made = fed_back(weight, rows, watched)
    wanted, order = solved(weight.astype(np.float64), h.astype(np.float64), part, halves)
    assert [len(rows) for rows in seen] == [part] * (out // part) + [out % part] * bool(out % part)
    assert np.array_equal(np.concatenate(seen), made[order])
    # A weight that lies half way may be rounded otherwise; none of these does.
    np.testing.assert_allclose(made, wanted, atol=2e-4)
    assert (out <= 16) is bool(np.array_equal(made, weight))


def test_rows_on_a_device(device: Device) -> None:
    h = products(300)
    weight = np.random.default_rng(1).normal(size=(300, 24)).astype(np.float32)
    for rows in (h, RowFactor.of(device.put(h), in_turn, device)):
        there = fed_back(weight, rows, halves, device)
        here = RowFactor.of(torch.from_numpy(h), in_turn, None) if rows is not h else h
        np.testing.assert_allclose(there, fed_back(weight, here, halves), atol=2e-4)


def test_the_whole_loses_less() -> None:
    h = products(96)
    weight = np.random.default_rng(2).normal(size=(96, 40)).astype(np.float32)

    def loss(rounded: NDArray[np.float32]) -> float:
        error = (weight - rounded).astype(np.float64)
        return float(np.trace(error.T @ h @ error))

    assert loss(halves(fed_back(weight, h, halves))) < 0.85 * loss(halves(weight))


def test_what_nothing_depends_on_takes_part_alone() -> None:
    """Rows without a gradient neither lose nor compensate for anything."""
    h = products(40)
    h[7] = h[:, 7] = 0
    weight = np.random.default_rng(3).normal(size=(40, 8)).astype(np.float32)
    assert np.array_equal(fed_back(weight, h, halves)[7], weight[7])


@pytest.mark.parametrize("growth", [None, np.linspace(1, 3, 40, dtype=np.float32)])
@pytest.mark.parametrize("moved", [False, True])
def test_rows_of_a_gguf_in_another_order(
    growth: NDArray[np.float32] | None, moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of llama's queries are: they become what they would without."""
    h, rng = products(40), np.random.default_rng(4)
    weight = rng.normal(size=(40, 8)).astype(np.float32)
    order = rng.permutation(40)
    source = SimpleNamespace(
        origin=("w",), cut=None, columns=None, in_features=8, growth=growth, rows=40,
        order=lambda rows: order[rows],
    )  # fmt: skip
    type_ = SimpleNamespace(row_bytes=lambda width: 4 * width)
    tensor: Any = SimpleNamespace(name="w", source=source, shape=(40, 8), type=type_)
    grown = np.ones((40, 1), np.float32) if growth is None else growth[:, None]
    stored = weight[order] * grown
    block: Any = SimpleNamespace(weights={"w": torch.from_numpy(weight.copy())})
    known: Any = SimpleNamespace(given=None)
    monkeypatch.setattr(swept_site, "matrices_of", lambda _: (1, 40))
    monkeypatch.setattr(in_block, "floats_of", lambda _, first, last: stored[first:last])

    def blocks(some: NDArray[np.float32], *_: Any) -> NDArray[np.uint8]:
        return halves(some).view(np.uint8)

    monkeypatch.setattr(swept_site.sweep, "blocks_of", blocks)
    monkeypatch.setattr(
        swept_site.native_gguf, "dequantize", lambda blocks, *_, **__: blocks.view(np.float32)
    )
    part, rows = swept_site.Part(tensor, 0, 0), {"w": h}
    own = swept_site._rows_of(part, rows)
    assert own is not None and not rows and swept_site._rows_of(part, {}) is None
    factor = RowFactor.of(torch.from_numpy(h), in_turn, None)  # of rows that are no expert's
    assert swept_site._rows_of(part, {"w": factor}) is None
    rows = {"w": h}
    with Workers(1) as workers:
        made = swept_site._fed_back(part, rows, known, block, workers, None, moved)
    assert made is not None and not rows
    here = np.empty(40, np.float32)  # what each row of the block is multiplied by
    here[order] = grown[:, 0]
    wanted = halves(fed_back(weight * here[:, None], h / np.outer(here, here), halves))
    assert np.array_equal(made.view(np.float32), wanted[order])
    assert (made.view(np.float32) != halves(stored)).any()


@pytest.mark.parametrize(
    ("origin", "matrices", "transposed", "name"),
    [
        (("a",), 1, None, "a"),
        (("a",), 1, True, None),
        (("a", "b"), 1, None, None),
        (("a", "b"), 2, None, "b"),
        (("a",), 2, None, "a"),
        (("a",), 2, True, "a"),
        (("a",), 2, False, None),
    ],
)
def test_what_a_part_of_a_gguf_tensor_is_of(
    origin: tuple[str, ...],
    matrices: int,
    transposed: bool | None,
    name: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second matrix of a stack of experts, one of a stack that is one tensor of the checkpoint,
    there transposed, or with others beside it."""
    cut = None if transposed is None else SimpleNamespace(only_transposed=transposed)
    tensor: Any = SimpleNamespace(source=SimpleNamespace(origin=origin, cut=cut))
    monkeypatch.setattr(swept_site, "matrices_of", lambda _: (matrices, 8))
    part = swept_site.Part(tensor, matrices - 1, 0)
    assert swept_site._name_of(part) == name
    assert swept_site.fed_names({"site": [part]}) == ({name} if name else set())
