"""A conversion that was killed goes on, and ends with the bytes of one that was not."""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from qtool.converting import resume
from qtool.converting.certificate import Converted
from qtool.converting.request import Request
from qtool.converting.run import convert
from qtool.converting.targets import target
from qtool.errors import ResumeError, UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_writer import GgufWriter
from qtool.formats.safetensors_file import StreamWriter
from qtool.messages.progress import Progress
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import load
from qtool.runs.gguf_request import GgufRequest
from qtool.workspaces.journal import Journal
from support.converting import converting
from support.converting.killed_conversions import killed, steps
from support.runs import quantizing
from support.runs.killed_named import killed_named
from support.runs.killed_runs import damage
from support.runs.quantizing import Call, files
from support.verification.verifying import forget_digests


@dataclass(frozen=True)
class Case:
    """A source and what is made of it."""

    source: str
    to: str
    tensors: int
    lossy: bool = False
    shard: int = 1 << 40


CASES = {
    "packed": Case("gptq", "gptq-v2", 11, shard=200_000),
    "rounded": Case("awq", "hf", 11),
    "lossy": Case("awq", "mlx", 11, lossy=True),
    "gguf": Case("q8_0.gguf", "hf", 11, shard=200_000),
}
FILES = {  # of which one is made
    "blocks": Case("gptq", "gguf", 11),
    "encoded": Case("awq", "gguf-q8_0", 11, lossy=True),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    cases: dict[str, tuple[str, ...]] = {
        "gptq": ("format=gptq", "weights.symmetric=true"),
        "awq": ("format=awq", "weights.symmetric=false"),
    }
    converting.artifacts(root, cases)
    recipe = load("q8_0")
    assert isinstance(recipe, GgufRecipe)
    asked = GgufRequest("tiny", root / "model", recipe, root / "q8_0.gguf", 2)
    run_gguf(asked, Progress(quiet=True))
    return root


def make(root: Path, case: Case, out: Path, **more: object) -> Converted:
    request = Request(
        root / case.source, target(case.to), out, lossy=case.lossy, max_shard_bytes=case.shard,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip
    return convert(request, Progress(quiet=True))


def begin(model: Path, out: Path) -> None:
    quantizing.quantize(model, "w4g128-rtn", out)


@pytest.mark.parametrize("name", CASES)
def test_killed_it_goes_on_and_ends_with_the_same_bytes(
    name: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, out = CASES[name], tmp_path / "out"
    make(sources, case, tmp_path / "whole")
    for after in (2, 3):  # of which the second goes on with the first
        killed(lambda: make(sources, case, out), after if after == 2 else 1)
        assert len(steps(out)) == after and not out.exists()
    written: list[str] = []
    add = StreamWriter.add

    def added(writer: StreamWriter, name: str, data: object) -> None:
        written.append(name)
        add(writer, name, data)  # type: ignore[arg-type]

    monkeypatch.setattr(StreamWriter, "add", added)
    finished = steps(out)
    make(sources, case, out)
    assert written and not any(one.rpartition(".")[0] + ".weight" in finished for one in written)
    assert files(out) == files(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "whole"}


@pytest.mark.parametrize("name", FILES)
def test_a_gguf_file_goes_on(
    name: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, out, whole = FILES[name], tmp_path / "out.gguf", tmp_path / "whole.gguf"
    make(sources, case, whole)
    for after in (2, 3):
        killed(lambda: make(sources, case, out), after if after == 2 else 1)
        assert len(steps(out)) == after and not out.exists()
    written: list[int] = []
    rows = GgufWriter.rows

    def put(writer: GgufWriter, index: int, *rest: Any) -> tuple[int, int]:
        written.append(index)
        return rows(writer, index, *rest)

    monkeypatch.setattr(GgufWriter, "rows", put)
    make(sources, case, out)
    assert {*written} == {*range(3, case.tensors)}
    assert out.read_bytes() == whole.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"out.gguf", "whole.gguf"}


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_what_a_gguf_file_has_lost_is_written_again(at: int, sources: Path, tmp_path: Path) -> None:
    """Bytes of a finished tensor, the header, or the line of one."""
    case, out, whole = FILES["blocks"], tmp_path / "out.gguf", tmp_path / "whole.gguf"
    make(sources, case, whole)
    killed(lambda: make(sources, case, out), 4)
    folder = tmp_path / ".out.gguf.partial"
    with GgufFile.open(whole) as file:
        starts = [info.start for info in file.tensors.values()]
    if at < 3:
        damage(folder / "artifact", (8, starts[0] + 100, starts[3])[at])
    else:
        damage(folder / "journal", (folder / "journal").stat().st_size // 2)
    make(sources, case, out)
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("what", ["bytes", "line", "sums"])
def test_what_the_disk_has_lost_is_written_again(
    what: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, out = CASES["rounded"], tmp_path / "out"
    make(sources, case, tmp_path / "whole")
    killed(lambda: make(sources, case, out), 4)
    folder = tmp_path / ".out.partial"
    if what == "bytes":
        damage(folder / "artifact" / "model.safetensors", 4000)
    elif what == "line":
        damage(folder / "journal", (folder / "journal").stat().st_size // 2)
    else:  # a line of nobody's, with the right checksum
        journal = Journal(folder / "journal")
        name = next(iter(journal.done))
        entry = journal.done[name]
        journal.commit(name, checksums={**entry["checksums"], "other": 1}, rounded=None)
        journal.close()
    make(sources, case, out)
    assert files(out) == files(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--to", "gptq"), "conversion: to was gptq-v2, is gptq"),
        (("--lossy",), "conversion: lossy was false, is true"),
        (("--max-shard-size", "300kB"), "size of a shard was 5000000000, is 300000"),
        (("source",), "model.safetensors has other bytes"),
        (("--fresh",), None),
    ],
)
def test_anything_else_starts_over_and_says_so(
    change: tuple[str, ...], said: str | None, sources: Path, tmp_path: Path, call: Call
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(sources / "gptq", source)
    forget_digests(source)
    case = Case("source", "gptq-v2", 11, shard=5_000_000_000)
    killed(lambda: make(tmp_path, case, out), 4)
    if change == ("source",):
        before = (source / "model.safetensors").stat()
        damage(source / "model.safetensors", before.st_size - 1)  # a norm
        os.utime(source / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
        change = ()
    to = () if "--to" in change else ("--to", "gptq-v2")
    found = call("convert", source, *to, *change, "-o", out)
    assert found.status == 0, found.err
    assert "going on" not in found.err
    assert ("starting over" in found.err) == (said is not None) and (said or "") in found.err
    given = {"--to": "gptq"}.get(change[0] if change else "", "gptq-v2")
    shard = 300_000 if "--max-shard-size" in change else 5_000_000_000
    make(tmp_path, Case("source", given, 11, "--lossy" in change, shard), tmp_path / "whole")
    assert files(out) == files(tmp_path / "whole")


def test_what_goes_on_is_said(sources: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "out"
    killed(lambda: make(sources, Case("gptq", "gptq-v2", 11, shard=5_000_000_000), out), 4)
    found = call("convert", sources / "gptq", "--to", "gptq-v2", "-o", out)
    assert found.status == 0
    assert "going on with an earlier run: 4 of 11 tensors are written" in found.err


def test_commands_do_not_take_each_other_up(sources: Path, tmp_path: Path, call: Call) -> None:
    """Neither throws away what the other has begun, unless it is told to."""
    out = tmp_path / "out"
    killed(lambda: make(sources, CASES["packed"], out), 4)
    model = sources / "model"
    found = call("quantize", model, "--recipe", "w4g128-rtn", "-o", out)
    assert found.status == 1 and "an unfinished run of another command (4 steps)" in found.err
    assert len(steps(out)) == 4
    folder = tmp_path / ".out.partial"
    shutil.rmtree(folder)
    killed(lambda: begin(model, out), 1, half=False)
    kept = steps(out)
    found = call("convert", sources / "gptq", "--to", "gptq-v2", "-o", out)
    assert found.status == 1 and "give that command again to finish it" in found.err
    assert steps(out) == kept
    assert call("convert", sources / "gptq", "--to", "gptq-v2", "-o", out, "--fresh").status == 0
    assert not folder.exists()


def test_a_source_that_changes_meanwhile_is_refused(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    shutil.copytree(sources / "gptq", source)
    commit = resume.commit

    def changing(*given: object, **more: object) -> None:
        commit(*given, **more)  # type: ignore[arg-type]
        os.utime(source / "model.safetensors", ns=(1, 1))

    monkeypatch.setattr(resume, "commit", changing)
    with pytest.raises(ResumeError, match=r"was changed while the work was going on"):
        make(tmp_path, Case("source", "gptq-v2", 11), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["rounded", "gguf"])
def test_what_an_earlier_run_left_beside_the_weights_goes(
    name: str, sources: Path, tmp_path: Path
) -> None:
    """Such as a side file that the source does not have any more."""
    case, out = CASES[name], tmp_path / "out"
    make(sources, case, tmp_path / "whole")
    killed(lambda: make(sources, case, out), 4)
    for left in ("chat_template.jinja", "additional_chat_templates/rag.jinja"):
        old = tmp_path / ".out.partial" / "artifact" / left
        old.parent.mkdir(exist_ok=True)
        old.write_text("of old")
    make(sources, case, out)
    assert quantizing.files(out) == quantizing.files(tmp_path / "whole")


@pytest.mark.parametrize("name", [*CASES, *FILES])
def test_killed_when_it_has_its_name_it_is_told_finished(
    name: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = (CASES | FILES)[name]
    out, whole = (tmp_path / f"{one}{'.gguf' * (name in FILES)}" for one in ("out", "whole"))
    made = make(sources, case, whole)
    killed_named(lambda: make(sources, case, out), out)
    with pytest.raises(UnsupportedError, match="exist"):  # of another command
        make(sources, case, out, fresh=True)
    killed_named(lambda: make(sources, case, out, replaces=True), out)
    kept = files(out) if out.is_dir() else out.read_bytes()
    monkeypatch.setattr(StreamWriter, "add", None)
    monkeypatch.setattr(GgufWriter, "rows", None)
    again = make(sources, case, out)
    assert again.json() == replace(made, artifact=str(out)).json()
    assert (files(out) if out.is_dir() else out.read_bytes()) == kept
    assert {path for path in tmp_path.iterdir()} == {out, whole}
    with pytest.raises(UnsupportedError, match="exist"):
        make(sources, case, out)


def test_killed_when_it_has_its_name_another_command_finds_it_in_its_way(
    sources: Path, tmp_path: Path
) -> None:
    case, out = CASES["rounded"], tmp_path / "out"
    killed_named(lambda: make(sources, case, out), out)
    with pytest.raises(UnsupportedError, match="exists and is not empty"):
        make(sources, case, out, dtype="float32")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
