"""The journal and the hidden folder of a run: half lines, other facts, other people's files."""

import errno
import os
from pathlib import Path

import pytest

from qtool.errors import ResumeError, UnsupportedError
from qtool.workspaces import program
from qtool.workspaces.differences import told
from qtool.workspaces.journal import Journal
from qtool.workspaces.leftovers import check_free
from qtool.workspaces.workspace import workspace
from support.runs.quantizing import files


def test_half_a_line_is_no_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.agree("recipe", {"bits": 4}, "no")
    for name in ("a", "b", "c"):
        journal.commit(name, value=name)
    journal.close()
    whole = (tmp_path / "journal").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "journal").write_bytes(whole[:length])
        journal = Journal(tmp_path / "journal")
        lines = whole[:length].count(b"\n")
        assert [*journal.done] == ["a", "b", "c"][: max(0, lines - 1)]
        journal.close()
        assert (tmp_path / "journal").stat().st_size == len(
            b"".join(whole.splitlines(True)[:lines])
        )
    (tmp_path / "journal").write_bytes(whole)
    journal = Journal(tmp_path / "journal")
    journal.forget_from("b")
    assert [*journal.done] == ["a"]
    with pytest.raises(ResumeError, match="other bits"):
        journal.agree("recipe", {"bits": 3}, "other bits")
    journal.commit("d")
    journal.close()
    assert [*Journal(tmp_path / "journal").done] == ["a", "d"]


def test_facts_behind_a_forgotten_unit_are_noted_again(tmp_path: Path) -> None:
    """What a run is made of may be known only after something of it is finished."""
    journal = Journal(tmp_path / "journal")
    journal.agree("recipe", 4, "no")
    journal.commit("importance")
    journal.agree("header", "x", "no")
    journal.close()
    journal = Journal(tmp_path / "journal")
    journal.forget_from("importance")
    journal.agree("header", "y", "no")
    journal.close()
    journal = Journal(tmp_path / "journal")
    assert journal.facts == {"recipe": 4, "header": "y"}
    journal.commit("late")
    journal.forget_from("late")
    with pytest.raises(ResumeError, match="another header"):
        journal.agree("header", "x", "another header")
    journal.close()


RECIPE = {"name": "r", "weights": {"bits": 4}, "calibration": {"source": None, "samples": 4}}


FILE = ["a.safetensors", 7, 1, "0" * 64]


@pytest.mark.parametrize(
    ("fact", "before", "now", "sentence"),
    [
        ("recipe", RECIPE, {**RECIPE, "weights": {"bits": 8}},
         "weights.bits was 4, is 8; this command with --set weights.bits=4 goes on with it"),
        ("recipe", RECIPE, {**RECIPE, "name": "s"},
         "recipe was r, is s; give its command again to finish it (--recipe r)"),
        ("recipe", RECIPE, {**RECIPE, "calibration": {"source": "t", "samples": 4}},
         "calibration.source was not set, is t; give its command again to finish it"),
        ("version of qtool", "0.1", "0.2", "version of qtool was 0.1, is 0.2; with that as it was"),
        ("code of qtool", "0" * 64, "1" * 64,
         "qtool itself has changed since, though not its version; with that as it was it can be"),
        ("source", [{"x": 1}, None, FILE], [{"x": 2}, None, FILE],
         "source: config.json.x was 1, is 2; with"),
        ("source", [FILE], [[*FILE[:3], "1" * 64]], "source: a.safetensors has other bytes; with"),
        ("source", [FILE], [[FILE[0], 8, *FILE[2:]]],
         "source: a.safetensors was of 7 bytes, is of 8; with"),
        ("source", [FILE], [["b", 8, *FILE[2:]]],
         "source: b is new, source: a.safetensors is gone; with"),
        ("file of statistics", FILE, ["b", *FILE[1:]],
         "file of statistics was a.safetensors, is b; with"),
        ("version of torch or kind of CPU", {"torch": "2"}, {"torch": "3"},
         "version of torch or kind of CPU: torch was 2, is 3; with"),
        ("version of torch or kind of CPU", ["x" * 99], {"torch": "3"},
         'version of torch or kind of CPU was ["' + "x" * 58 + "..., is"),
        ("calibration text", {"digest": f"sha256:{'0' * 64}"}, {"digest": f"sha256:{'1' * 64}"},
         "calibration text: digest has other content; with"),
    ],
)  # fmt: skip
def test_what_differs(fact: str, before: object, now: object, sentence: str) -> None:
    assert told({fact: (before, now)}).startswith(sentence)


def test_code_follows_from_the_version() -> None:
    others = {"version of qtool": ("0.1", "0.2"), "code of qtool": ("0" * 64, "1" * 64)}
    assert told(others).startswith("version of qtool was 0.1, is 0.2; with that as it was")


def test_a_digest_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of content alone: a package that is installed again is the same one."""
    names = {name for name, _ in program._files()}
    assert {"methods/gptq.py", "formats/awq.py", "kernels/cuda/base.h", "library"} < names
    assert not any("__pycache__" in name for name in names)
    code = program.code.__wrapped__
    file = tmp_path / "x.py"
    file.write_text("1")
    monkeypatch.setattr(program, "_files", lambda: [("x.py", file)])
    before = code()
    os.utime(file, (1, 1))
    assert code() == before
    file.write_text("2")
    assert code() != before
    monkeypatch.setattr(program, "_files", lambda: [("y.py", file)])
    assert len({before, code()}) == 2


def test_two_runs_on_one_output(tmp_path: Path) -> None:
    """The second one is told who is at work; when that one is gone it may begin."""
    out = tmp_path / "out"
    with workspace(out, is_folder=True, nbytes=0, fresh=False) as space:
        (space.artifact / "a").write_text("a")
        with (
            pytest.raises(
                ResumeError, match=rf"another qtool is making it \(process {os.getpid()}\)"
            ),
            workspace(out, is_folder=True, nbytes=0, fresh=True),
        ):
            pass
        assert (space.artifact / "a").exists()
    assert files(out) == {"a": b"a"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_left_beside_a_finished_output_is_swept(tmp_path: Path) -> None:
    """A run that is killed between the last rename and the end leaves its journal and its lock."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "a").write_text("a")
    folder = tmp_path / ".out.partial"
    folder.mkdir()
    (folder / "lock").write_text("qtool 1")
    (folder / "journal").write_text("")
    with pytest.raises(UnsupportedError, match="exists and is not empty"):
        check_free(out, is_folder=True)
    assert folder.exists()  # of a run that was to replace it, and goes on
    (folder / "ended").touch()
    with pytest.raises(UnsupportedError, match="exists and is not empty"):
        check_free(out, is_folder=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_mark_that_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept that would not be known as ours; what has its mark does not need it anew."""
    out, pwrite = tmp_path / "out", os.pwrite

    def full(descriptor: int, data: bytes, position: int) -> int:
        if data.startswith(b"qtool "):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, position)

    def step() -> None:
        with workspace(out, is_folder=True, nbytes=0, fresh=False) as space:
            space.journal.commit(str(len(space.journal.done)))
            if len(space.journal.done) < 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(UnsupportedError, match="out: the disk is full; free some space"):
            step()
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(KeyboardInterrupt):
        step()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "pwrite", full)
        step()
    step()
    assert out.exists()


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """A folder, a file or a link of somebody's that has the name where work would go."""
    out, place = tmp_path / "out", tmp_path / ".out.partial"
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("years")
    before = files(tmp_path)

    def refused() -> None:
        with (
            pytest.raises(ResumeError, match=r"\.out\.partial beside it, .* was not made by qtool"),
            workspace(out, is_folder=True, nbytes=0, fresh=True),
        ):
            raise AssertionError
        check_free(out, is_folder=True)

    place.symlink_to(precious)
    refused()
    assert place.is_symlink() and files(precious) == {"thesis": b"years"}
    place.unlink()
    place.write_text("a file")
    refused()
    place.unlink()
    precious.rename(place)
    refused()
    assert files(place) == {"thesis": b"years"}
    out.mkdir()  # an empty one may be filled
    refused()
    out.rmdir()
    (place / "lock").write_text("not of qtool")
    refused()
    assert files(place) == {"thesis": b"years", "lock": b"not of qtool"}
    (place / "lock").unlink()
    place.rename(precious)
    place.mkdir()
    (place / "lock").write_text("qtool 1")  # as in an archive that somebody has unpacked
    for name in ("artifact", "artifact/model.safetensors", "hidden-0", "journal"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).symlink_to(precious if name == "artifact" else precious / "thesis")
        refused()
        (place / name).unlink()
    (place / "artifact").rmdir()
    (place / "lock").unlink()
    (place / "lock").symlink_to(precious / "thesis")
    with (
        pytest.raises(UnsupportedError, match="cannot be made"),
        workspace(out, is_folder=True, nbytes=0, fresh=True),
    ):
        raise AssertionError
    (place / "lock").unlink()
    place.rmdir()
    assert files(tmp_path) == before


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_finished_output_that_cannot_get_its_name_is_kept(
    is_folder: bool, tmp_path: Path
) -> None:
    """Somebody has put something in its place meanwhile; when that is gone nothing is lost."""
    out = tmp_path / "out"
    with (
        pytest.raises(UnsupportedError) as refused,
        workspace(out, is_folder=is_folder, nbytes=0, fresh=False) as space,
    ):
        (space.artifact / "a" if is_folder else space.artifact).write_text("hours of work")
        space.journal.commit("all")
        out.mkdir()
        (out / "note").write_text("mine")
    assert any("what is finished is kept" in note for note in refused.value.__notes__)
    (out / "note").unlink()
    out.rmdir()
    with workspace(out, is_folder=is_folder, nbytes=0, fresh=False) as space:
        assert [*space.journal.done] == ["all"]
    assert (out / "a" if is_folder else out).read_text() == "hours of work"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "where", ["qtool.workspaces.lock._plain", "qtool.workspaces.workspace.Watched"]
)
def test_an_interrupt_before_there_is_anything_leaves_no_folder(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the folder's making and the first thing in it, too."""
    left = []

    def interrupted(*_: object, **__: object) -> bool:
        if not left:
            left.append(sorted(path.name for path in tmp_path.rglob("*")))
            raise KeyboardInterrupt
        return True

    monkeypatch.setattr(where, interrupted)
    with (
        pytest.raises(KeyboardInterrupt),
        workspace(tmp_path / "x.gguf", is_folder=False, nbytes=1, fresh=False),
    ):
        pass
    assert left == [[".x.gguf.partial", "lock"]]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("changed", [False, True])
def test_a_gguf_recipe_where_another_run_is_kept(changed: bool, tmp_path: Path) -> None:
    """Its config.json is no new file: the other run knows it by its content."""
    weights = ["model.safetensors", 8, 1, "ab"]
    other = ["model.safetensors", 8, 1, "cd"] if changed else weights
    before = [{"model_type": "llama"}, None, weights]
    now = [["config.json", 5, 1, "ef"], ["tokenizer.json", 5, 1, "ef"], other]
    recipes = {"name": "w4g128-awq", "bits": 4}, {"name": "q4_k_m"}
    said = told({"recipe": recipes, "source": (before, now)})
    first = "recipe was w4g128-awq, is q4_k_m"
    first += ", source: model.safetensors has other bytes" if changed else ""
    assert said.startswith(f"{first}; ") and "is new" not in said
