"""A damaged qtool.json beside weights: what only reads weights goes on and says so, what needs the
record fails in a sentence."""

import json
from pathlib import Path

import pytest

from qtool import schemas
from support.quality.evaluating import call
from support.runs.quantizing import Call, Called, first_block_of_tiny, quantize, text_file

__all__ = ["call"]

SAID = "cannot be read (qtool.json: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model, a text, and what was made of it, whole and with half of its record."""
    root = tmp_path_factory.mktemp("damaged")
    text_file(root / "text.txt", 6000)
    model = first_block_of_tiny(root / "model")
    for name in ("whole", "damaged"):
        quantize(model, "w4g64-rtn", root / name)
    record = root / "damaged" / "qtool.json"
    record.write_bytes(record.read_bytes()[:100])
    return root


def lines(said: Called) -> list[str]:
    return [line for line in (said.out + said.err).splitlines() if SAID in line]


def test_inspect(folder: Path, call: Call) -> None:
    said = call("inspect", folder / "damaged")
    assert said.status == 0 and len(lines(said)) == 1
    whole, found = (
        json.loads(call("inspect", folder / name, "--json").out) for name in ("whole", "damaged")
    )
    assert found.pop("provenance_unreadable").startswith("qtool.json: ")
    assert found["provenance"] is None and whole["provenance"] is not None
    assert found | {"provenance": whole["provenance"]} == whole
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(schemas.__path__[0]) / "inspect.json").read_text())
    jsonschema.validate(found | {"provenance_unreadable": "x"}, schema)
    assert call("inspect", folder / "damaged", "--tensor", "model.norm.weight").status == 0


def test_eval_and_generate(folder: Path, call: Call) -> None:
    asked = ("--text", folder / "text.txt", "--windows", 1, "--length", 16, "--no-cache")
    whole, said = (
        call("eval", folder / name, "--against", folder / "model", *asked)
        for name in ("whole", "damaged")
    )
    assert said.status == 0 and len(lines(said)) == 1 and not lines(whole)
    assert str(folder / "damaged") in lines(said)[0]
    assert said.out == whole.out.replace(str(folder / "whole"), str(folder / "damaged"))
    said = call("generate", folder / "damaged", "--tokens", 1)
    assert said.status == 0 and len(lines(said)) == 1


def test_verify(folder: Path, call: Call) -> None:
    said = call("verify", folder / "damaged")
    assert said.status == 1 and len(lines(said)) == 1 and "error (provenance)" in lines(said)[0]
    said = call("verify", folder / "damaged", "--against", folder / "model")
    assert said.status == 1 and "weights were not compared: qtool.json" in said.out
    assert "relative error of" not in said.out


def test_who_compares_or_shows_says_it(folder: Path, call: Call, tmp_path: Path) -> None:
    said = call("diff", folder / "whole", folder / "damaged", "--all")
    assert said.status == 0 and len(lines(said)) == 1
    page = tmp_path / "report.html"
    assert call("report", folder / "damaged", "-o", page).status == 1
    assert SAID in page.read_text()


@pytest.mark.parametrize("words", [("reproduce",), ("convert", "--to", "gptq", "-o", "out")])
def test_who_needs_it_fails(
    words: tuple[str, ...], folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    said = call(words[0], folder / "damaged", *words[1:])
    (line,) = said.err.splitlines()
    assert said.status == 1 and "qtool.json: " in line and not (tmp_path / "out").exists()
