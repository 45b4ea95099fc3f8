"""`qtool calibrate` and `quantize --stats`: one measurement of the original serves many recipes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from qtool.artifacts.artifact import Artifact
from qtool.calibrating import placed, same_model
from qtool.calibrating.stats import SiteStats
from qtool.calibrating.stats_file import StatsFile
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.hub import tiny_folder
from qtool.streaming.skeleton import Skeleton
from qtool.transforms import awq, chain
from qtool.transforms.proved import Applied, Subject
from qtool.workspaces import workspace
from support.runs import quantizing
from support.runs.killed_named import Killed, killed_named
from support.runs.quantizing import Call

SMALL = ["--samples", "6", "--length", "64"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama/, other/ (the same with other weights), moe/, and text.txt."""
    folder = tmp_path_factory.mktemp("root")
    quantizing.build("llama", folder / "llama")
    quantizing.add_tokenizer(quantizing.arch_models.build("llama", folder / "other", seed=1))
    quantizing.build("qwen3_moe", folder / "moe")
    quantizing.text_file(folder / "text.txt")
    return folder


def calibrate(call: Call, root: Path, out: Path, *more: object, model: str = "llama") -> Path:
    text = root / "text.txt"
    said = call("calibrate", root / model, "-o", out, "--calibration", text, *SMALL, *more)
    assert said.status == 0, said.err
    return out


def quantize(call: Call, root: Path, recipe: str, stats: Path, out: Path, model: str = "llama"):
    group = ["--set", "weights.group_size=32"]
    group += ["--set", "awq.grid=4"] if "awq" in recipe else []
    return call("quantize", root / model, "--recipe", recipe, *group, "--stats", stats, "-o", out)


def test_it_measures_what_the_recipes_need(root: Path, tmp_path: Path, call: Call) -> None:
    vectors = calibrate(call, root, tmp_path / "vectors.safetensors")
    both = calibrate(
        call, root, tmp_path / "both.safetensors", "--recipe", "w4g128-awq", "--recipe",
        "w4g128-gptq",
    )  # fmt: skip
    assert both.stat().st_size > vectors.stat().st_size
    name = "model.layers.1.mlp.down_proj.weight"
    small = StatsFile.open(vectors).read(name, ["mean_abs", "max_abs"])
    large = StatsFile.open(both).read(name, ["gram", "mean_abs", "max_abs"])
    assert small.count == large.count == 6 * 64
    assert small.gram is None and large.gram is not None and large.gram.shape == (96, 96)
    assert small.mean_abs is not None and large.mean_abs is not None
    assert np.array_equal(small.mean_abs, large.mean_abs)


def test_the_numbers_are_those_of_the_whole_model(root: Path, tmp_path: Path, call: Call) -> None:
    """Against hooks on transformers' own model, over the same tokens."""
    from transformers import AutoModelForCausalLM

    from qtool.recipe.recipe import Calibration
    from qtool.texts.calibration import calibration_tokens

    out = calibrate(call, root, tmp_path / "s.safetensors", "--recipe", "w4g128-gptq")
    settings = Calibration(source=str(root / "text.txt"), samples=6, length=64)
    tokens = calibration_tokens(settings, root / "llama").tokens
    model = AutoModelForCausalLM.from_pretrained(root / "llama", dtype=torch.float32).eval()
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name:
            module.register_forward_hook(
                lambda _, given, __, name=name: seen.update({name: given[0].flatten(0, 1)})
            )
    with torch.no_grad():
        model(input_ids=torch.from_numpy(tokens))
    assert len(seen) == 21
    saved = StatsFile.open(out)
    for name, rows in seen.items():
        found = saved.read(f"{name}.weight", ["gram", "mean_abs", "max_abs"])
        x = rows.double().numpy()
        assert found.count == len(x)
        for ours, theirs in (
            (found.gram, x.T @ x),
            (found.mean_abs, np.abs(x).mean(0)),
            (found.max_abs, np.abs(x).max(0)),
        ):
            assert ours is not None
            assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max(), name


def test_json(root: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "s.safetensors"
    said = call("calibrate", root / "moe", "-o", out, "--calibration", root / "text.txt",
                "--samples", 1, "--length", 16, "--json")  # fmt: skip
    assert said.status == 0 and said.err == ""
    found = json.loads(said.out)
    assert found["stats"] == str(out) and found["needs"] == ["max_abs", "mean_abs"]
    assert found["tokens"] == 16 and found["size_bytes"] == out.stat().st_size
    assert found["unseen"] and all(".experts." in name for name in found["unseen"])


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("llama", "w4g128-awq"),
        pytest.param("llama", "w4g128-gptq", marks=pytest.mark.slow),
        pytest.param("moe", "w4g128-gptq", marks=pytest.mark.slow),
        ("moe", "w4g128-awq-gptq"),
    ],
)
def test_stats_are_used_and_nothing_is_collected(
    recipe: str, model: str, root: Path, tmp_path: Path, call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    stats = calibrate(call, root, tmp_path / "s", "--recipe", recipe, model=model)

    def collect(*_: object) -> None:
        raise AssertionError("collected, though statistics were given")

    monkeypatch.setattr(placed, "collect", collect)
    said = quantize(call, root, recipe, stats, tmp_path / "out", model)
    assert said.status == 0, said.err
    assert "not error-aware" in said.out
    record = json.loads((tmp_path / "out" / "qtool.json").read_text())
    assert record["calibration"]["error_aware"] is False
    assert record["calibration"]["samples"] == 6 and record["calibration"]["length"] == 64
    # Not what the recipe would have been calibrated with by itself.
    settings = record["recipe"]["calibration"]
    assert settings == {key: record["calibration"][key] for key in settings}
    assert any("not error-aware" in note for note in record["notes"])
    assert "not error-aware" in (tmp_path / "out" / "README.md").read_text()


def test_first_block_is_the_same_with_and_without_stats(
    root: Path, tmp_path: Path, call: Call
) -> None:
    """Nothing is quantized before it, so both see the same inputs; later blocks see other ones."""
    stats = calibrate(call, root, tmp_path / "s", "--recipe", "w4g128-gptq")
    assert quantize(call, root, "w4g128-gptq", stats, tmp_path / "saved").status == 0
    said = call("quantize", root / "llama", "--recipe", "w4g128-gptq", "--set",
                "weights.group_size=32", "--calibration", root / "text.txt", *SMALL,
                "-o", tmp_path / "fresh")  # fmt: skip
    assert said.status == 0
    saved, fresh = (Artifact.open(tmp_path / name) for name in ("saved", "fresh"))
    same = {
        name: np.array_equal(saved.read(name).codes, fresh.read(name).codes)
        for name, entry in saved.entries.items()
        if entry.scheme is not None
    }
    assert all(equal for name, equal in same.items() if ".layers.0." in name)
    assert not all(equal for name, equal in same.items() if ".layers.2." in name)


def test_a_missing_statistic_names_the_command(root: Path, tmp_path: Path, call: Call) -> None:
    stats = calibrate(call, root, tmp_path / "s")
    said = quantize(call, root, "w4g128-gptq", stats, tmp_path / "out")
    assert said.status == 1 and said.out == ""
    last = said.err.splitlines()[-1]
    assert last.startswith(f"error: {stats}: holds no gram for the input of 'model.layers.0.")
    assert "qtool calibrate MODEL -o STATS --recipe" in last
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]


def test_statistics_of_another_model_are_refused(root: Path, tmp_path: Path, call: Call) -> None:
    stats = calibrate(call, root, tmp_path / "s", "--recipe", "w4g128-gptq", model="other")
    said = quantize(call, root, "w4g128-gptq", stats, tmp_path / "out")
    assert said.status == 1
    assert "the statistics are of another model" in said.err and "qtool calibrate" in said.err
    assert not (tmp_path / "out").exists()


def test_what_is_no_statistics_file_is_refused(root: Path, tmp_path: Path, call: Call) -> None:
    for path in (root / "llama" / "model.safetensors", tmp_path / "missing"):
        said = quantize(call, root, "w4g128-gptq", path, tmp_path / "out")
        assert said.status == 1 and said.err.splitlines()[-1].startswith(f"error: {path}: ")
    assert not list(tmp_path.iterdir())


def test_statistics_without_use_are_said(root: Path, tmp_path: Path, call: Call) -> None:
    """A recipe that looks at no activations does not read the file, and says that."""
    stats = calibrate(call, root, tmp_path / "s")
    said = quantize(call, root, "w4g128-rtn", stats, tmp_path / "out")
    assert said.status == 0
    assert "--stats is not used: recipe w4g128-rtn looks at no activations" in said.err


@pytest.mark.parametrize(
    ("recipe", "sets", "why"),
    [
        ("w4g128-gptq-rotated", [], "and recipe w4g128-gptq-rotated rotates it"),
        ("kv-fp8", [], "holds nothing of keys and values"),
        ("w8a8-static", ["--set", "activations.observer=mse"], "holds no histograms"),
    ],
)
def test_what_statistics_cannot_serve(
    recipe: str, sets: list[str], why: str, root: Path, tmp_path: Path, call: Call
) -> None:
    """Told before anything is measured, and where they are given nevertheless."""
    if not sets:
        said = call("calibrate", root / "llama", "-o", tmp_path / "s", "--recipe", recipe)
        assert said.status == 2 and why in " ".join(said.err.split())
    stats = calibrate(call, root, tmp_path / "other")
    said = call("quantize", root / "llama", "--recipe", recipe, "--stats", stats, *sets,
                "--set", "indivisible=dense", "-o", tmp_path / "out")  # fmt: skip
    assert said.status == 1 and why in said.err and "run without --stats" in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_recipe_that_nothing_is_measured_for(root: Path, tmp_path: Path, call: Call) -> None:
    """It went unsaid, and `quantize --stats` had no file."""
    asked = ("--imatrix", tmp_path / "i.gguf", "--recipe", "w4g128-awq")
    said = call("calibrate", root / "llama", *asked)
    assert said.status == 2 and "recipe w4g128-awq takes statistics" in " ".join(said.err.split())
    assert not any(tmp_path.iterdir())


def test_an_existing_file_is_kept(root: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "s"
    out.write_text("mine")
    said = call("calibrate", root / "llama", "-o", out)
    assert (said.status, out.read_text()) == (1, "mine")
    assert said.err.startswith(f"error: {out}: exists")


@pytest.mark.parametrize("both", [False, True])
def test_killed_when_it_has_its_name_it_is_told_finished(
    both: bool, root: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats, imatrix = tmp_path / "s", tmp_path / "i.gguf"
    last = stats if both else imatrix
    words = ["calibrate", "tiny", "--imatrix", imatrix, *["-o", stats] * both]
    words += ["--calibration", root / "text.txt", "--samples", 1, "--length", 16]
    killed_named(lambda: call(*words), last)
    assert call(*words[:-1], 32).status == 1  # of other text
    other = shutil.copytree(tiny_folder(), root / f"other-{both}")
    (other / "model.safetensors").touch()  # a file of its own
    assert call("calibrate", other, *words[2:]).status == 1
    killed_named(lambda: [last.unlink(), imatrix.unlink(missing_ok=True), call(*words)], last)
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    monkeypatch.setattr("qtool.quantizing.calibrate.measure_block", None)
    said = call(*words)
    assert said.status == 0 and "it was finished already" in said.err
    lines = said.out.splitlines()
    assert lines[both].startswith(f"{imatrix}: importance of 28 tensors over 16 tokens")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == whole
    assert whole.keys() == {path.name for path in (stats, imatrix) if both or path == imatrix}
    assert "exists; remove it" in call(*words).err


def both(root: Path, folder: Path, samples: int = 1) -> tuple[list[object], Path, Path]:
    """A command that makes two files."""
    stats, imatrix = folder / "s", folder / "i.gguf"
    text = ["--calibration", root / "text.txt", "--samples", samples, "--length", 16]
    return ["calibrate", "tiny", "-o", stats, "--imatrix", imatrix, *text], stats, imatrix


def killed_before_the_last_name(
    work: Callable[[], object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(name, killed)
        patch.setattr(workspace, "remove", lambda folder: None)
        work()


@pytest.mark.parametrize("named", [True, False])
def test_killed_between_its_two_names_it_goes_on(
    named: bool, root: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, stats, imatrix = both(root, tmp_path)
    assert call(*words).status == 0
    whole = {path: path.read_bytes() for path in (stats, imatrix)}
    for path in whole:
        path.unlink()
    moment = "workspaces.naming.name" if named else "quantizing.calibrate.name_imatrix"
    killed_before_the_last_name(lambda: call(*words), f"qtool.{moment}", monkeypatch)
    assert (imatrix.exists(), stats.exists()) == (named, False)
    monkeypatch.setattr("qtool.quantizing.calibrate.measure_block", None)
    said = call(*words)
    assert said.status == 0, said.err
    assert "going on with an earlier run: all is measured" in said.err
    assert f"{imatrix}: importance of 28 tensors over 16 tokens" in said.out
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == whole


def test_what_was_killed_between_its_two_names_is_of_its_command_alone(
    root: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, stats, imatrix = both(root, tmp_path)
    killed_before_the_last_name(lambda: call(*words), "qtool.workspaces.naming.name", monkeypatch)
    made = imatrix.read_bytes()
    other = both(root, tmp_path, 2)[0]
    refused = call(*other).err
    assert f"error: {imatrix}: is of a run that was killed before {stats} had its name" in refused
    assert "calibration text: samples was 1, is 2" in refused
    assert (imatrix.read_bytes(), stats.exists()) == (made, False)
    imatrix.write_bytes(b"mine")
    assert f"error: {imatrix}: exists; remove it" in call(*words).err
    assert imatrix.read_bytes() == b"mine" and not stats.exists()
    imatrix.unlink()
    assert call(*other).status == 0  # which begins anew
    assert imatrix.read_bytes() != made and not [*tmp_path.glob(".*")]


def test_a_folder_is_no_name_and_codes_are_no_weights(
    root: Path, tmp_path: Path, call: Call
) -> None:
    """Nobody is told to remove the model, nor that a quantized one is incomplete."""
    said = call("calibrate", root / "llama", "-o", root / "llama")
    assert said.status == 1 and said.err.endswith("llama: is a folder; name the file to make\n")
    made = quantizing.quantize(root / "llama", "w4g128-rtn", tmp_path / "made",
                               "weights.group_size=32").out  # fmt: skip
    said = call("calibrate", made, "-o", tmp_path / "stats", *SMALL)
    assert said.status == 1 and "made: this checkpoint is quantized (model.layers.0" in said.err
    assert not (tmp_path / "stats").exists()


def test_a_failure_leaves_no_file(root: Path, tmp_path: Path, call: Call) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    out = tmp_path / "deep" / "s"
    said = call("calibrate", root / "llama", "-o", out, "--calibration", short)
    assert said.status == 1 and "has 9 tokens, enough for 0 samples" in said.err
    assert list(tmp_path.iterdir()) == [short]


def test_the_original_is_measured(root: Path, tmp_path: Path, call: Call) -> None:
    """With statistics from a file the probe that proves folds passes through original blocks."""
    stats = calibrate(call, root, tmp_path / "s", "--recipe", "w4g128-awq")
    seen: list[torch.Tensor] = []
    skeleton = Skeleton.open(Checkpoint.open(root / "llama"))
    apply = awq.apply

    def watch(subject: Subject, stats: dict[str, SiteStats]) -> Applied:
        seen.append(subject.stream.hidden[0].clone())
        return apply(subject, stats)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(chain.TRANSFORMS, "awq", watch)
        assert quantize(call, root, "w4g128-awq", stats, tmp_path / "out").status == 0
    hidden = seen[0]
    stream = skeleton.embed(same_model.probe(skeleton.checkpoint).tokens)
    assert torch.equal(hidden, stream.hidden[0])
    for index in range(2):
        hidden = skeleton.block(index).run(hidden, stream.calls[index][0])
        assert torch.equal(hidden, seen[index + 1])
