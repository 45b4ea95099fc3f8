"""The search for SmoothQuant's exponent: against errors that are really made, and of fresh text."""

import argparse
import inspect
import typing
from pathlib import Path

import numpy as np
import pytest
import torch

from qtool.calibrating.stats import SiteStats, collect, first_half
from qtool.hub import tiny_folder
from qtool.messages.progress import Progress
from qtool.quality.engine_inputs import activations
from qtool.quality.forward import forward
from qtool.quality.weights import open_weights
from qtool.recipe import recipe
from qtool.scheme import Scheme
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.workers import Workers
from qtool.transforms import smooth, smooth_search
from qtool.transforms.proved import Subject
from support.runs.quantizing import quantize
from support.transforms.loud_channels import opened

STATIC = ["weights.group_size=-1", "activations.dynamic=false", "transforms=[smooth]"]


def lost(block, readers, wanted, x: np.ndarray, scale: np.ndarray) -> float:
    """Squared error of the outputs with weights and inputs rounded as W8A8 has it, in float64."""
    total = 0.0
    for name in readers:
        weight = block.weights[name].numpy().astype(np.float64)
        scaled, inputs = weight * scale, x / scale
        by_row = np.abs(scaled).max(1, keepdims=True) / 127
        by_token = np.abs(inputs).max(1, keepdims=True) / 127
        rounded = np.rint(inputs / by_token) * by_token
        total += float(np.square(rounded @ (np.rint(scaled / by_row) * by_row).T
                                 - x @ weight.T).sum())  # fmt: skip
    return total


def test_the_search_looks_at_both_roundings(tmp_path: Path) -> None:
    """Against the error that inputs and weights together make on tokens it saw."""
    wanted, plan, block, found, stream = opened("llama", tmp_path, "smooth.alpha=search")
    with Workers(1) as workers:
        stats = collect(block, stream, found.sites, smooth.needs(wanted), workers)
        group = next(iter(found.fold_groups().values()))
        names = [name for site in group for name in site.names]
        inputs = smooth_search.sampled_inputs(block, stream, found.sites)
        (largest,) = smooth_search.levels(wanted, [stats[site.id] for site in group])
        top = smooth._max_weight(block, names)
        # Every row of the matrices, so that nothing is left to chance.
        measured = [
            smooth_search.Measured(block.weights[name].numpy(), plan.target(name), 1.0,
                            stats[group[0].id].gram, stats[group[0].id].count, inputs[group[0].id])
            for name in names
        ]  # fmt: skip
        x = np.concatenate(inputs[group[0].id]).astype(np.float64)
        alphas = [0.0, 0.3, 0.5, 0.7, 1.0]
        scales = [np.ones_like(largest), *(smooth.scales(largest, top, a) for a in alphas)]
        given = [smooth_search.cost(measured, wanted, [largest], [scale]) for scale in scales]
        exact = [lost(block, names, wanted, x, scale) * 256 / len(x) for scale in scales]
        result = smooth.apply(Subject(block, found, plan, wanted, stream, workers), stats)
    assert np.allclose(given, exact, rtol=0.2)
    assert given[0] > 5 * min(given)
    assert np.argmin(given) == np.argmin(exact)
    assert result.changed == set(found.fold_groups())


def static_lost(weight: np.ndarray, x: np.ndarray, scale: np.ndarray, largest: float) -> float:
    """Squared error of outputs for each token, one stored scale for inputs, in float64."""
    scaled, step = weight * scale, largest / 127
    by_row = np.abs(scaled).max(1, keepdims=True) / 127
    rounded = np.clip(np.rint(x / scale / step), -128, 127) * step
    off = rounded @ (np.rint(scaled / by_row) * by_row).T - x @ weight.T
    return float(np.square(off).sum() / len(x))


def test_stored_scales_are_judged_by_tokens_that_they_have_not_seen() -> None:
    """Inputs with long tails, as down_proj has them: what goes beyond the range is what counts."""
    random = np.random.default_rng(5)
    level = np.exp(0.5 * random.standard_normal(128))
    seen, fresh = (
        (random.standard_t(3, (count, 128)) * level).astype(np.float32) for count in (256, 8192)
    )
    weight = random.standard_normal((48, 128)).astype(np.float32)
    wanted = recipe.load("w8a8-dynamic", [*STATIC, "smooth.alpha=search"])
    halves = np.stack([np.abs(part).max(0) for part in (seen[:128], seen[128:])])
    stats = SiteStats(len(seen), max_abs=halves.max(0), halves=halves)
    levels = smooth_search.levels(wanted, [stats])
    assert len(levels) == 3
    scheme = Scheme(8, -1, True)
    gram = seen.T @ seen
    reader = smooth_search.Measured(weight, scheme, 1.0, gram, len(seen), (seen[:128], seen[128:]))
    top = np.abs(weight).max(0)
    alphas = np.linspace(0, 1, 11)
    made = [[smooth.scales(one, top, alpha) for one in levels] for alpha in alphas]
    crosswise = [smooth_search.cost([reader], wanted, levels, scales) for scales in made]
    by_itself = [smooth_search.cost([reader], wanted, levels[:1], scales[:1]) for scales in made]
    real = [static_lost(weight, fresh, one[0], float((levels[0] / one[0]).max())) for one in made]
    assert real[int(np.argmin(crosswise))] < 1.1 * min(real)
    assert real[int(np.argmin(by_itself))] > 1.5 * min(real)


def test_halves_are_of_whole_samples() -> None:
    assert [first_half(80, 2, number, 4) for number in range(4)] == [40] * 4
    assert [first_half(40, 1, number, 4) for number in range(4)] == [40, 0, 40, 0]
    assert first_half(5, 1, 0, 1) == 3
    assert first_half(96, 3, 0, 4) == 64


def log_probabilities(path: Path, tokens: np.ndarray) -> torch.Tensor:
    with open_weights(path) as weights:
        rounded = activations(weights, "plain")
        run = forward(Skeleton.open(weights), rounded, tokens, 1, Progress(quiet=True), keep=False)
        with run.logits() as head:
            return torch.log_softmax(head(run.hidden).double(), -1)


@pytest.mark.slow
def test_few_tokens_are_enough_for_stored_scales(tmp_path: Path) -> None:
    """On a trained model, and text of the same kind that the search has not seen."""
    (tmp_path / "text.txt").write_text(inspect.getsource(argparse), encoding="utf-8")
    model = tiny_folder()
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model).encode(inspect.getsource(typing))
    tokens = np.array(ids[: 2 * 256]).reshape(2, 256)
    given = [f"calibration.source={tmp_path / 'text.txt'}", "calibration.samples=2",
             "calibration.length=128"]  # fmt: skip
    exact = log_probabilities(model, tokens)
    lost = {}
    for alpha in ("search", "0.5"):
        run = quantize(model, "w8a8-smoothquant-static", tmp_path / alpha, *given,
                       f"smooth.alpha={alpha}", "smooth.grid=10")  # fmt: skip
        found = log_probabilities(run.out, tokens)
        lost[alpha] = float((exact.exp() * (exact - found)).sum(-1).mean())
    assert lost["search"] < lost["0.5"], lost
