"""Runs that something comes between, and that go on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from qtool.errors import QtoolError
from qtool.messages.progress import Progress
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.quantizing.pipeline import run
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import Recipe, load
from qtool.runs.gguf_request import GgufRequest
from qtool.runs.request import Request
from qtool.workspaces.journal import Journal
from support.runs.quantizing import build, files, first_blocks_of_tiny, text_file

RTN, GPTQ, GGUF = "w4g128-rtn", "w4g128-gptq", "q4_k_m"
KEPT = "what is finished is kept"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, a text, and the outputs of runs that nothing came between."""
    root = tmp_path_factory.mktemp("root")
    text_file(root / "text.txt")
    build("llama", root / "model")
    first_blocks_of_tiny(root / "tiny", 2)
    for recipe in (RTN, GPTQ, GGUF):
        quantize(root, recipe, root / recipe)
    return root


def source_of(root: Path, recipe: str) -> Path:
    return root / ("tiny" if recipe == GGUF else "model")


def quantize(root: Path, recipe: str, out: Path, source: Path | None = None) -> None:
    model = source or source_of(root, recipe)
    sets = [f"calibration.source={root / 'text.txt'}", "calibration.samples=4"]
    sets += ["calibration.length=48"] + ([] if recipe == GGUF else ["weights.group_size=32"])
    loaded = load(recipe, sets)
    progress = Progress(quiet=True)
    if isinstance(loaded, Recipe):
        run(Request("m", model, loaded, out, None, 1, 1 << 30), progress)
    else:
        run_gguf(GgufRequest("m", model, loaded, out, 1), progress)


def load_gguf(name: str) -> GgufRecipe:
    recipe = load(name)
    assert isinstance(recipe, GgufRecipe)
    return recipe


def content(out: Path) -> object:
    return files(out) if out.is_dir() else out.read_bytes()


def after(steps: int, action: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Do something once a run has finished some steps."""
    commit, count = Journal.commit, 0

    def counted(journal: Journal, name: str, **what: object) -> None:
        nonlocal count
        commit(journal, name, **what)
        count += 1
        if count == steps:
            action()

    patch.setattr(Journal, "commit", counted)


def refused(root: Path, recipe: str, out: Path, source: Path | None = None) -> QtoolError:
    """The one sentence that a run ends with."""
    with pytest.raises(QtoolError) as error:
        quantize(root, recipe, out, source)
    assert not out.exists()
    assert "\n" not in str(error.value) and ".partial/" not in str(error.value)
    return error.value


def goes_on(root: Path, recipe: str, out: Path, source: Path | None = None) -> None:
    """The same command takes over what is finished and ends with the same bytes."""
    journal = out.with_name(f".{out.name}.partial") / "journal"
    assert b'"done"' in journal.read_bytes()
    quantize(root, recipe, out, source)
    assert content(out) == content(root / recipe)
    assert not journal.parent.exists()


def stop() -> None:
    raise KeyboardInterrupt
