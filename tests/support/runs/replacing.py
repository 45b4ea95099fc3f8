"""New artifacts in the place of earlier ones."""

from pathlib import Path

import pytest

from qtool.workspaces import replacing
from qtool.workspaces.replacing import Replace
from qtool.workspaces.staging import staged
from qtool.workspaces.workspace import workspace
from support.runs.quantizing import files

FREELY = Replace(())


def artifact(folder: Path, mark: str, more: tuple[str, ...] = ()) -> Path:
    """The files of one, all of which say `mark`."""
    names = ("config.json", "qtool.json", "model.safetensors", "tokenizer.json", "LICENSE.txt",
             "additional_chat_templates/tools.jinja", *more)  # fmt: skip
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(mark)
    return folder


def mark_of(folder: Path) -> str:
    """Which one it is; it is whole."""
    (mark,) = {content.decode() for content in files(folder).values()}
    assert len(files(folder)) == 6
    return mark


def by_staging(out: Path) -> None:
    with staged(out, FREELY) as folder:
        artifact(folder, "new")


def by_workspace(out: Path) -> None:
    with workspace(out, is_folder=True, nbytes=1, fresh=False, replace=FREELY) as space:
        space.journal.commit("all of it")
        artifact(space.artifact, "new")


def no_trade(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that cannot trade two names."""
    monkeypatch.setattr(replacing, "_exchange", lambda one, other: False)


def can_trade(place: Path) -> bool:
    one, other = artifact(place / "trade" / "1", "1"), artifact(place / "trade" / "2", "2")
    traded = replacing._exchange(one, other)
    assert (mark_of(one), mark_of(other)) == (("2", "1") if traded else ("1", "2"))
    return traded
