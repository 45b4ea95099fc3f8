"""qtool matrix: what it makes has the bytes of separate runs, goes on, and outlives a failure."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from quantizing import Call, Called, caller, files, text_file

from qtool import schemas
from qtool.matrix import run as running
from qtool.runs import statement

SCHEMA = Path(__file__).parent / "provenance.schema.json"
RECIPES = "w4g64-gptq,w4g128-awq,iq2_xs,w4g128-rtn,w8a8-static,nothing-fits"
SMALL = ("--samples", "4", "--length", "64")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    return caller(monkeypatch, capfd)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Called]:
    """A matrix of tiny with a recipe that fails, and what the command said."""
    folder = tmp_path_factory.mktemp("matrix")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("nothing-fits.yaml").write_text(
            "method: gptq\nformat: gptq\nweights: {bits: 4, group_size: 96, symmetric: true}\n"
        )
        text_file(folder / "text.txt", 4000)
        said: list[str] = []
        patch.setattr("typer.echo", lambda text="", **_: said.append(str(text)))
        patch.setattr(
            "sys.argv",
            ["qtool", "matrix", "tiny", "--recipes", RECIPES.replace("fits", "fits.yaml"), "-o",
             "m", "--eval", "text.txt", "--windows", "1", "--json", *SMALL],
        )  # fmt: skip
        from qtool.cli import main

        with pytest.raises(SystemExit) as caught:
            main.main()
    return folder, Called(int(caught.value.code or 0), "\n".join(said), "")


def test_all_but_what_fails_is_made(made: tuple[Path, Called]) -> None:
    folder, called = made
    assert called.status == 1
    found = json.loads(called.out)
    Draft202012Validator(json.loads(schemas.text("matrix"))).validate(found)
    status = {one["recipe"]: one["status"] for one in found["artifacts"]}
    assert found["failed"] == ["nothing-fits"] and status["nothing-fits"] == "failed"
    failed = next(one for one in found["artifacts"] if one["status"] == "failed")
    assert "96" in failed["error"] and not (folder / "m/nothing-fits").exists()
    assert set(status.values()) == {"made", "failed"}
    # What needs no data comes first, and one pass serves all the others.
    assert found["artifacts"][0]["recipe"] == "w4g128-rtn"
    (one,) = found["passes"]
    assert len(one["recipes"]) == 5 and one["calibration"]["samples"] == 4
    assert {"gram", "mean_abs", "max_abs"} <= set(one["needs"])
    assert all(o["kld"] > 0 and o["perplexity"] > 1 for o in found["artifacts"] if not o["error"])
    page = (folder / "m/report.html").read_text()
    assert all(name in page for name in status if name != "nothing-fits")
    assert "qtool matrix tiny --recipes" in page


def test_bytes_are_those_of_separate_runs(made: tuple[Path, Called], call: Call) -> None:
    folder, _ = made
    work = folder / "separate"
    work.mkdir()
    stats, imatrix = work / "stats", work / "imatrix.gguf"
    said = call(
        "calibrate", "tiny", "-o", stats, "--imatrix", imatrix, "--recipe", "w4g64-gptq",
        "--recipe", "w4g128-awq", "--recipe", "w8a8-static", *SMALL,
    )  # fmt: skip
    assert said.status == 0, said.err
    for recipe in ("w4g64-gptq", "w4g128-awq", "w8a8-static"):
        one = call("quantize", "tiny", "--recipe", recipe, "--stats", stats, "-o", work / recipe)
        assert one.status == 0, one.err
        assert files(work / recipe) == files(folder / "m" / recipe), recipe
        record = json.loads((folder / "m" / recipe / "qtool.json").read_text())
        assert record["calibration"]["error_aware"] is False
    out = work / "iq2_xs.gguf"
    one = call("quantize", "tiny", "--recipe", "iq2_xs", "--imatrix", imatrix, "-o", out)
    assert one.status == 0, one.err
    assert out.read_bytes() == (folder / "m/iq2_xs.gguf").read_bytes()
    assert call("quantize", "tiny", "--recipe", "w4g128-rtn", "-o", work / "rtn").status == 0
    assert files(work / "rtn") == files(folder / "m/w4g128-rtn")


def test_statements(made: tuple[Path, Called]) -> None:
    folder, _ = made
    validator = Draft202012Validator(json.loads(SCHEMA.read_text()))
    for name in ("w4g128-awq", "iq2_xs.gguf", "w4g128-rtn"):
        artifact = folder / "m" / name
        content = json.loads(statement.path_beside(artifact).read_text())
        validator.validate(content)
        assert not statement.unlike(artifact)
        build = content["predicate"]["buildDefinition"]
        assert build["externalParameters"]["source"] == "tiny"
        inputs = {one["name"]: one["digest"]["sha256"] for one in build["resolvedDependencies"]}
        assert {"model.safetensors", "config.json", "tokenizer.json"} <= inputs.keys()
        assert ("calibration tokens" in inputs) == (name != "w4g128-rtn")
        (run,) = content["predicate"]["runDetails"]["byproducts"]
        assert run["annotations"]["seconds"]["total"] > 0
        assert {"cpu", "torch", "qtool"} <= run["annotations"]["environment"].keys()


def test_it_goes_on(
    made: tuple[Path, Called], tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the second artifact: the first is kept, the statistics are not measured again."""
    monkeypatch.chdir(tmp_path)
    words = ("matrix", "tiny", "--recipes", "w8a8-static,w4g64-gptq", "-o", "m", *SMALL)
    make = running._make

    def die(run: object, cell: running.Cell, *rest: object) -> object:
        if cell.name == "w4g64-gptq":
            raise KeyboardInterrupt
        return make(run, cell, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(running, "_make", die)
        assert call(*words).status == 130
    # And between the artifact and its statement.
    (tmp_path / "m/w8a8-static.provenance.json").unlink()
    said = call(*words, "--json")
    assert said.status == 0, said.err
    found = json.loads(said.out)
    status = {one["recipe"]: one["status"] for one in found["artifacts"]}
    assert status == {"w8a8-static": "kept", "w4g64-gptq": "made"}
    assert found["passes"][0]["taken_up"] and not (tmp_path / "m/.matrix").exists()
    for recipe in status:
        assert files(tmp_path / "m" / recipe) == files(made[0] / "m" / recipe)
    # Nothing is left to do; but another text is not what they were made on.
    again = json.loads(call(*words, "--json").out)
    assert {one["status"] for one in again["artifacts"]} == {"kept"} and not again["passes"]
    other = call(*words, "--seed", "7", "--json")
    assert other.status == 1
    for one in json.loads(other.out)["artifacts"]:
        assert "was made of another calibration text" in one["error"]
    # A damaged one is neither kept nor overwritten.
    weights = tmp_path / "m/w4g64-gptq/model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    damaged = call(*words)
    assert damaged.status == 1 and "w4g64-gptq/model.safetensors is not as it was" in damaged.out


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (("--recipes", "w9"), 1, "--recipes: recipe 'w9' does not exist"),
        (("--recipes", ","), 2, "--recipes names none"),
        (("--recipes", "w8-rtn,w8-rtn"), 2, "two of the name w8-rtn"),
        (("--recipes", "w8-rtn", "--windows", "3"), 2, "give --eval TEXT too"),
        (("--recipes", "w8-rtn", "--eval", "none.txt"), 1, "none.txt"),
    ],
)
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


def test_somebody_elses_files_stay(tmp_path: Path, call: Call) -> None:
    (tmp_path / "w8-rtn").mkdir()
    said = call("matrix", "tiny", "--recipes", "w8-rtn", "-o", tmp_path)
    assert said.status == 1 and "was not made by this matrix" in said.out
    (tmp_path / "matrix.json").write_text("{}")
    said = call("matrix", "tiny", "--recipes", "w8-rtn", "-o", tmp_path)
    assert said.status == 1 and "not written by `qtool matrix`" in said.err
    assert (tmp_path / "matrix.json").read_text() == "{}"
