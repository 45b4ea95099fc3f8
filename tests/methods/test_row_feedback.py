"""gptq.yaqa: slopes behind blocks, products of slopes, rows that make up for others."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf_models
import numpy as np
import pytest
import quantizing
import torch
from cuda_device import device, emulator
from gguf_runs import STREAMED, streamed
from numpy.typing import NDArray
from slopes_of_outputs import QUIET, measured
from transformers import AutoModelForCausalLM

from qtool.calibrating import row_rounding
from qtool.calibrating.placed import Passage
from qtool.calibrating.row_feedback import Feedback, _groups
from qtool.calibrating.row_rounding import RowFactor, round_rows
from qtool.calibrating.sites import Tracer
from qtool.fitting.ends import Ends
from qtool.gguf.gptq import in_block, swept_site
from qtool.methods.tiles import in_turn
from qtool.runs.workspace import Workspace, workspace
from qtool.streaming.device import Device
from qtool.streaming.linears import Matrix
from qtool.streaming.skeleton import MICRO_BATCH_TOKENS
from qtool.streaming.workers import Workers

__all__ = ["device", "emulator"]

Vector = NDArray[np.float64]


# Rows that make up for others.


def products(out: int, seed: int = 0) -> NDArray[np.float32]:
    """Of rows whose errors go together in part."""
    rng = np.random.default_rng(seed)
    slopes = rng.normal(size=(3 * out, out)) @ rng.normal(size=(out, out)) / out**0.5
    found: NDArray[np.float32] = (slopes.T @ slopes).astype(np.float32)
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
    """Rows without a slope neither lose nor make up for anything."""
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
    ("origin", "matrices", "turned", "name"),
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
    turned: bool | None,
    name: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second matrix of a stack of experts, one of a stack that is one tensor of the checkpoint,
    there turned, or with others beside it."""
    cut = None if turned is None else SimpleNamespace(only_turned=turned)
    tensor: Any = SimpleNamespace(source=SimpleNamespace(origin=origin, cut=cut))
    monkeypatch.setattr(swept_site, "matrices_of", lambda _: (matrices, 8))
    part = swept_site.Part(tensor, matrices - 1, 0)
    assert swept_site._name_of(part) == name
    assert swept_site.fed_names({"site": [part]}) == ({name} if name else set())


# Slopes.


def slopes_of(
    model: Path, tokens: NDArray[np.int64], last: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Of what comes behind the last block, given these slopes there: by every block's output and
    every matrix's, [tokens, out] float64; by transformers' own model."""
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float64, experts_implementation="eager"
    )
    made: dict[str, torch.Tensor] = {}
    layers = loaded.model.layers
    named = {f"model.layers.{n}": layer for n, layer in enumerate(layers)}
    named |= {
        f"{prefix}.{name}": one
        for prefix, layer in [*named.items()]
        for name, one in layer.named_modules()
        if isinstance(one, torch.nn.Linear) or name in ("mlp", "feed_forward")
    }

    def keep(name: str) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            made[name] = output[0] if isinstance(output, tuple) else output

        return hook

    for name, one in named.items():
        one.register_forward_hook(keep(name))
    loaded(torch.from_numpy(tokens))
    end = made[f"model.layers.{len(layers) - 1}"]
    found = torch.autograd.grad(end, [*made.values()], torch.cat([*last]).double())
    return {n: g.reshape(-1, g.shape[-1]) for n, g in zip(made, found, strict=True)}


def test_slopes_and_products_against_float64(tmp_path: Path) -> None:
    model = quantizing.build("llama", tmp_path / "model")
    skeleton, tokens, ends = measured(model, tmp_path)
    with Workers(2) as workers:
        last = ends.behind(skeleton.count - 1, workers)
        assert [one.shape[:2] for one in last] == [(2, 512)]  # a micro-batch
        wanted = slopes_of(model, tokens[:2], [*last])
        stream = skeleton.embed(tokens)
        passage = Passage.of(stream, workers, None)
        feedback, tracer = Feedback(ends), Tracer()
        for index in range(skeleton.count):
            (behind,) = ends.behind(index, workers)
            own = wanted[f"model.layers.{index}"]
            scale = float(own.abs().max())
            assert (behind.reshape(own.shape).double() - own).abs().max() < 1e-4 * scale
            block = skeleton.block(index)
            found = tracer.sites(block, stream)
            names = {name for site in found.sites for name in site.names}
            rows = feedback.of(block, passage, found, names)
            assert len(rows) == 7
            for name, h in rows.items():
                g = wanted[name.removesuffix(".weight")]
                k = g / g.square().mean(-1, keepdim=True).sqrt().sqrt()
                products = (k.T @ k).numpy()
                assert np.abs(h - products).max() < 1e-3 * np.abs(products).max(), name
            few = feedback.of(block, passage, found, found.sites[0].names[:2])
            assert [*few] == [*found.sites[0].names[:2]]
            assert all(np.array_equal(rows[name], one) for name, one in few.items())
            skeleton.advance(block, stream, workers)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "llama4"])
def test_what_experts_give_has_one_h(
    name: str, stacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert's slopes are those of all experts' sum, times its share of it; shares add up to
    one, so that H is as if one matrix gave the sum. Qwen's gate and up together have as many rows
    as states have; Llama 4 multiplies by all experts at once, of which routers zero
    what they read: each of the two of a token has the slopes of the sum."""
    if name == "llama4":
        model = gguf_models.build(name, tmp_path / "model")
    else:
        model = quantizing.build(name, tmp_path / "model")
    skeleton, tokens, ends = measured(model, tmp_path, 2, 64, 2)
    given: list[Vector] = []

    def factor(rows: torch.Tensor, *_: Any) -> RowFactor:
        given.append(rows.double().numpy())
        return RowFactor(torch.eye(64), np.arange(64, dtype=np.int32))

    monkeypatch.setattr(RowFactor, "of", factor)
    with Workers(2) as workers:
        wanted = slopes_of(model, tokens, [*ends.behind(skeleton.count - 1, workers)])
        stream = skeleton.embed(tokens)
        passage, tracer = Passage.of(stream, workers, None), Tracer(stacked)
        for index in range(skeleton.count):
            block = skeleton.block(index)
            found = tracer.sites(block, stream)
            names = {name for site in found.sites for name in site.names}
            rows = Feedback(ends).of(block, passage, found, names)
            last = {one for one in names if "experts" in one and ("down" in one or "w2" in one)}
            assert {one for one, h in rows.items() if isinstance(h, RowFactor)} == last
            assert len(given) == bool(last)
            if last:
                kind, times = ("feed_forward", 2) if name == "llama4" else ("mlp", 1)
                g = wanted[f"model.layers.{index}.{kind}"]
                k = g / g.square().mean(-1, keepdim=True).sqrt().sqrt()
                products = times * (k.T @ k).numpy()
                assert np.abs(given.pop() - products).max() < 1e-3 * np.abs(products).max()
            skeleton.advance(block, stream, workers)


def test_the_last_ones_are_of_the_loss(tmp_path: Path) -> None:
    """Their sum of squares is that of the drawn tokens' slopes in the mean: at each position, the
    trace of the Fisher information by what the last block gives."""
    model = quantizing.build("llama", tmp_path / "model")
    skeleton, tokens, ends = measured(model, tmp_path, 8, 128, 8)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    states: list[torch.Tensor] = []
    loaded.model.layers[-1].register_forward_hook(
        lambda _, __, out: states.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        loaded(torch.from_numpy(tokens))

    def predicted(state: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = loaded.lm_head(loaded.model.norm(state)).log_softmax(-1)
        return found

    rows = states[0].reshape(-1, states[0].shape[-1])
    jacobian = torch.func.vmap(torch.func.jacrev(predicted))(rows[:256].detach())
    chances = predicted(rows[:256]).detach().exp()
    wanted = float((chances * jacobian.square().sum(-1)).sum(-1).mean().detach())
    with Workers(1) as workers:
        last = torch.cat([*ends.behind(skeleton.count - 1, workers)]).reshape(rows.shape)
    squares = last.double().square().sum(-1)
    error = float(squares.std()) / len(squares) ** 0.5
    assert abs(float(squares.mean()) - wanted) < 4 * error + 0.1 * wanted


def test_whole_micro_batches_of_the_first_samples(tmp_path: Path) -> None:
    model = quantizing.build("llama", tmp_path / "model")
    length = MICRO_BATCH_TOKENS // 4
    for samples, wanted in ((1, [4]), (5, [4, 4]), (99, [4, 4, 2])):
        folder = tmp_path / f"{samples}"
        folder.mkdir()
        _, _, ends = measured(model, folder, samples, length, 10)
        with Workers(1) as workers:
            assert [len(one) for one in ends.behind(0, workers)] == wanted


def test_damaged_slopes_are_told(tmp_path: Path) -> None:
    model = quantizing.build("llama", tmp_path / "model")
    _, _, ends = measured(model, tmp_path, 1, 128)
    path = tmp_path / "ends" / "ends-0"
    path.write_bytes(b"\1" * path.stat().st_size)
    with Workers(1) as workers, pytest.raises(OSError, match=r"reads otherwise.*ends-0"):
        ends.behind(0, workers)


def test_groups_of_what_fits_a_device() -> None:
    widths = {Matrix(name, None): out for name, out in zip("abcd", (8, 16, 64, 8), strict=True)}
    names = [[one.parameter for one in group] for group in _groups(widths, 4 * (64 + 256))]
    assert names == [["a", "b"], ["c"], ["d"]]
    assert len(_groups(widths, None)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMED)
def test_all_models(name: str, tmp_path: Path) -> None:
    """Of all that can be calibrated: products of every matrix that reads each token once."""
    skeleton = streamed(name, tmp_path / "model")
    tokens = np.random.default_rng(1).integers(3, 90, (3, 24), dtype=np.int64)
    with workspace(tmp_path / "out", is_folder=True, nbytes=0, fresh=False) as space:
        kept = Workspace(tmp_path / "out", tmp_path, space.journal)
        ends = Ends.of(3, skeleton, tokens, 1, kept, 2, QUIET, None)
    stream, tracer = skeleton.embed(tokens), Tracer(stacked=True)
    with Workers(2) as workers:
        passage = Passage.of(stream, workers, None)
        for index in range(skeleton.count):
            block = skeleton.block(index)
            found = tracer.sites(block, stream)
            names = {name for site in found.sites for name in site.names}
            rows = Feedback(ends).of(block, passage, found, names)
            assert rows
            last: set[str] = set()
            for tensor, h in rows.items():
                if isinstance(h, RowFactor):
                    last.add(tensor)
                    continue
                assert h.shape == (len(block.weights[tensor]),) * 2
                assert np.allclose(h, h.T, rtol=1e-3, atol=1e-3 * float(np.abs(h).max()))
            experts = {n for site in found.sites if site.expert is not None for n in site.names}
            wanted = {name for name in experts if re.search(r"down|w2|output_linear", name)}
            # Of Step 3.7's experts no checkpoint tensor is all that reads what they are given.
            assert last == (set() if name == "step-3.7" else wanted)
            assert bool(wanted) is bool(experts)
            skeleton.advance(block, stream, workers)
