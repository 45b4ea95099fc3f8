"""--max-ram: what is chosen for a budget, that no byte depends on it, and what does not fit."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qtool.blockwise import run as blockwise
from qtool.calibrating import placed
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cli.main import app
from qtool.errors import UnsupportedError
from qtool.messages.progress import Progress
from qtool.messages.summary import Summary
from qtool.planning import budget, estimate, shapes
from qtool.planning.peak import Peak
from qtool.planning.plan import Plan, make_plan
from qtool.planning.shapes import GRAM_BYTES, Setting
from qtool.quantizing import pipeline
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe.recipe import load
from qtool.runs.gguf_request import GgufRequest
from qtool.streaming.hidden import OnDisk
from qtool.workspaces.journal import Journal
from support.models import header_files
from support.planning.no_process import no_process
from support.runs import quantizing
from support.runs.killed_runs import Died
from support.runs.models_and_text import root

__all__ = ["no_process", "root"]

SETS = (
    "weights.group_size=32",
    "calibration.samples=9",
    "calibration.length=500",
    "awq.grid=6",
)
MUCH = 1 << 40


def least(recipe: str, model: Path, threads: int, *sets: str) -> int:
    """The smallest budget, in bytes, as the refusal of a smaller one names it."""
    with pytest.raises(UnsupportedError) as refusal:
        make_plan(load(recipe, sets), Checkpoint.open(model), threads=threads, max_ram=1)
    found = re.search(r"the least that would do is (\d+)MiB; most of it is for", str(refusal.value))
    assert found, refusal.value
    return int(found[1]) << 20


def run(
    model: Path, recipe: str, text: Path, out: Path, threads: int, max_ram: int | None
) -> Summary:
    few = ["tune.steps=3", "awq.grid=2"] if "tune" in recipe else []
    loaded = load(recipe, [*SETS, *few, f"calibration.source={text}"])
    request = pipeline.Request(
        str(model), model, loaded, out, None, threads, 10**9, max_ram=max_ram
    )
    return pipeline.run(request, Progress(quiet=True))


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        pytest.param("llama", "w4g128-gptq", marks=pytest.mark.slow),
        pytest.param("llama", "w4g128-awq", marks=pytest.mark.slow),
        ("moe", "w4g128-gptq"),
        pytest.param("llama", "w4g128-awq-gptq-tune", marks=pytest.mark.slow),
    ],
)
def test_no_byte_depends_on_the_budget(
    name: str, recipe: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    on_disk: list[bool] = []
    collect = placed.collect

    def counted(block: Any, stream: Any, *rest: Any, **more: Any) -> Any:
        passes.append(block.index)
        on_disk.append(isinstance(stream.hidden, OnDisk))
        return collect(block, stream, *rest, **more)

    monkeypatch.setattr(placed, "collect", counted)
    text = root / "text.txt"
    plain = run(root / name, recipe, text, tmp_path / "a", 2, None)
    assert plain.memory["threads"] == 2 and plain.memory["max_ram_bytes"] is None
    assert not any(on_disk) and len(passes) == len(set(passes))
    # Every lever at once; budgets this small cannot be told in whole MiB.
    rooms = (one for one in budget.settings(_shapes(root / name, recipe, text), 1))
    smallest = min(rooms, key=lambda one: (one.gram_bytes, not one.states_on_disk))
    monkeypatch.setattr(budget, "settings", lambda *_: [smallest])
    passes.clear()
    on_disk.clear()
    small = run(root / name, recipe, text, tmp_path / "b", 2, MUCH)
    assert small.memory["threads"] == 1 and small.memory["states_on_disk"] and all(on_disk)
    if recipe == "w4g128-gptq":
        assert small.memory["gram_bytes"] < GRAM_BYTES and len(passes) > len(set(passes))
    assert quantizing.files(tmp_path / "a") == quantizing.files(tmp_path / "b")
    assert small.layers == plain.layers and small.experts == plain.experts


def _shapes(model: Path, recipe: str, text: Path) -> shapes.Shapes:
    loaded = load(recipe, [*SETS, f"calibration.source={text}"])
    return shapes.shapes_of(loaded, make_plan(loaded, Checkpoint.open(model)).tensors)


def test_importance_does_not_depend_on_it_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load("q4_k_m", ["importance=true", "calibration.samples=3", "calibration.length=1024"])
    model = quantizing.first_blocks_of_tiny(tmp_path / "model", 2)
    requests = [
        GgufRequest("tiny", model, loaded, tmp_path / f"{ram}.gguf", 2, max_ram=ram)
        for ram in (None, MUCH)
    ]
    first = run_gguf(requests[0], Progress(quiet=True))
    monkeypatch.setattr(budget, "settings", lambda *_: [Setting(1, True)])
    second = run_gguf(requests[1], Progress(quiet=True))
    assert not first.memory["states_on_disk"] and second.memory["states_on_disk"]
    assert requests[0].artifact.read_bytes() == requests[1].artifact.read_bytes()


@pytest.mark.parametrize("first", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_goes_on_with_another_budget(
    first: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try gets a step further, with hidden states on the disk and in memory in turn."""
    text = root / "text.txt"
    run(root / "llama", "w4g128-gptq", text, tmp_path / "whole", 2, None)
    commit, taken = Journal.commit, blockwise.take_up
    on_disk = first
    resumed: list[tuple[bool, bool]] = []
    steps = 0

    def one_step(journal: Journal, name: str, **content: object) -> None:
        nonlocal steps
        if steps == 1:
            raise Died
        commit(journal, name, **content)
        steps += 1

    def watched(folder: Path, index: int, kept: Any, stream: Any, workers: Any) -> bool:
        found = taken(folder, index, kept, stream, workers)
        resumed.append((isinstance(stream.hidden, OnDisk), found))
        return found

    monkeypatch.setattr(Journal, "commit", one_step)
    monkeypatch.setattr(blockwise, "take_up", watched)
    monkeypatch.setattr(budget, "settings", lambda *_: [Setting(1, on_disk)])
    out = tmp_path / "out"
    for _ in range(9):
        steps = 0
        with suppress(Died):
            run(root / "llama", "w4g128-gptq", text, out, 2, MUCH)
            break
        on_disk = not on_disk
    assert quantizing.files(out) == quantizing.files(tmp_path / "whole")
    assert set(resumed) == {(True, True), (False, True)}


def plan(folder: Path, recipe: str, threads: int, max_ram: int | None) -> Plan:
    if not folder.exists():
        header_files.write(folder, header_files.llama(hidden=2048, inner=8192))
    return make_plan(load(recipe), Checkpoint.open(folder), threads=threads, max_ram=max_ram)


@pytest.mark.parametrize("recipe", ["w4g128-gptq", "w4g128-awq"])
def test_the_cheapest_that_fits_is_chosen(recipe: str, tmp_path: Path) -> None:
    """Less memory never costs less time, and the estimate is within the budget."""
    free = plan(tmp_path / "m", recipe, 16, None)
    assert (
        plan(tmp_path / "m", recipe, 16, MUCH).memory.setting == free.memory.setting == Setting(16)
    )
    smallest = least(recipe, tmp_path / "m", 16)
    seen = []
    for step in range(9):
        ram = free.peak_rss_bytes - (free.peak_rss_bytes - smallest) * step // 8
        found = plan(tmp_path / "m", recipe, 16, max(ram, smallest))
        assert found.peak_rss_bytes <= max(ram, smallest)
        assert found.seconds >= free.seconds
        assert found.memory.json()["max_ram_bytes"] == max(ram, smallest)
        seen.append(found.memory.setting)
    states = free.memory.disk_bytes // 2
    assert plan(tmp_path / "m", recipe, 16, free.peak_rss_bytes - states // 2).memory.setting == (
        Setting(16, states_on_disk=True)
    )
    assert seen[-1].threads < 16 and seen[-1].states_on_disk
    with pytest.raises(UnsupportedError, match="is too little for this model"):
        plan(tmp_path / "m", recipe, 16, smallest - (1 << 20))


def test_gram_matrices_in_turns_before_fewer_threads(tmp_path: Path) -> None:
    header_files.write(tmp_path / "m", header_files.experts(1, 64))
    checkpoint = Checkpoint.open(tmp_path / "m")
    counted = shapes.shapes_of(
        load("w4g128-gptq"), make_plan(load("w4g128-gptq"), checkpoint).tensors
    )
    offered = list(budget.settings(counted, 2))
    assert offered[:2] == [Setting(2), Setting(2, True)]
    rooms = [one.gram_bytes for one in offered if one.threads == 2 and one.states_on_disk]
    assert rooms == sorted(rooms, reverse=True) and len(rooms) > 2
    assert [one.threads for one in offered] == sorted((o.threads for o in offered), reverse=True)
    peaks = [estimate.peak(counted, Setting(2, True, room)).nbytes for room in rooms]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0]


def test_the_refusal_names_what_would_do() -> None:
    def estimated(setting: Setting) -> Peak:
        return Peak(setting.threads * 10_000_000, "a block")

    assert budget.choose(None, 3, 29_999_999, estimated).setting == Setting(2)
    with pytest.raises(UnsupportedError) as refusal:
        budget.choose(None, 3, 9_000_000, estimated)
    assert str(refusal.value) == (
        "--max-ram: 9,000,000 bytes is too little for this model and recipe, the least that would "
        "do is 10MiB; most of it is for a block"
    )
    with pytest.raises(UnsupportedError, match=r"^--max-ram: 8MiB is too little"):
        budget.choose(None, 3, 8 << 20, estimated)
    assert budget.choose(None, 3, 10 << 20, estimated).setting == Setting(1)


def test_plan_says_what_quantize_will_do(root: Path, tmp_path: Path) -> None:
    words = [str(root / "llama"), "--recipe", "w4g128-gptq", "--threads", "2", "--max-ram", "1GiB"]
    words += ["--samples", "2", "--length", "64", "--set", "weights.group_size=32", "--json"]
    planned = CliRunner().invoke(app, ["plan", *words])
    assert planned.exit_code == 0, planned.output
    words += ["--calibration", str(root / "text.txt"), "-o", str(tmp_path / "out")]
    made = CliRunner().invoke(app, ["quantize", *words])
    assert made.exit_code == 0, made.output
    memory = json.loads(planned.stdout)["memory"]
    assert memory == json.loads(made.stdout)["memory"]
    assert memory["max_ram_bytes"] == 1 << 30 and memory["threads"] == 2


def test_nothing_is_begun_that_does_not_fit(tmp_path: Path) -> None:
    for recipe in ("w4g128-gptq", "q4_k_m"):
        words = ["quantize", "tiny", "--recipe", recipe, "--max-ram", "1kB", "-o"]
        result = CliRunner().invoke(app, [*words, str(tmp_path / "out")])
        assert result.exit_code != 0
        assert isinstance(result.exception, UnsupportedError)
        assert str(result.exception).startswith("--max-ram: 1,000 bytes is too little")
        assert list(tmp_path.iterdir()) == []


def test_states_count_among_what_the_disk_must_hold(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "qtool.workspaces.workspace.check_space", lambda _, nbytes: asked.append(nbytes)
    )
    summary = run(root / "llama", "w4g128-gptq", root / "text.txt", tmp_path / "out", 1, None)
    states = 2 * 4 * 9 * 500 * 64
    assert summary.memory["disk_bytes"] == states
    assert summary.size_bytes + states - 10_000 < asked[0] <= summary.size_bytes + states
