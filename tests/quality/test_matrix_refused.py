"""What `qtool matrix` refuses, in a sentence, and what it leaves alone."""

from pathlib import Path

import pytest

from qtool.matrix import run as running
from support.runs.quantizing import Call, files, first_block_of_tiny


def test_advice_for_one_of_several() -> None:
    said = "it does not fit; choose --set weights.group_size=64, or --set indivisible=dense (x)"
    assert running.in_a_file(said) == (
        "it does not fit; choose `weights.group_size: 64`, or `indivisible: dense` (x); write it "
        "into a recipe file of your own"
    )
    assert running.in_a_file("x: no such file") == "x: no such file"


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (("--recipes", "w9"), 1, "--recipes: recipe 'w9' does not exist"),
        (("--recipes", ","), 2, "--recipes names none"),
        (("--recipes", "w8-rtn,w8-rtn"), 2, "two of the name w8-rtn"),
        (("--recipes", "w8-rtn", "--windows", "3"), 2, "give --eval TEXT too"),
        (("--recipes", "w8-rtn", "--eval", "none.txt"), 1, "none.txt"),
        (("--recipes", "w8-rtn,q4_k_m", "--set", "type=q4_0"), 1,
         "type is a key of recipes for GGUF files; recipes with it: q4_0, q4_0-awq-gptq; for "
         "q4_k_m alone, write it into a recipe file of your own"),
        (("--recipes", "w8-rtn", "--set", "weigths.bits=4"), 1, "did you mean weights? known:"),
        (("--recipes", "w8-rtn", "--set", "calibration.sample=4"), 1, "did you mean samples?"),
    ],
)  # fmt: skip
def test_one_sentence(
    words: tuple[str, ...],
    status: int,
    sentence: str,
    tmp_path: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    said = call("matrix", "tiny", *words)
    assert said.status == status and sentence in said.err and not list(tmp_path.iterdir())


def test_what_cannot_be_leaves_no_folder(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("too short")
    model = first_block_of_tiny(tmp_path / "model")
    before = files(tmp_path)
    for given, says in (
        (("empty", "-o", "m"), "no *.safetensors file here"),
        (("model", "-o", "model"), "model: is the model itself; choose another -o"),
        (("model", "-o", "m", "--eval", "text"), "text: 9 bytes, too few for a window of 512"),
        (("model", "-o", "m", "--eval", "empty"), "empty: a folder; name a text file"),
    ):
        said = call("matrix", *given, "--recipes", "w8-rtn")
        assert said.status == 1 and says in said.err and said.err.count("\n") == 1, said.err
    assert files(tmp_path) == before and model.is_dir() and not (tmp_path / "m").exists()


def test_somebody_elses_files_stay(tmp_path: Path, call: Call) -> None:
    (tmp_path / "w8-rtn").mkdir()
    said = call("matrix", "tiny", "--recipes", "w8-rtn", "-o", tmp_path)
    assert said.status == 1 and "was not made by this matrix" in said.out
    (tmp_path / "matrix.json").write_text("{}")
    said = call("matrix", "tiny", "--recipes", "w8-rtn", "-o", tmp_path)
    assert said.status == 1 and "not written by `qtool matrix`" in said.err
    assert (tmp_path / "matrix.json").read_text() == "{}"
