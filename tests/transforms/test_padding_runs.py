"""Runs of recipes that pad, what is planned, and what `verify` says of them."""

import json
import signal
from pathlib import Path

import pytest

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.padding import padded
from qtool.diff.diff import diff
from qtool.errors import RecipeError
from qtool.formats.gguf_file import GgufFile
from qtool.hub import tiny_folder
from qtool.messages.progress import Progress
from qtool.recipe.recipe import load, parse
from qtool.verification.run import verify_artifact
from support.runs import quantizing
from support.runs.quantizing import Call

DENSE = "method: none\nformat: dense\npad_intermediate: 512\n"


def test_a_dense_artifact_is_the_padded_checkpoint(tmp_path: Path, call: Call) -> None:
    recipe = tmp_path / "wide.yaml"
    recipe.write_text(DENSE)
    out = tmp_path / "out"
    assert call("quantize", "tiny", "--recipe", recipe, "-o", out).status == 0
    view = padded(Checkpoint.open(tiny_folder()), 512)
    made = Checkpoint.open(out)
    assert made.config["intermediate_size"] == 1024
    assert {n: i.shape for n, i in made.tensors.items()} == {
        n: i.shape for n, i in view.tensors.items()
    }
    assert all((made.raw(name) == view.raw(name)).all() for name in made.tensors)
    record = json.loads((out / "qtool.json").read_text())
    assert record["recipe"]["pad_intermediate"] == 512
    verdict = verify_artifact(out, against=tiny_folder())
    assert [one.message for one in verdict.findings if one.severity != "note"] == []
    (out / "qtool.json").unlink()  # as of another tool: config.json tells
    verdict = verify_artifact(out, against=tiny_folder())
    assert [one.message for one in verdict.findings if one.severity == "error"] == []
    found = diff(tiny_folder(), out, Progress(quiet=True))
    assert found.same == len(made.tensors)
    assert ("intermediate_size", 768, 1024) in found.metadata


def test_codes_of_what_was_there_are_the_same(tmp_path: Path, call: Call) -> None:
    """Round to nearest sees groups, and those of zeros are beside the others."""
    runs = {}
    for multiple in (0, 512):
        out = tmp_path / str(multiple)
        pad = f"--set=pad_intermediate={multiple}"
        assert call("quantize", "tiny", "--recipe", "w4g128-rtn", "-o", out, pad).status == 0
        runs[multiple] = Checkpoint.open(out)
    down = "model.layers.1.mlp.down_proj"
    for part in ("qweight", "qzeros", "scales"):
        narrow, wide = (run.array(f"{down}.{part}") for run in runs.values())
        assert wide.shape[0] * 3 == narrow.shape[0] * 4  # stored [in, out]
        assert (wide[: narrow.shape[0]] == narrow).all()


def test_gguf_gets_whole_blocks(tmp_path: Path, call: Call) -> None:
    files = {}
    for multiple in (0, 512):
        out = tmp_path / f"{multiple}.gguf"
        pad = f"--set=pad_intermediate={multiple}"
        assert call("quantize", "tiny", "--recipe", "q4_k_s", "-o", out, pad).status == 0
        files[multiple] = GgufFile.open(out)
    narrow, wide = files[0], files[512]
    assert wide.metadata["llama.feed_forward_length"].value == 1024
    for name, info in narrow.tensors.items():
        rows, more = (
            file.read_rows(name, 0, info.rows).reshape(info.rows, -1) for file in (narrow, wide)
        )
        assert (more[:, : rows.shape[1]] == rows).all()
        assert (more.shape[1] > rows.shape[1]) == ("ffn_down" in name)
    assert wide.tensors["blk.0.ffn_up.weight"].shape == (1024, 256)


def test_what_a_recipe_makes_of_it_serves_as_well(tmp_path: Path, call: Call) -> None:
    """GPTQ's sums have rows of zeros; the forward pass is that of wider layers."""
    text = quantizing.text_file(tmp_path / "text.txt")
    found = []
    for multiple in (0, 512):
        out = tmp_path / str(multiple)
        sets = [f"--set=pad_intermediate={multiple}", "--samples=4", "--length=128"]
        sets += [f"--calibration={text}", f"--out={out}"]
        assert call("quantize", "tiny", "--recipe", "w3g128-awq-gptq", *sets).status == 0
        asked = ("--against", "tiny", "--text", text, "--windows", 2, "--json")
        found.append(json.loads(call("eval", out, *asked).out)["kld"]["mean"])
    assert found[1] == pytest.approx(found[0], rel=0.1)


@pytest.mark.parametrize("recipe", ["w4g128-awq", "q4_k_m"])
def test_a_plan_says_what_grows(recipe: str, call: Call) -> None:
    said = call("plan", "tiny", "--recipe", recipe, "--set", "pad_intermediate=512").out
    assert "note: padded with zeros: intermediate_size 768 -> 1024; 21.4% more weights" in said


def test_where_it_cannot_be_done(tmp_path: Path, call: Call) -> None:
    """Statistics and importance of narrower inputs; GGUF files."""
    gguf = tmp_path / "tiny.gguf"
    assert call("quantize", "tiny", "--recipe", "bf16", "-o", gguf).status == 0
    for asked, said in (
        ((gguf, "--recipe", "q4_k_m"), "has pad_intermediate (512), done to Hugging Face"),
        (("tiny", "--recipe", "iq3_xxs", "--imatrix", gguf), "which changes what matrices read"),
        (("tiny", "--recipe", "w4g128-awq", "--stats", gguf), "pads its widths (512); run without"),
    ):
        found = call("quantize", *asked, "--set", "pad_intermediate=512", "-o", tmp_path / "out")
        assert found.status == 1 and said in found.err


def test_a_recipe_that_pads_nothing_is_recorded_as_ever() -> None:
    recipe = parse(DENSE.replace("512", "0"), "x", "x")
    assert "pad_intermediate" not in recipe.effective()
    assert parse(DENSE, "x", "x").effective()["pad_intermediate"] == 512


@pytest.mark.parametrize("recipe", ["q4_k_m", "w4g128-rtn"])
def test_verify_pads_the_source_of_what_others_made(
    recipe: str, tmp_path: Path, call: Call
) -> None:
    """Made of a padded checkpoint, so that nothing but the widths says so."""
    dense, out = tmp_path / "dense", tmp_path / ("a.gguf" if recipe == "q4_k_m" else "a")
    (tmp_path / "wide.yaml").write_text(DENSE)
    assert call("quantize", "tiny", "--recipe", tmp_path / "wide.yaml", "-o", dense).status == 0
    assert call("quantize", dense, "--recipe", recipe, "-o", out).status == 0
    for artifact in (out, dense):
        verdict = verify_artifact(artifact, against=tiny_folder())
        assert [one.message for one in verdict.findings if one.severity == "error"] == []
        assert len(verdict.layers) == (0 if artifact == dense else 28 + (recipe == "q4_k_m"))
    said = call("diff", tiny_folder(), dense).out
    assert "dense, padded like the other" in said


def test_verify_does_not_take_zeros_for_damage(tmp_path: Path, call: Call) -> None:
    """Most of the layer: 3328 of 4096 rows; and codes of zeros in long stretches."""
    for recipe, multiple in (("w4g128-rtn", 4096), ("w4a8kv4-qserve", 1280)):
        out = tmp_path / recipe
        asked = ("--recipe", recipe, "--set", f"pad_intermediate={multiple}", "-o", out)
        text = () if recipe == "w4g128-rtn" else ("--samples", 4, "--length", 64)
        made = call("quantize", "tiny", *asked, *text)
        assert made.status == 0
        if text:
            assert "input channels are always zero, those of padding among them" in made.out
        found = verify_artifact(out, against=tiny_folder()).findings
        assert [one.message for one in found if one.severity != "note"] == []


def test_of_a_gguf_file_made_into_a_folder(tmp_path: Path, call: Call) -> None:
    """The source cannot be padded to compare with; that is said, and nothing is called wrong."""
    gguf, out = tmp_path / "tiny.gguf", tmp_path / "out"
    assert call("quantize", "tiny", "--recipe", "bf16", "-o", gguf).status == 0
    pad = ("--set", "pad_intermediate=512")
    assert call("quantize", gguf, "--recipe", "w4g128-rtn", *pad, "-o", out).status == 0
    verdict = verify_artifact(out, against=gguf)
    assert [one.message for one in verdict.findings if one.severity == "error"] == []
    assert "they are not compared; give the folder" in str(verdict.findings)
    whole = verify_artifact(out, against=tiny_folder())
    assert len(whole.layers) == 28 and whole.ok


def test_a_run_that_was_begun_with_another_multiple(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe is what differs; config.json of the source never said the width."""
    from qtool.workspaces.journal import Journal

    commit = Journal.commit

    def ending(self: Journal, name: str, **content: object) -> None:
        commit(self, name, **content)
        signal.raise_signal(signal.SIGTERM)

    out = tmp_path / "out"
    asked = ("quantize", "tiny", "--recipe", "w4g128-rtn", "-o", out)
    monkeypatch.setattr(Journal, "commit", ending)
    assert call(*asked, "--set", "pad_intermediate=512").status == 143
    monkeypatch.setattr(Journal, "commit", commit)
    said = call(*asked).err
    assert "pad_intermediate" in said and "config.json" not in said
    assert call(*asked, "--set", "pad_intermediate=512").status == 0
    assert verify_artifact(out, against=tiny_folder()).ok


def test_gguf_wants_whole_blocks() -> None:
    with pytest.raises(RecipeError, match=r"pad_intermediate: blocks are of 32 weights, or"):
        load("q4_k_m", ["pad_intermediate=300"])
    assert load("q8_0", ["pad_intermediate=96"]).pad_intermediate == 96
