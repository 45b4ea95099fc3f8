"""The same inputs give the same bytes, whatever the threads, the folders' names and the time."""

import shutil
from pathlib import Path

import pytest

from support.runs import quantizing
from support.runs.models_and_text import root

__all__ = ["root"]

TUNED = "w4g128-awq-gptq-tune"
RECIPES = ("w4g128-awq", "w4g128-gptq", "w4g128-awq-gptq", TUNED, "w4g128-rtn")
USUAL = ("w4g128-awq-gptq", "w4g128-rtn")  # the first does what others do, but for tuning


def made(
    model: Path, recipe: str, text: Path, out: Path, threads: int, shard: int = 10**9
) -> dict[str, bytes]:
    """Every file of the artifact. Enough tokens for several micro-batches, the last one short."""
    sets = [
        "weights.group_size=32",
        f"calibration.source={text}",
        "calibration.samples=9",
        "calibration.length=500",
        "awq.grid=6",
        *(["tune.steps=3"] if recipe == TUNED else []),
        *(["gptq.yaqa=4"] if "awq-gptq" in recipe else []),
    ]
    run = quantizing.quantize(model, recipe, out, *sets, threads=threads, max_shard_bytes=shard)
    assert out.is_dir() and run.summary.tensors["quantized"]
    return quantizing.files(out)


def assert_equal(found: dict[str, bytes], expected: dict[str, bytes]) -> None:
    assert found.keys() == expected.keys()
    assert {"README.md", "config.json", "model.safetensors", "qtool.json"} <= found.keys()
    for name in expected:
        assert found[name] == expected[name], name


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(one, marks=[] if one in USUAL else [pytest.mark.slow]) for one in RECIPES],
)
def test_threads_and_names_change_no_byte(recipe: str, root: Path, tmp_path: Path) -> None:
    first = made(root / "llama", recipe, root / "text.txt", tmp_path / "a", 1)
    # Another source folder, another text file of the same content, another OUT, more threads.
    elsewhere = tmp_path / "else where" / "my-model"
    shutil.copytree(root / "llama", elsewhere)
    text = shutil.copy(root / "text.txt", tmp_path / "other.txt")
    out = tmp_path / "deep" / "b"
    assert_equal(made(elsewhere, recipe, Path(text), out, 3), first)
    blob = b"".join(first.values())
    for word in (str(tmp_path), str(root), "else where", "my-model", "other.txt"):
        assert word.encode() not in blob, word


@pytest.mark.parametrize("recipe", ["w4g128-awq-gptq"])
def test_threads_change_no_byte_of_a_mixture_of_experts(
    recipe: str, root: Path, tmp_path: Path
) -> None:
    first = made(root / "moe", recipe, root / "text.txt", tmp_path / "a", 1)
    assert_equal(made(root / "moe", recipe, root / "text.txt", tmp_path / "b", 3), first)


def test_what_should_change_the_bytes_does(root: Path, tmp_path: Path) -> None:
    """The comparison above could not fail if nothing mattered."""
    first = made(root / "llama", "w4g128-gptq", root / "text.txt", tmp_path / "a", 2)
    other_text = quantizing.text_file(tmp_path / "text.txt", seed=1)
    second = made(root / "llama", "w4g128-gptq", other_text, tmp_path / "b", 2)
    differing = {name for name in first if first[name] != second[name]}
    assert differing == {"model.safetensors", "qtool.json", "README.md"}


def test_statistics_files_are_the_same_bytes(root: Path, tmp_path: Path) -> None:
    from qtool.checkpoints.checkpoint import Checkpoint
    from qtool.messages.progress import Progress
    from qtool.quantizing.calibrate import calibrate
    from qtool.recipe.recipe import Calibration

    settings = Calibration(source=str(root / "text.txt"), samples=9, length=500)
    needs = frozenset({"gram", "mean_abs", "max_abs"})
    files = []
    for threads in (1, 3):
        out = tmp_path / f"{threads}.safetensors"
        checkpoint = Checkpoint.open(root / "llama")
        calibrate(checkpoint, out, settings, needs, threads, Progress(quiet=True))
        files.append(out.read_bytes())
    assert files[0] == files[1]
