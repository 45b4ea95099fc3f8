"""A run that was killed just after its output got its name: the same command finds it finished.

`ended` in the hidden folder tells, from before the output gets its name until all else in there is
gone, and beside it for the last moment, as JSON:

    seen    what tells the finished output from another that lies there
    facts   what the run was of, as its journal has it
    made    what the run would have said of it, where its command takes that up
    stated  whether what was to lie beside the output does, as that of the run

Nothing is made anew only where the output is as it was seen, and every fact is that of now.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from qtool.errors import SourceError
from qtool.messages.summary import Summary, peak_rss_bytes, summary_of
from qtool.workspaces.differences import HEADER, PRECISION, AnotherRun
from qtool.workspaces.identity import file_facts
from qtool.workspaces.journal import as_noted
from qtool.workspaces.lock import ENDED, ended_beside, is_ended

if TYPE_CHECKING:
    from qtool.messages.progress import Progress

_FOLLOW = {HEADER, PRECISION}  # from other facts, and known after work alone
SAID = (
    "it was finished already: an earlier run of this command was killed just after the output had "
    "its name"
)


class AlreadyMade(Exception):
    """What a command asks for lies there, whole."""

    def __init__(self, made: Mapping[str, Any]) -> None:
        super().__init__()
        self.made = made


@dataclass(frozen=True)
class Earlier:
    """The run that was killed, and which of its facts are not yet those of now."""

    facts: Mapping[str, Any]
    made: Mapping[str, Any]
    left: set[str] = field(default_factory=set)
    stated: bool = False  # it has put beside the output what that was to have there

    def agrees(self, facts: Mapping[str, Any]) -> bool:
        """Whether it was of these."""
        now = as_noted(dict(facts))
        return all(name in self.facts and self.facts[name] == now[name] for name in now)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """AlreadyMade with the last of its facts, AnotherRun where one is another."""
        if not self.agrees(facts):
            raise AnotherRun("the artifact there is of another run, which was killed then")
        self.left.difference_update(facts)
        if not self.left:
            raise AlreadyMade(self.made)


def earlier(folder: Path, target: Path) -> Earlier | None:
    """The run of a hidden folder, where it was killed after `target` was its output."""
    said = _said(folder)
    facts, made = said.get("facts"), said.get("made")
    if not isinstance(facts, dict) or not isinstance(made, dict) or not made:
        return None
    if (folder / "artifact").exists() or not is_as_seen(target, folder):
        return None
    return Earlier(facts, made, facts.keys() - _FOLLOW, said.get("stated") is True)


def is_as_seen(place: Path, folder: Path) -> bool:
    """Whether what lies there is what the run of a hidden folder made."""
    try:
        return place.exists() and bool(_said(folder).get("seen") == seen(place))
    except (OSError, SourceError):
        return False


def _said(folder: Path) -> dict[str, Any]:
    path, last = folder / ENDED, ended_beside(folder)
    try:
        if not path.exists() and is_ended(last):
            path = last
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def seen(place: Path) -> list[Any]:
    """What tells one folder, or file, from another; no renaming changes it."""
    if place.is_file():
        return [["", *file_facts(place)[1:]]]
    return [
        [path.relative_to(place).as_posix(), *file_facts(path)]
        for path in sorted(place.rglob("*"))
        if path.is_file()
    ]


class _Asked(Protocol):
    @property
    def artifact(self) -> Path: ...


Asked = TypeVar("Asked", bound=_Asked)


def taking_up(
    run: Callable[[Asked, Progress], Summary],
) -> Callable[[Asked, Progress], Summary]:
    """The same, which says of what is AlreadyMade what the run that made it would have said."""

    @functools.wraps(run)
    def runs(request: Asked, progress: Progress) -> Summary:
        try:
            return run(request, progress)
        except AlreadyMade as found:
            made = summary_of(found.made)
        seconds = {**progress.seconds, "total": progress.total()}
        return replace(
            made,
            artifact=str(request.artifact),
            seconds={name: round(value, 3) for name, value in seconds.items()},
            peak_rss_bytes=peak_rss_bytes(),
            notes=[SAID, *made.notes],
        )

    return runs
