"""Outputs in the folder of the model that they are made of: refused where they would be read as a
part of it, and made else, as llama.cpp's own programs do."""

import shutil
from pathlib import Path

import pytest

from support.runs import quantizing
from support.runs.bad_models import assert_one_sentence, snapshot
from support.runs.quantizing import Call, first_blocks_of_tiny

SMALL = ["--samples", "1", "--length", "32"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    return quantizing.caller(monkeypatch, capfd)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return first_blocks_of_tiny(tmp_path_factory.mktemp("original") / "model", 1)


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.mark.parametrize(
    "words",
    [
        ["calibrate", "MODEL", *SMALL, "-o", "MODEL/stats.safetensors"],
        ["calibrate", "MODEL/model.safetensors", *SMALL, "-o", "MODEL/stats.safetensors"],
        ["fit", "MODEL", "--bits", "9", *SMALL, "--costs", "MODEL/c.json", "-o", "HERE/f.yaml"],
        ["quantize", "GGUF", "--recipe", "q8_0", "-o", "GGUF/b.gguf"],
        ["calibrate", "GGUF", *SMALL, "--imatrix", "HERE/model/../store/b.gguf"],
    ],
)
def test_what_would_be_read_with_it(
    words: list[str], model: Path, tmp_path: Path, call: Call
) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    assert call("quantize", model, "--recipe", "f16", "-o", folder / "a.gguf").status == 0
    before = snapshot(tmp_path)
    given = [one.replace("MODEL", str(model)).replace("GGUF", str(folder)) for one in words]
    said = call(*(one.replace("HERE", str(tmp_path)) for one in given))
    assert_one_sentence(said, "would lie among the files of", "in another folder")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "words",
    [
        ["quantize", "MODEL", "--recipe", "w4g128-rtn", "-o", "MODEL/out"],
        ["quantize", "MODEL", "--recipe", "q8_0", "-o", "MODEL/out.gguf"],
        ["calibrate", "MODEL", *SMALL, "--imatrix", "MODEL/out.gguf"],
        ["calibrate", "MODEL/model.safetensors", *SMALL, "--imatrix", "MODEL/out.gguf"],
    ],
)
def test_what_is_read_by_nobody(words: list[str], model: Path, tmp_path: Path, call: Call) -> None:
    assert call(*(one.replace("MODEL", str(model)) for one in words)).status == 0
    for name, folder in (("a", model), ("b", Path(shutil.copytree(model, tmp_path / "other")))):
        if name == "b":
            for path in folder.glob("out*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        out = tmp_path / name
        assert call("quantize", folder, "--recipe", "w8-rtn", "-o", out).status == 0
    assert (tmp_path / "a/model.safetensors").read_bytes() == (
        tmp_path / "b/model.safetensors"
    ).read_bytes()
