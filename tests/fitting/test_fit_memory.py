"""`qtool fit --max-ram`: fewer threads, the same recipe, or one sentence."""

import json
import re
from pathlib import Path

import pytest
import torch

from qtool import api
from qtool.errors import UnsupportedError
from qtool.fitting import fit as module
from qtool.gradients.passing import Passing
from qtool.planning.fitting import Fitting, memory, passing
from qtool.planning.shapes import Block, Input, Shapes, sensitivity_bytes
from qtool.recipe.file import Calibration
from qtool.streaming.workers import Workers
from support.fitting.fitting_runs import SMALL, tiny
from support.runs.quantizing import Call

__all__ = ["tiny"]

LONG = ("--samples", 4, "--length", 512)  # more micro-batches than threads


def shapes(width: int, experts: int = 0) -> Shapes:
    inputs = (Input(width, 0, 0.25 * experts),) if experts else ()
    block = Block(4 * 12 * width**2, 4 * width**2, 4 * width, inputs)
    return Shapes(
        calibrates=True, tokens=0, length=0, batch=0, hidden=width, vocabulary=1000,
        outside=2000 * width, quantized=0, blocks=(block,), grams=False, chained=False,
        solves=False, count=1,
    )  # fmt: skip


def estimated(width: int, threads: int, samples: int = 8, length: int = 512, **more: int) -> int:
    settings = Calibration(samples=samples, length=length)
    fitting = Fitting(passing(shapes(width, **more), settings), 0, 100)
    return memory(fitting, threads, None, chooses_only=False).estimated.nbytes


def test_what_memory_grows_with() -> None:
    """The block, threads, long samples and experts; not samples."""
    assert estimated(2048, 1) < estimated(2048, 2) < estimated(2048, 8)
    assert estimated(2048, 8) == estimated(2048, 16) == estimated(2048, 9)  # no more micro-batches
    assert estimated(2048, 2) == estimated(2048, 2, samples=64)
    assert estimated(2048, 2) < estimated(2048, 2, length=2048)
    assert estimated(2048, 2) < estimated(4096, 2)
    assert estimated(2048, 2) < estimated(2048, 2, experts=32)
    assert sensitivity_bytes([(10,), (20, 30), (4, 20, 30)]) == 8 * (50 + 4 * 50)


@pytest.mark.parametrize(("recipe", "bits"), [("q4_k_m", 4.5), ("w4a16-ct", 7.5)])
@pytest.mark.slow
def test_a_budget_is_kept_by_fewer_threads(
    recipe: str, bits: float, tiny: Path, tmp_path: Path, call: Call
) -> None:
    """The recipe is the same to the byte, and so are a budget's words and the JSON's."""
    types = ("--types", "4,8" if recipe == "w4a16-ct" else "q3_k,q5_k")
    asked = ("fit", tiny, "--recipe", recipe, "--bits", bits, *types, *LONG, "--threads", 3)
    free = call(*asked, "-o", tmp_path / "free.yaml", "--json")
    assert free.status == 0, free.err
    found = json.loads(free.out)["memory"]
    assert found["max_ram_bytes"] is None and found["threads"] == 3
    assert json.loads(free.out)["peak_rss_bytes"] > 0
    budget = found["estimated_bytes"] - 1
    kept = call(*asked, "--max-ram", budget, "-o", tmp_path / "kept.yaml")
    assert kept.status == 0, kept.err
    assert re.search(r"within \d+MiB: [12] threads?\n", kept.err)
    assert (tmp_path / "kept.yaml").read_bytes() == (tmp_path / "free.yaml").read_bytes()


def test_too_little_is_said_at_once(
    tiny: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the least that would do, which does; nothing is left."""
    monkeypatch.setattr(module, "workspace", None)
    asked = ("fit", tiny, "--recipe", "q4_k_m", "--bits", 5, *SMALL, "-o", tmp_path / "a.yaml")
    found = call(*asked, "--max-ram", "100MiB")
    assert found.status == 1 and found.err.count("\n") == 1
    assert found.err.startswith("error: --max-ram: 100MiB is too little for this model and recipe")
    assert not list(tmp_path.iterdir())
    least = re.search(r"the least that would do is (\d+MiB)", found.err)
    assert least is not None
    monkeypatch.undo()
    assert call(*asked, "--max-ram", least[1]).status == 0
    with pytest.raises(UnsupportedError, match="max_ram: 100MiB is too little"):
        api.fit(tiny, tmp_path / "b.yaml", "q4_k_m", bits=5, max_ram="100MiB")
    wrong = call(*asked[:-1], tmp_path / "b.yaml", "--max-ram", "much")
    assert wrong.status == 2 and "no size" in wrong.err


@pytest.mark.slow
def test_what_is_measured_already_takes_less(tiny: Path, tmp_path: Path, call: Call) -> None:
    asked = ("fit", tiny, "--recipe", "q4_k_m", "--costs", tmp_path / "costs.json", *LONG, "--json")
    first = call(*asked, "--bits", 5, "-o", tmp_path / "a.yaml")
    again = call(*asked, "--bits", 4, "-o", tmp_path / "b.yaml")
    one, other = (json.loads(found.out)["memory"]["estimated_bytes"] for found in (first, again))
    assert other < one


def test_states_pass_from_file_to_file(tmp_path: Path) -> None:
    states = Passing(tmp_path / "0")
    first = [torch.randn(2, 5, 3), torch.randn(1, 5, 3)]
    for one in first:
        states.append(one)
    assert len(states) == 2 and all(map(torch.equal, states, first))
    states.go_to(tmp_path / "1")
    states[1] = 2 * first[1]
    assert torch.equal(states[1], first[1])  # the others are read from there yet
    states[0] = 2 * first[0]
    states.turn()
    assert all(torch.equal(states[n], 2 * first[n]) for n in range(2))
    others = states.alike(tmp_path / "2")
    with Workers(1) as workers:
        assert not others.take(tmp_path / "none", states.sums, workers)
        assert not others.take(tmp_path / "0", states.sums, workers)  # whose sums are others
        assert not others.take(tmp_path / "1", states.sums[:1], workers)
        assert others.take(tmp_path / "1", states.sums, workers)
        assert torch.equal(others[1], 2 * first[1])
        with (tmp_path / "1").open("ab") as file:
            file.write(b"0")
        assert not others.take(tmp_path / "1", states.sums, workers)
