"""`qtool fit` that something comes between goes on, and the recipe is the same to the byte."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import qtool
from qtool.errors import ResumeError, UnsupportedError
from qtool.fitting import costs as kept
from qtool.fitting.of_gguf import losses_of
from qtool.fitting.request import Fitted
from qtool.gradients import measure as sensitivities
from qtool.workspaces.journal import Journal
from support.fitting.fitting_runs import SMALL, fitted, tiny
from support.gguf import gguf_from_hf, gguf_models
from support.runs import quantizing
from support.runs.faulty_runs import KEPT
from support.runs.killed_named import killed_named
from support.runs.killed_runs import KILLED, Died, damage, dying
from support.runs.quantizing import Call

__all__ = ["tiny"]

PASSED = 7  # lines of states before three places, of the head, of two blocks, and of tables
ROUNDED = 15  # one for each tensor


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    """Of a run that nothing came between."""
    return fitted(tiny, tmp_path_factory.mktemp("whole") / "out.yaml", bits=4.5)


def die(after: int, tiny: Path, out: Path, **given: Any) -> Path:
    """The hidden folder that a run leaves which ends after so many lines of its journal."""
    with pytest.MonkeyPatch.context() as patched, pytest.raises(Died):
        dying(after, patched)
        fitted(tiny, out, bits=4.5, **given)
    return out.parent / f".{out.name}.partial"


def check_goes_on(tiny: Path, out: Path, whole: Fitted) -> None:
    found = fitted(tiny, out, bits=4.5)
    assert (found.loss, found.unrelated) == (whole.loss, whole.unrelated)
    assert out.read_bytes() == whole.out.read_bytes()
    assert [path.name for path in out.parent.iterdir()] == [out.name]


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(after, marks=[] if after in (1, 4, 6, 7, 21) else [pytest.mark.slow])
        for after in (*range(1, PASSED + 3), PASSED + ROUNDED - 1)
    ],
)
def test_a_run_that_dies_goes_on(
    after: int, tiny: Path, whole: Fitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has a line in the journal is not measured again: neither sensitivities nor losses."""
    die(after, tiny, tmp_path / "out.yaml", threads=1)
    rounded = []

    def counted(ways: Any, *given: Any) -> Any:
        rounded.append(ways[0].tensor.name)
        return losses_of(ways, *given)

    monkeypatch.setattr("qtool.fitting.of_gguf.losses_of", counted)
    if after >= PASSED:
        monkeypatch.setattr(sensitivities, "measure", None)
    check_goes_on(tiny, tmp_path / "out.yaml", whole)
    assert len(rounded) == ROUNDED - max(0, after - PASSED) == len(set(rounded))


def test_it_dies_after_its_last_line(tiny: Path, whole: Fitted, tmp_path: Path) -> None:
    """Which the counts of lines above stand on."""
    with pytest.MonkeyPatch.context() as patched:
        count = dying(PASSED + ROUNDED, patched)
        check_goes_on(tiny, tmp_path / "out.yaml", whole)
    assert count() == PASSED + ROUNDED


@pytest.mark.parametrize(
    ("after", "damaged"),
    [
        (5, "states-0"),
        pytest.param(5, "sensitivity-2", marks=pytest.mark.slow),
        pytest.param(5, "sensitivity-1", marks=pytest.mark.slow),
        (5, "gradients-1"),
        (PASSED + 4, "sensitivity-0"),
        pytest.param(PASSED + 4, "sensitivity-2", marks=pytest.mark.slow),
        (PASSED + 4, "sensitivity-tables"),
        (PASSED + 4, "journal"),
    ],
)
def test_what_is_damaged_is_measured_again(
    after: int, damaged: str, tiny: Path, whole: Fitted, tmp_path: Path
) -> None:
    file = die(after, tiny, tmp_path / "out.yaml") / damaged
    damage(file, file.stat().st_size // 2)
    check_goes_on(tiny, tmp_path / "out.yaml", whole)


def test_twice_damaged_and_twice_killed(tiny: Path, whole: Fitted, tmp_path: Path) -> None:
    out = tmp_path / "out.yaml"
    folder = die(5, tiny, out)
    for _ in range(2):
        damage(folder / "states-0", 0)
        damage(folder / "sensitivity-1", 0)
        die(1, tiny, out)
    for file in folder.glob("gradients-*"):
        file.write_bytes(b"")
    check_goes_on(tiny, out, whole)


def test_a_line_half_written_is_rounded_again(tiny: Path, whole: Fitted, tmp_path: Path) -> None:
    journal = die(PASSED + 4, tiny, tmp_path / "out.yaml") / "journal"
    journal.write_bytes(journal.read_bytes()[:-20])
    check_goes_on(tiny, tmp_path / "out.yaml", whole)


def test_losses_that_hang_on_something_else_are_not_taken(
    tiny: Path, whole: Fitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another run's importance, or types: sensitivities are, losses are not."""
    out = tmp_path / "out.yaml"
    folder = die(PASSED + 9, tiny, out, sets=["importance=false"])
    kept = shutil.copytree(folder, tmp_path / "kept" / "kept").parent
    monkeypatch.setattr(sensitivities, "measure", None)
    types = "q3_k,q4_k,q5_k,q6_k"
    found = fitted(tiny, out, bits=4.5, types=types)
    out.unlink()
    shutil.move(kept / "kept", folder)
    kept.rmdir()
    check_goes_on(tiny, out, whole)
    monkeypatch.undo()
    assert found.loss == fitted(tiny, tmp_path / "own.yaml", bits=4.5, types=types).loss


def test_losses_of_another_text_are_refused(tiny: Path, tmp_path: Path) -> None:
    die(PASSED + 2, tiny, tmp_path / "out.yaml")
    with pytest.raises(ResumeError, match="calibration text: seed was 0, is 1"):
        fitted(
            tiny, tmp_path / "out.yaml", bits=4.5, sets=["importance=true", "calibration.seed=1"]
        )


def test_another_sight_of_experts_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Safetensors recipes see fused experts one by one, those of GGUF as they are."""
    gguf_from_hf.no_vocabulary(monkeypatch)
    model = gguf_models.build("granite-moe", tmp_path / "model", dtype="bfloat16")
    quantizing.add_tokenizer(model)
    text = quantizing.text_file(tmp_path / "text.txt", 12000)
    sets = [f"calibration.source={text}"]
    other = [*sets, "weights.group_size=32"]
    with pytest.MonkeyPatch.context() as patched, pytest.raises(Died):
        dying(PASSED + 1, patched)
        fitted(model, tmp_path / "out.yaml", bits=7, recipe="w4a16-ct", sets=other, types="4,8")
    with pytest.raises(ResumeError, match="tensors that are run"):
        fitted(model, tmp_path / "out.yaml", bits=7, recipe="q4_0", sets=sets, types="q4_0,q8_0")


def test_what_cannot_be_chosen_leaves_what_was_measured(
    tiny: Path, whole: Fitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that another size or other types are chosen from it."""

    def refuse(*_: object) -> None:
        raise UnsupportedError("none of --types can hold it")

    out = tmp_path / "out.yaml"
    with monkeypatch.context() as patched, pytest.raises(UnsupportedError, match="is kept"):
        patched.setattr("qtool.fitting.fit.choose", refuse)
        fitted(tiny, out, bits=4.5)
    monkeypatch.setattr(sensitivities, "measure", None)
    check_goes_on(tiny, out, whole)


@pytest.mark.parametrize("after", [2, pytest.param(PASSED - 1, marks=pytest.mark.slow), PASSED + 2])
def test_the_disk_is_full(after: int, tiny: Path, whole: Fitted, tmp_path: Path) -> None:
    """While states, sensitivities or losses are kept; half of the line is there."""
    out = tmp_path / "out.yaml"
    append, count = Journal._append, 0

    def full(journal: Journal, entry: Any) -> None:
        nonlocal count
        count += "done" in entry
        if count > after:
            os.write(journal._file.fileno(), b"0123")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(journal, entry)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(UnsupportedError) as error:
        patched.setattr(Journal, "_append", full)
        fitted(tiny, out, bits=4.5)
    assert str(error.value) == f"{out}: the disk is full; free some space or choose another -o"
    assert any(KEPT in note for note in error.value.__notes__)
    check_goes_on(tiny, out, whole)


@pytest.mark.parametrize(
    ("recipe", "lines"),
    [
        pytest.param("q4_k_m", PASSED, marks=pytest.mark.slow),
        pytest.param("q4_k_m", PASSED + 6, marks=pytest.mark.slow),
        pytest.param("w4g128-gptq", PASSED + 2, marks=pytest.mark.slow),
    ],
)
def test_kill_9(recipe: str, lines: int, tiny: Path, tmp_path: Path, call: Call) -> None:
    """The real thing, of both families of formats."""
    out, other = tmp_path / "out.yaml", tmp_path / "whole.yaml"
    words = ["fit", tiny, "--recipe", recipe, "--bits", 9, *SMALL]
    words += [] if recipe == "q4_k_m" else ["--types", "4,8"]
    ends = KILLED.replace("    os.kill", f"    if len(given[0].done) == {lines}:\n        os.kill")
    home = Path(qtool.__file__).parent.parent
    command = [sys.executable, "-c", ends, *map(str, [*words, "-o", out])]
    ended = subprocess.run(command, cwd=home, capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr
    folder = tmp_path / ".out.yaml.partial"
    assert (folder / "journal").read_bytes().count(b'"done"') == lines
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sensitivities, "measure", None)
        done = call(*words, "-o", out)
    assert done.status == 0, done.err
    assert call(*words, "-o", other).status == 0
    assert out.read_bytes() == other.read_bytes()
    assert not folder.exists()


@pytest.mark.parametrize("costs", [False, True])
def test_killed_when_it_has_its_name_it_is_told_finished(
    costs: bool, tiny: Path, whole: Fitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.yaml"
    asked = {"bits": 4.5, "costs": tmp_path / "costs" if costs else None}
    killed_named(lambda: fitted(tiny, out, **asked), out)
    text = out.read_bytes()
    monkeypatch.setattr(sensitivities, "measure", None)
    monkeypatch.setattr(kept, "read", None)
    found = fitted(tiny, out, **asked)
    same = {one: getattr(found, one) for one in ("made", "loss", "before", "chosen", "members")}
    assert same == {one: getattr(whole, one) for one in same}
    assert (found.out, out.read_bytes()) == (out, text)
    assert {path.name for path in tmp_path.iterdir()} == {"out.yaml", *["costs"] * costs}
    with pytest.raises(UnsupportedError, match="exists"):
        fitted(tiny, out, **asked)


@pytest.mark.parametrize("other", [{"bits": 5}, {"types": "q3_k,q4_k"}, {"sets": ["pure=true"]}])
def test_killed_when_it_has_its_name_another_command_finds_it_in_its_way(
    other: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.yaml"
    killed_named(lambda: fitted(tiny, out, bits=4.5), out)
    with pytest.raises(UnsupportedError, match="exists"):
        fitted(tiny, out, **{"bits": 4.5, **other})
