"""Gradients by which rows compensate for others: measured, kept, damaged."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from qtool.blockwise.row_feedback import Feedback, _groups
from qtool.blockwise.row_rounding import RowFactor
from qtool.calibrating.placed import Passage
from qtool.calibrating.sites import Tracer
from qtool.gradients.block_gradients import Ends
from qtool.streaming.linears import Matrix
from qtool.streaming.skeleton import MICRO_BATCH_TOKENS
from qtool.streaming.workers import Workers
from qtool.workspaces.workspace import Workspace, workspace
from support.fitting.gradients_of_outputs import QUIET, measured
from support.gguf import gguf_models
from support.gguf.gguf_runs import STREAMED, streamed
from support.runs import quantizing

Vector = NDArray[np.float64]


def gradients_of(
    model: Path, tokens: NDArray[np.int64], last: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Of what comes behind the last block, given these gradients there: by every block's output and
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


def test_gradients_and_products_against_float64(tmp_path: Path) -> None:
    model = quantizing.build("llama", tmp_path / "model")
    skeleton, tokens, ends = measured(model, tmp_path)
    with Workers(2) as workers:
        last = ends.behind(skeleton.count - 1, workers)
        assert [one.shape[:2] for one in last] == [(2, 512)]  # a micro-batch
        wanted = gradients_of(model, tokens[:2], [*last])
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
    """An expert's gradients are those of all experts' sum, times its share of it; shares add up to
    one, so that H is as if one matrix gave the sum. Qwen's gate and up together have as many rows
    as states have; Llama 4 multiplies by all experts at once, of which routers zero
    what they read: each of the two of a token has the gradients of the sum."""
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
        wanted = gradients_of(model, tokens, [*ends.behind(skeleton.count - 1, workers)])
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
    """Their sum of squares is that of the drawn tokens' gradients in the mean: at each position,
    the trace of the Fisher information by what the last block gives."""
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


def test_damaged_gradients_are_told(tmp_path: Path) -> None:
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
