"""Runs of small models that die and go on."""

from pathlib import Path

import pytest

from qtool.messages.progress import Progress
from qtool.messages.summary import Summary
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.quantizing.pipeline import run
from qtool.recipe.recipe import Recipe, load
from qtool.runs.gguf_request import GgufRequest
from qtool.runs.request import Request
from support.runs.killed_runs import Died, dying
from support.runs.quantizing import build, files, first_blocks_of_tiny, text_file

SMALL = ["calibration.samples=4", "calibration.length=48"]
GGUF = ["q4_k_m", "iq2_xs"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_file(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks of it."""
    return first_blocks_of_tiny(tmp_path_factory.mktemp("tiny") / "model", 2)


def quantize(
    model: Path, recipe: str, out: Path, text: Path, *, fresh: bool = False, threads: int = 2
) -> Summary:
    sets = [f"calibration.source={text}", *SMALL]
    if recipe.startswith("w"):
        sets.append("weights.group_size=32")
    if "awq" in recipe:
        sets.append("awq.grid=4")
    if "awq-gptq" in recipe:  # gradients are steps of their own: test_row_feedback_runs.py
        sets.append("gptq.yaqa=0")
    if "tune" in recipe:
        sets.append("tune.steps=3")
    loaded = load(recipe, sets)
    progress = Progress(quiet=True)
    if isinstance(loaded, Recipe):
        request = Request(str(model), model, loaded, out, None, threads, 1 << 30, fresh)
        return run(request, progress)
    return run_gguf(GgufRequest(str(model), model, loaded, out, threads, fresh=fresh), progress)


def content(out: Path) -> dict[str, bytes] | bytes:
    return files(out) if out.is_dir() else out.read_bytes()


def died(
    model: Path, recipe: str, out: Path, text: Path, after: int, patch: pytest.MonkeyPatch
) -> Path:
    """A run that died after some steps; its hidden folder."""
    with patch.context() as patched, pytest.raises(Died):
        dying(after, patched)
        quantize(model, recipe, out, text, threads=1)
    return out.with_name(f".{out.name}.partial")
