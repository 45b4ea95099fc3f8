"""qtool reproduce: the same bytes from the record alone, and why not where that cannot be."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import qtool.reproduce.run as running
from qtool.cli.reproduce import lines
from qtool.hub import tiny_folder
from qtool.recipe.file import shipped
from qtool.recipe.recipe import load
from support.models.gpt_oss import OWN, source_for
from support.runs.quantizing import Call, first_block_of_tiny, text_file

SMALL = ("--samples", "4", "--length", "64")


def test_a_folder(tmp_path: Path, call: Call) -> None:
    """Made of a folder, on a file, with changes, in shards, from statistics."""
    model, text = first_block_of_tiny(tmp_path / "model"), text_file(tmp_path / "text.txt", 8000)
    own = ("--calibration", text, *SMALL)
    stats = tmp_path / "stats"
    assert call("calibrate", model, "-o", stats, "--recipe", "w4g32-gptq", *own).status == 0
    out = tmp_path / "out"
    asked = ("--set", "weights.bits=8", "--set", "gptq.mse=false", "--max-shard-size", "1MB")
    made = call(
        "quantize", model, "--recipe", "w4g32-gptq", *asked, "--stats", stats, "-o", out
    )  # fmt: skip
    assert made.status == 0, made.err
    assert "--model SOURCE" in call("reproduce", out).err
    assert "--calibration FILE" in call("reproduce", out, "--model", model).err
    given = ("reproduce", out, "--model", model, "--calibration", text)
    said = call(*given, "--json")
    assert said.status == 0, said.err
    found = json.loads(said.out)
    assert found["same"] and found["compared"] == "bytes" and not found["differing_files"]
    assert len([name for name in found["files"] if name.endswith(".safetensors")]) > 1
    # Another text.
    text.write_text(text.read_text()[1:])
    changed = call(*given)
    assert changed.status == 1 and "gives other tokens than it did" in changed.err
    assert "was calibrated on another text: " in changed.err
    short = text_file(tmp_path / "short.txt", 40)
    changed = call("reproduce", out, "--model", model, "--calibration", short)
    assert changed.status == 1 and "--samples" not in changed.err
    assert "was calibrated on another text: this one is too short for the " in changed.err
    # Another version.
    record = json.loads((out / "qtool.json").read_text())
    (out / "qtool.json").write_text(json.dumps(record | {"qtool_version": "0.0.9"}))
    assert "made by qtool 0.0.9" in call(*given).err


def test_a_file_of_importance_that_was_measured_on_a_text(tmp_path: Path, call: Call) -> None:
    """As those of `matrix` are; the text went into the recipe, too, which had none."""
    model, text = first_block_of_tiny(tmp_path / "model"), text_file(tmp_path / "text.txt", 8000)
    importance, out = tmp_path / "i.gguf", tmp_path / "out.gguf"
    measured = call("calibrate", model, "--imatrix", importance, "--calibration", text, *SMALL)
    assert measured.status == 0, measured.err
    given = ("--imatrix", importance, "-o", out)
    assert call("quantize", model, "--recipe", "iq3_xxs", *given).status == 0
    assert "--calibration FILE" in call("reproduce", out, "--model", model).err
    again = call("reproduce", out, "--model", model, "--calibration", text)
    assert again.status == 0 and "the same to the byte" in again.out, again.out + again.err
    both = ("--calibration", text, "--imatrix", importance)
    assert call("reproduce", out, "--model", model, *both).status == 0


@pytest.mark.parametrize(("recipe", "name"), [("q4_k_m", "out.gguf"), ("w4g128-rtn", "out")])
def test_a_text_that_nothing_was_made_of(
    recipe: str, name: str, tmp_path: Path, call: Call
) -> None:
    """A folder of `matrix` has both kinds, and is gone through with one --calibration."""
    model, text = first_block_of_tiny(tmp_path / "model"), text_file(tmp_path / "text.txt", 8000)
    out = tmp_path / name
    assert call("quantize", model, "--recipe", recipe, "-o", out).status == 0
    again = call("reproduce", out, "--model", model, "--calibration", text)
    assert again.status == 0 and "the same to the byte" in again.out, again.out + again.err
    assert "note: --calibration is not used" in again.err


def test_a_changed_byte(tmp_path: Path, call: Call) -> None:
    model = first_block_of_tiny(tmp_path / "model")
    rtn, gguf = tmp_path / "rtn", tmp_path / "q8.gguf"
    assert call("quantize", model, "--recipe", "w8-rtn", "-o", rtn).status == 0
    assert call("quantize", model, "--recipe", "q8_0", "-o", gguf).status == 0
    for artifact in (rtn, gguf):
        assert call("reproduce", artifact, "--model", model).status == 0
    # A byte of the artifact.
    weights = rtn / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-3] ^= 1
    weights.write_bytes(raw)
    said = call("reproduce", rtn, "--model", model, "--json")
    found = json.loads(said.out)
    assert said.status == 1 and found["differing_files"] == ["rtn/model.safetensors"]
    assert len(found["tensors"]) == 1
    # A byte of the source.
    source = model / "model.safetensors"
    raw = bytearray(source.read_bytes())
    raw[-3] ^= 1
    source.write_bytes(raw)
    said = call("reproduce", rtn, "--model", model)
    assert said.status == 1 and "model.safetensors has other bytes" in said.err
    said = call("reproduce", gguf, "--model", model)
    assert said.status == 1 and "its weights are not those" in said.err
    # It is gone.
    shutil.rmtree(model)
    assert "is not to be had" in call("reproduce", rtn, "--model", model).err
    assert not list(tmp_path.glob("qtool-reproduce-*"))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"differing": 0, "of": "codes"}, "its scales; every code is the same"),
        ({"differing": 3, "of": "codes"}, "3 codes"),
        ({"differing": 0, "of": "numbers"}, "how it is stored; all its numbers are the same"),
    ],
)
def test_what_differs_is_said(row: dict[str, Any], said: str) -> None:
    rows = ({"name": "a", **row},)
    first, *_, last = lines(
        running.Reproduced("x", "r", "m", True, None, {}, ("f",), ("f",), rows, 0, 1.0)
    )
    assert first == f"differs: a, {said}" and "not reproduced: 1 tensor differs (" in last


def test_on_another_cpu_codes_are_compared(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = first_block_of_tiny(tmp_path / "model"), tmp_path / "out"
    text = text_file(tmp_path / "text.txt", 8000)
    own = ("--calibration", text, *SMALL)
    made = call("quantize", model, "--recipe", "w4g32-gptq", "-o", out, *own)
    assert made.status == 0, made.err
    here = running.provenance.environment()
    monkeypatch.setattr(running.provenance, "environment", lambda: here | {"cpu": "another"})
    said = call("reproduce", out, "--model", model, "--calibration", text)
    assert said.status == 0, said.err
    assert "codes are compared, not bytes" in said.out and "every code is the same" in said.out


def test_who_cannot_be_made_again(tmp_path: Path, call: Call) -> None:
    assert "has no qtool.json" in call("reproduce", tiny_folder()).err
    assert "train.py: is no artifact; name" in call("reproduce", tiny_folder() / "train.py").err
    assert "no such file" in call("reproduce", tmp_path / "none").err
    out, converted = tmp_path / "a", tmp_path / "b"
    assert call("quantize", "tiny", "--recipe", "w4g64-rtn", "-o", out).status == 0
    assert call("convert", out, "--to", "gptq-v2", "-o", converted).status == 0
    assert "was made by `qtool convert`" in call("reproduce", converted).err


@pytest.mark.slow
@pytest.mark.parametrize("recipe", shipped())
def test_every_recipe(recipe: str, tmp_path: Path, call: Call) -> None:
    out = tmp_path / recipe
    if load(recipe).format == "gguf":
        out = tmp_path / f"{recipe}.gguf"
    own = SMALL if load(recipe).calibrates else ()
    source = source_for(recipe, Path("tiny"), tmp_path / "model")
    made = call("quantize", source, "--recipe", recipe, "-o", out, *own)
    if made.status == 1 and "--set indivisible" in made.err:
        made = call(
            "quantize", source, "--recipe", recipe, "-o", out, *own,
            "--set", "indivisible=smaller-group",
        )  # fmt: skip
    assert made.status == 0, made.err
    said = call("reproduce", out, *(("--model", source) if recipe in OWN else ()))
    assert said.status == 0, said.err + said.out
    assert "the same to the byte" in said.out
