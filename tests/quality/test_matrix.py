"""qtool matrix: what it makes has the bytes of separate runs, goes on, and outlives a failure."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from qtool import schemas
from qtool.cli import main as cli
from qtool.matrix import run as running
from qtool.matrix import shared
from qtool.messages.progress import Progress
from qtool.provenance import statement
from qtool.quality import evaluate
from qtool.recipe.recipe import Calibration
from qtool.workspaces.naming import path_beside
from support.places import SUPPORT
from support.runs.quantizing import Call, Called, files, first_block_of_tiny, text_file

SCHEMA = SUPPORT / "quality" / "provenance.schema.json"
GROUPS = "weights: {bits: 4, group_size: 32, symmetric: true}\n"
OWN = {
    "gptq": f"method: gptq\nformat: gptq\n{GROUPS}",
    "awq": f"method: awq\nformat: awq\n{GROUPS}".replace("true", "false") + "awq: {grid: 4}\n",
    "rtn": f"method: rtn\nformat: gptq\n{GROUPS}",
    "importance": "format: gguf\ntype: q4_0\nimportance: true\n",
    "nothing-fits": f"method: gptq\nformat: gptq\n{GROUPS}".replace("32", "96"),
}
NAMES = ("gptq", "awq", "rtn", "importance", "w8a8-static", "nothing-fits")
SMALL = ("--calibration", "../text.txt", "--samples", "4", "--length", "64")


def file_of(name: str) -> str:
    return f"../{name}.yaml" if name in OWN else name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, a text and recipes beside it; runs are made in folders beside them."""
    folder = tmp_path_factory.mktemp("matrix")
    for name, text in OWN.items():
        (folder / f"{name}.yaml").write_text(text)
    text_file(folder / "text.txt", 8000)
    return first_block_of_tiny(folder / "model")


@pytest.fixture(scope="module")
def made(model: Path) -> tuple[Path, Called]:
    """A matrix with a recipe that fails, and what the command said."""
    folder = model.parent / "made"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        said: list[str] = []
        patch.setattr("typer.echo", lambda text="", **_: said.append(str(text)))
        names = ",".join(map(file_of, NAMES))
        patch.setattr(
            "sys.argv",
            ["qtool", "matrix", "../model", "--recipes", names, "-o", "m", "--eval", "../text.txt",
             "--windows", "1", "--json", *SMALL],
        )  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            cli.main()
    return folder, Called(int(caught.value.code or 0), "\n".join(said), "")


def test_all_but_what_fails_is_made(made: tuple[Path, Called]) -> None:
    folder, called = made
    assert called.status == 1
    found = json.loads(called.out)
    Draft202012Validator(json.loads(schemas.text("matrix"))).validate(found)
    status = {one["recipe"]: one["status"] for one in found["artifacts"]}
    written = json.loads((folder / "m/matrix.json").read_text())
    Draft202012Validator(json.loads(schemas.text("matrix"))).validate(written)
    # What failed for good keeps no statistics, and its name is not the matrix's.
    assert written.pop("made_of").keys() == set(NAMES) - {"nothing-fits"}
    assert written.pop("figures").keys() == set(NAMES) - {"nothing-fits"} and written == found
    assert found["kept_statistics"] is None and not (folder / "m/.matrix").exists()
    assert found["failed"] == ["nothing-fits"] and status["nothing-fits"] == "failed"
    failed = next(one for one in found["artifacts"] if one["status"] == "failed")
    assert "96" in failed["error"] and "--set" not in failed["error"]
    assert "`indivisible: dense` (leaves" in failed["error"]
    assert failed["error"].endswith("; write it into a recipe file of your own")
    assert not (folder / "m/nothing-fits").exists()
    assert set(status.values()) == {"made", "failed"}
    # What needs no data comes first, and one pass serves all the others that can be made.
    assert found["artifacts"][0]["recipe"] == "rtn"
    (one,) = found["passes"]
    assert len(one["recipes"]) == 4 and one["calibration"]["samples"] == 4
    assert {"gram", "mean_abs", "max_abs"} <= set(one["needs"])
    assert all(o["kld"] > 0 and o["perplexity"] > 1 for o in found["artifacts"] if not o["error"])
    page = (folder / "m/report.html").read_text()
    assert all(name in page for name in status if name != "nothing-fits")
    assert "qtool matrix ../model --recipes" in page


def test_bytes_are_those_of_separate_runs(
    made: tuple[Path, Called], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made[0].parent / "separate"
    folder.mkdir()
    monkeypatch.chdir(folder)
    asked = [
        word for name in ("gptq", "awq", "w8a8-static") for word in ("--recipe", file_of(name))
    ]
    said = call("calibrate", "../model", "-o", "stats", "--imatrix", "imatrix.gguf", *asked, *SMALL)
    assert said.status == 0, said.err
    for name in NAMES[:-1]:
        given = {"importance": ("--imatrix", "imatrix.gguf"), "rtn": ()}
        more = given.get(name, ("--stats", "stats"))
        out = "importance.gguf" if name == "importance" else name
        one = call("quantize", "../model", "--recipe", file_of(name), *more, "-o", out)
        assert one.status == 0, one.err
        if name == "importance":
            assert Path(out).read_bytes() == (made[0] / "m" / out).read_bytes()
            continue
        assert files(Path(out)) == files(made[0] / "m" / out), name
        record = json.loads((Path(out) / "qtool.json").read_text())
        assert (record["calibration"] or {}).get("error_aware") is (
            None if name == "rtn" else False
        )


@pytest.mark.parametrize("command", ["inspect", "verify", "reproduce", "diff"])
def test_its_folder_is_none_of_the_artifacts(
    command: str, made: tuple[Path, Called], call: Call
) -> None:
    """Though one of them may be the only GGUF file there."""
    folder = made[0] / "m"
    said = call(command, folder, *([folder] if command == "diff" else []))
    assert said.status == 1
    assert "what `qtool matrix` made; name one of its artifacts: awq, " in said.out + said.err


def test_statements(made: tuple[Path, Called]) -> None:
    folder, _ = made
    validator = Draft202012Validator(json.loads(SCHEMA.read_text()))
    for name in ("awq", "importance.gguf", "rtn"):
        artifact = folder / "m" / name
        content = json.loads(path_beside(artifact).read_text())
        validator.validate(content)
        assert not statement.unlike(artifact)
        build = content["predicate"]["buildDefinition"]
        assert build["externalParameters"]["source"] is None  # a folder of this machine
        inputs = {one["name"]: one["digest"]["sha256"] for one in build["resolvedDependencies"]}
        assert {"model.safetensors", "config.json", "tokenizer.json"} <= inputs.keys()
        assert ("calibration tokens" in inputs) == (name != "rtn")
        (run,) = content["predicate"]["runDetails"]["byproducts"]
        assert run["annotations"]["seconds"]["total"] > 0
        assert {"cpu", "torch", "qtool"} <= run["annotations"]["environment"].keys()
        assert str(folder.parent) not in json.dumps(content)


def test_it_goes_on(
    made: tuple[Path, Called], model: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the second artifact: the first is kept, the statistics are not measured again."""
    folder = model.parent / "again"
    folder.mkdir()
    monkeypatch.chdir(folder)
    words = ("matrix", "../model", "--recipes", f"w8a8-static,{file_of('gptq')}", "-o", "m", *SMALL)
    make = running.make

    def die(asked: object, source: object, cell: running.Cell, *rest: object) -> object:
        if cell.name == "gptq":
            raise KeyboardInterrupt
        return make(asked, source, cell, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(running, "make", die)
        assert call(*words).status == 130
    half = json.loads((folder / "m/matrix.json").read_text())
    Draft202012Validator(json.loads(schemas.text("matrix"))).validate(half)
    assert [one["status"] for one in half["artifacts"]] == ["made", "waiting"]
    # And between the artifact and its statement.
    (folder / "m/w8a8-static.provenance.json").unlink()
    said = call(*words, "--json")
    assert said.status == 0, said.err
    found = json.loads(said.out)
    status = {one["recipe"]: one["status"] for one in found["artifacts"]}
    assert status == {"w8a8-static": "kept", "gptq": "made"}
    assert found["passes"][0]["taken_up"] and not (folder / "m/.matrix").exists()
    assert found["kept_statistics"] is None
    for name in status:
        assert files(folder / "m" / name) == files(made[0] / "m" / name)
    # Nothing is left to do; but another text is not what they were made on.
    again = json.loads(call(*words, "--json").out)
    assert {one["status"] for one in again["artifacts"]} == {"kept"} and not again["passes"]
    shards = call(*words, "--max-shard-size", "1MB", "--json")
    for one in json.loads(shards.out)["artifacts"]:
        assert "was made of another size of a shard" in one["error"]
    other = call(*words, "--seed", "7", "--json")
    assert other.status == 1
    for one in json.loads(other.out)["artifacts"]:
        assert "was made of another calibration text" in one["error"]
    # A damaged one is neither kept nor overwritten.
    weights = folder / "m/gptq/model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    damaged = call(*words)
    assert damaged.status == 1 and "gptq/model.safetensors is not as it was" in damaged.out


@pytest.mark.slow
def test_what_was_measured_is_not_measured_again(
    model: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model.parent / "measured"
    folder.mkdir()
    monkeypatch.chdir(folder)
    words = ("matrix", "../model", "--recipes", "w8-rtn,q8_0", "-o", "m", "--eval", "../text.txt")
    first = call(*words, "--windows", "1")
    assert first.status == 0 and first.err.count("measuring ") == 2, first.err
    figures = json.loads((folder / "m/matrix.json").read_text())["artifacts"]
    page = (folder / "m/report.html").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "forward", None)  # whoever measured would call it
        again = call(*words, "--windows", "1")
    assert again.status == 0, again.err
    assert again.err.count("measured by an earlier run") == 2 and "measuring " not in again.err
    kept = json.loads((folder / "m/matrix.json").read_text())["artifacts"]
    both = ("recipe", "kld", "perplexity")
    assert [[one[key] for key in both] for one in kept] == [
        [one[key] for key in both] for one in figures
    ]
    assert (folder / "m/report.html").read_bytes() == page
    # Over another part of the text, and where the figures are none, it is measured again.
    other = call(*words, "--windows", "2")
    assert other.status == 0 and other.err.count("measuring ") == 2
    written = json.loads((folder / "m/matrix.json").read_text())
    written["figures"]["w8-rtn"]["row"]["perplexity"] = "none"
    (folder / "m/matrix.json").write_text(json.dumps(written))
    assert call(*words, "--windows", "2").err.count("measuring ") == 1


def test_set_is_for_each_of_them(model: Path, tmp_path: Path, call: Call) -> None:
    """With the bytes that `quantize --set` makes; without it, it is another matrix."""
    words = ("matrix", model, "--recipes", "w4g128-rtn,w8a16-ct", "-o", tmp_path / "m", "--json")
    item = ("--set", "weights.group_size=64", "--set", "calibration.seed=2")
    said = call(*words, *item)
    assert said.status == 0 and json.loads(said.out)["changes"] == ["weights.group_size=64"]
    one = call("quantize", model, "--recipe", "w8a16-ct", "-o", tmp_path / "one", *item[:2])
    assert one.status == 0 and files(tmp_path / "one") == files(tmp_path / "m/w8a16-ct")
    again = json.loads(call(*words, *item).out)
    assert [one["status"] for one in again["artifacts"]] == ["kept", "kept"]
    other = call(*words)
    assert other.status == 1 and other.out.count("was made of another recipe; remove it") == 2


def test_each_by_itself(model: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """--error-aware makes what `quantize` makes."""
    folder = model.parent / "itself"
    folder.mkdir()
    monkeypatch.chdir(folder)
    said = call(
        "matrix", "../model", "--recipes", file_of("gptq"), "-o", "m", "--error-aware", *SMALL
    )
    assert said.status == 0 and "itself" in said.out, said.err
    one = call("quantize", "../model", "--recipe", file_of("gptq"), "-o", "one", *SMALL)
    assert one.status == 0 and files(Path("one")) == files(Path("m/gptq"))


def test_two_runs_are_kept_apart(
    tmp_path: Path, model: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the one that was not first changes nothing of what the other has written."""
    words = ("matrix", model, "--recipes", "w8-rtn", "-o", tmp_path / "m")
    make, said = running.make, []

    def another_comes(*given: object) -> object:
        written = (tmp_path / "m/matrix.json").read_text()
        with monkeypatch.context() as patch:
            patch.setattr(running, "make", make)
            said.append(call(*words))
        assert (tmp_path / "m/matrix.json").read_text() == written
        return make(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(running, "make", another_comes)
    assert call(*words).status == 0
    assert said[0].status == 1 and "another qtool is making it (process" in said[0].err
    assert not (tmp_path / "m/.matrix").exists()


@pytest.mark.slow
def test_no_room_for_statistics(
    tmp_path: Path, model: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qtool.matrix.shared.free_bytes", lambda _: 1000)
    words = ("matrix", model, "--recipes", model.parent / "gptq.yaml", "-o", "m", "--calibration",
             model.parent / "text.txt", "--samples", "4", "--length", "64")  # fmt: skip
    said = call(*words)
    assert said.status == 1 and "its disk has 1,000 left" in said.out
    wanted = int(said.out.split("share need ")[1].split(" bytes")[0].replace(",", ""))
    monkeypatch.setattr("qtool.matrix.shared.free_bytes", lambda _: wanted)
    found = json.loads(call(*words, "--json").out)
    # The header's room is no more than this for one block.
    assert 0 <= found["passes"][0]["size_bytes"] - wanted < 200_000


@pytest.mark.slow
def test_statistics_are_kept_for_a_run_that_can_go_on(
    tmp_path: Path, model: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make = running.make

    def full(*_: object) -> object:
        raise OSError(28, "No space left on device")

    words = ("matrix", model, "--recipes", model.parent / "gptq.yaml", "-o", "m", "--calibration",
             model.parent / "text.txt", "--samples", "4", "--length", "64")  # fmt: skip
    monkeypatch.setattr(running, "make", full)
    said = call(*words)
    assert said.status == 1 and "m/.matrix keeps " in said.out
    monkeypatch.setattr(running, "make", make)
    fresh = json.loads(call(*words, "--fresh", "--json").out)
    assert not fresh["passes"][0]["taken_up"] and not Path("m/.matrix").exists()


def test_texts_are_told_apart_of_a_gguf_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose tokenizer is in the file: by what they say, not by the file's name or its ends."""
    source, text = tmp_path / "model.gguf", tmp_path / "text.jsonl"
    source.write_bytes(b"GGUF")
    turns = [{"role": "user", "content": "a"}]

    def digest(*lines: object, samples: int = 4) -> str:
        text.write_text("".join(json.dumps(line) + "\n" for line in lines))
        settings = Calibration(source=str(text), samples=samples)
        return shared.text_digest(settings, source, Progress(quiet=True))

    found = [
        digest({"text": "a"}),
        digest({"text": "b"}),
        digest({"text": "a"}, samples=5),
        digest({"messages": turns}),
        digest({"messages": turns}, {"text": "a"}),
        digest({"text": "a"}, {"text": "a"}),
    ]
    assert len({*found}) == len(found)
    assert digest({"text": "a", "more": 1}) == found[0]
    # All of a long text is not read, but its file is another one.
    monkeypatch.setattr(shared, "_READ", 10)
    long = digest({"text": "a" * 20}, {"text": "b"})
    assert digest({"text": "a" * 20}, {"text": "c"}) != long != digest({"text": "a" * 20}, {})
    assert digest({"text": "a" * 20}, {"text": "b"}) == long
