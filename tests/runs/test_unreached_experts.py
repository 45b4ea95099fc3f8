"""Stored scales of inputs, of experts that no token of the calibration reached."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from qtool.blockwise.siblings import Siblings
from qtool.calibrating import groups, placed
from qtool.calibrating.stats import SiteStats
from support.models.pipeline_models import Models, models
from support.runs import quantizing
from support.runs.quantizing import Run

__all__ = ["models"]

SCALES = (".input_scale", ".input_global_scale")
Collect = Callable[..., dict[str, SiteStats]]


def without(collect: Collect, part: str) -> Collect:
    """What is collected, as if nothing had reached inputs with `part` in their names."""

    def collected(*given: Any, **more: Any) -> dict[str, SiteStats]:
        found = collect(*given, **more)
        return {name: SiteStats(0) if part in name else one for name, one in found.items()}

    return collected


def made(model: Path, recipe: str, out: Path, *sets: str) -> tuple[Run, dict[str, float]]:
    """A run, and its scales of inputs."""
    run = quantizing.quantize(model, recipe, out, *sets)
    stored = load_file(out / "model.safetensors")
    scales = {name: value for name, value in stored.items() if name.endswith(SCALES)}
    return run, {name: float(value) for name, value in scales.items()}


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])  # mixtral: w1 and w2 are two kinds
@pytest.mark.parametrize(
    ("recipe", "sets", "largest"),
    [
        ("fp8-static", (), max),
        ("w8a8-static", ("activations.observer=percentile",), max),
        ("nvfp4-w4a4", (), min),  # engines multiply by it
    ],
)
def test_an_expert_that_no_token_reached_has_its_siblings_scale(
    recipe: str, sets: tuple[str, ...], largest: Callable[..., float], name: str, models: Models,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    settings = [*(one for one in models.settings() if "group_size" not in one), *sets]
    monkeypatch.setattr(placed, "collect", without(placed.collect, ".experts.1."))
    run, together = made(models(name), recipe, tmp_path / "a", *settings)
    (note,) = [note for note in run.summary.notes if "expert" in note]
    never = [report.tokens.count(0) for report in run.summary.experts]
    assert all(never)
    assert (
        f"; {sum(never)} saw none, and have input scales for the largest that other experts" in note
    )
    assert "rounded to nearest" not in note  # all are
    for key, scale in together.items():
        block, apart, rest = key.partition(".experts.1.")
        if apart:
            layer = key.split(".")[:3]
            (where,) = [one for one in run.summary.experts if one.name.split(".")[:3] == layer]
            others = [number for number, tokens in enumerate(where.tokens) if tokens]
            siblings = [together[f"{block}.experts.{other}.{rest}"] for other in others]
            if sets:  # the share of all that siblings read
                assert min(siblings) <= scale <= max(siblings)
            else:
                assert scale == largest(siblings)
    of_all = groups.groups_of
    monkeypatch.setattr(groups, "groups_of", lambda sites, _: of_all(sites, 1))
    _, apart_too = made(models(name), recipe, tmp_path / "b", *settings)
    assert apart_too == together


def test_experts_that_are_modules_of_their_own_have_siblings_by_name() -> None:
    """Of a matrix that no call was seen to read nothing else is known; of other layers nothing."""
    ids = [f"model.layers.0.mlp.experts.{n}.up_proj.weight" for n in range(3)]
    sites: list[Any] = [SimpleNamespace(id=name, expert=None, producer=None) for name in ids[:2]]
    tops = {name: SiteStats(9, max_abs=np.float32([n, 5])) for n, name in enumerate(ids[:2])}
    down, dense = ids[2].replace("up_proj", "down_proj"), "model.layers.0.mlp.up_proj.weight"
    found = Siblings(sites).filled(tops, [ids[2], down, dense], lambda _: {})
    assert found.keys() == {*ids} and found[ids[2]].count == 0
    top = found[ids[2]].max_abs
    assert top is not None and top.tolist() == [1, 5]


def test_shared_experts_are_no_siblings_of_one_another() -> None:
    """Every token passes all of them, so that one that is not read is none that others tell of."""
    ids = [f"model.layers.0.mlp.shared_experts.{n}.up_proj.weight" for n in range(3)]
    sites: list[Any] = [SimpleNamespace(id=name, expert=None, producer=None) for name in ids[:2]]
    seen = {ids[0]: SiteStats(9, max_abs=np.float32([1, 5])), ids[1]: SiteStats(0)}
    assert Siblings(sites).filled(seen, [ids[2]], lambda _: {}) == seen


def test_scales_that_siblings_alone_were_given_count_for_them_alone() -> None:
    """As of up and down of an expert, which its siblings' scales leave as they are."""
    ids = [f"model.layers.0.mlp.experts.{n}.down_proj.weight" for n in range(3)]
    sites: list[Any] = [SimpleNamespace(id=name, expert=None, producer=None) for name in ids]
    histogram = np.ones(4, np.int64)
    stats = {
        name: SiteStats(9, max_abs=np.float32([n, 5]), histogram=histogram)
        for n, name in enumerate(ids[:2])
    }
    stats[ids[2]] = SiteStats(0)
    siblings = Siblings(sites)
    siblings.transforming(stats)
    folded = replace(stats[ids[1]], max_abs=np.float32([0.25, 0.5]))
    found = siblings.filled({**stats, ids[1]: folded}, (), lambda _: {})
    assert found[ids[1]] is folded
    top = found[ids[2]].max_abs
    assert top is not None and top.tolist() == [1, 5] and found[ids[2]].histogram is None
