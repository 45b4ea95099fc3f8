"""Where an output is made, so that a run that dies can go on: a hidden folder beside the output.

    .OUT.partial/
        lock        held by the process at work; the system lets go of it when the process ends
        journal     what the run is, and what of it is finished (qtool.workspaces.journal)
        artifact    the output, a folder or a file, which gets its name when it is whole
        whole       while a folder gets it; and then the earlier one that it replaced
        ended       there from then on (qtool.workspaces.naming, qtool.workspaces.already)
        ...         what a stage keeps to go on with
    .OUT.from-gguf/ where the source had to be made first (qtool.workspaces.leftovers)

A run that is ended, or that the system stops (a full disk, a source that is gone), leaves the
folder where something in it is finished, and the same command goes on from there. Else nothing is
left.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qtool.errors import QtoolError, ResumeError, UnsupportedError
from qtool.workspaces import already, naming
from qtool.workspaces.already import AlreadyMade, Earlier
from qtool.workspaces.differences import AnotherRun, told
from qtool.workspaces.journal import Journal, as_noted
from qtool.workspaces.leftovers import check_free, give_up, sweep_sources
from qtool.workspaces.lock import acquire, empty, forget, remove
from qtool.workspaces.naming import Stating
from qtool.workspaces.replacing import Replace
from qtool.workspaces.staging import (
    check_space,
    explained,
    made_parents,
    partial,
    with_notes,
)
from qtool.workspaces.watched import Marks, Watched

COMMAND = "command"  # the fact that says which one a run is of, where it is not quantize or fit


class AskAgain(UnsupportedError):
    """Another command, of the same measurements, may do what this one cannot."""


@dataclass(frozen=True)
class Workspace:
    """The hidden folder of one run, locked."""

    out: Path  # as the user named it
    folder: Path
    journal: Journal
    earlier: Earlier | None = None  # a run that was killed after it had named the output
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def artifact(self) -> Path:
        """The output under way."""
        if self.earlier is not None:  # with a fact that nothing agreed on
            raise AnotherRun(f"{self.out}: is of another run")
        return self.folder / "artifact"

    def conclude(self, made: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> None:
        """What is finished; the same command is told so where this run is killed from now on.

        facts: what it was of, where that is more than was agreed on.
        """
        self.said.update(facts=self.journal.facts if facts is None else dict(facts), made=made)

    def told_of(self, facts: Mapping[str, Any]) -> None:
        """AlreadyMade where a run of all these was killed after it had named the output."""
        if self.earlier is not None:
            self.earlier.agree(facts)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Note what this run is made of; ResumeError where the unfinished one was made of other.

        facts: by the name that a person knows them by: recipe, source, calibration ...
        AlreadyMade with the last one, where it was killed after it had named the output.
        """
        if self.earlier is not None:
            self.earlier.agree(facts)
            return
        self.check(facts)
        for name, value in as_noted(dict(facts)).items():
            self.journal.agree(name, value, name)

    def check(self, facts: Mapping[str, Any]) -> None:
        """The same, and nothing is noted."""
        before, now = self.journal.facts, as_noted(dict(facts))
        if before and before.get(COMMAND) != now.get(COMMAND):
            raise AnotherRun(
                f"{self.out}: an unfinished run of another command ({_units(self.journal)}) is "
                f"kept beside it ({self.folder.name}): give that command again to finish it; this "
                "one with --fresh starts over"
            )
        others = {
            name: (before[name], value)
            for name, value in now.items()
            if name in before and before[name] != value
        }
        if others:
            raise AnotherRun(
                f"{self.out}: an unfinished run ({_units(self.journal)}) is kept beside it "
                f"({self.folder.name}), and this command is not the one that began it: "
                f"{told(others)}, or this one with --fresh starts over"
            )


@contextmanager
def kept_journal(out: Path) -> Iterator[Journal | None]:
    """What an unfinished run of `out` has noted, while nobody else goes on with it; None where
    there is none. ResumeError where one is under way."""
    folder = partial(Path(os.path.realpath(out)))
    if not (folder / "journal").is_file():
        yield None
        return
    with explained(out):
        lock = acquire(folder, out)
    try:
        with closing(Journal(folder / "journal")) as journal:
            yield journal
    finally:
        os.close(lock)


def check_begun(out: Path, facts: Mapping[str, Any], *, fresh: bool) -> None:
    """ResumeError where a run of `out` is under way, or is kept that was made of other facts.

    `workspace` asks the same; this is for what would else be told after seconds of imports.
    """
    target = Path(os.path.realpath(out))
    folder = partial(target)
    if already.earlier(folder, target) is not None:
        return
    with kept_journal(out) as journal:
        if journal is not None and journal.done and not fresh:
            Workspace(out, folder, journal).check(facts)


@contextmanager
def workspace(
    out: Path,
    *,
    is_folder: bool,
    nbytes: int,
    fresh: bool | None,
    sources: Marks | None = None,
    stating: Stating | None = None,
    replace: Replace | None = None,
    stale: Callable[[Mapping[str, Any]], bool] = lambda _: False,
    facts: Mapping[str, Any] | None = None,
) -> Iterator[Workspace]:
    """A place to make `out` in; `out` is there when the body ends without an exception.

    nbytes: what the disk has to hold. fresh: throw away what an earlier run left; None
    where the command has no such option. sources: the
    files that it is made of, as they were when they were opened. stating: writes what is to lie
    beside it, given where it is until it has its name. replace: it may take the place of another.
    stale: whether an earlier run, by its facts, is to be thrown away, too. facts: what is agreed on
    first, of a run that concludes; AlreadyMade where an earlier one did, and was killed then.
    """
    target = Path(os.path.realpath(out))
    folder = partial(target)
    before = None if fresh or facts is None else already.earlier(folder, target)
    if before is not None and before.agrees(facts or {}):
        with _asked_again(out, before, stating, is_folder=is_folder, replace=replace) as again:
            yield again
        return
    check_free(out, is_folder=is_folder, replace=replace)
    with made_parents(target, out):
        kept = ended = False
        journal = None
        lock: int | None = None
        try:
            with explained(out):
                lock = acquire(folder, out)
            look = Watched(out, folder, lock, nbytes, sources or {})
            # A run that had the lock before may have made it; what is refused removes nothing.
            check_free(out, is_folder=is_folder, replace=replace)
            with explained(out):
                naming.take_up(folder)
        except BaseException:  # a signal, say, before there was anything to keep
            if lock is not None:
                os.close(lock)
            give_up(folder, out)
            raise
        try:
            journal = Journal(folder / "journal", look)
            if fresh or not journal.done or stale(journal.facts):
                journal.close()
                empty(folder)
                journal = Journal(folder / "journal", look)
            space = Workspace(out, folder, journal)
            if journal.done:
                look.check_space()
            else:
                check_space(out, nbytes)
            if is_folder:
                with explained(out):
                    space.artifact.mkdir(exist_ok=True)
            yield space
            ended = True
            look.same()
            check_free(out, is_folder=is_folder, replace=replace)
            # What is killed in here goes on with the same command, and states it again.
            naming.name(folder, target, out, stating, space.said)
        except BaseException as error:
            why = look.explained(error)
            done = journal is not None and bool(journal.done) and look.ours()
            if kept := done and (ended or why is not None or may_pass(error)):
                assert journal is not None
                if not isinstance(error, AnotherRun | AskAgain):  # which say how to go on
                    error.add_note(
                        f"what is finished is kept ({_units(journal)}): the same command goes on "
                        f"from there{'' if fresh is None else ', --fresh starts over'}"
                    )
            if why is not None:
                raise with_notes(why, error) from error
            if isinstance(error, QtoolError) and str(folder) in str(error):
                # Nobody knows the hidden folder.
                said = str(error).replace(str(folder / "artifact"), str(out))
                raise with_notes(type(error)(said), error) from error
            raise
        finally:
            if journal is not None:
                journal.close()
            if not kept and look.ours():
                remove(folder)
            os.close(lock)
            sweep_sources(target, out)


@contextmanager
def _asked_again(
    out: Path,
    earlier: Earlier,
    stating: Stating | None,
    *,
    is_folder: bool,
    replace: Replace | None,
) -> Iterator[Workspace]:
    """For the command of a run that was killed after it had named `out`, until that is told.

    AlreadyMade where it is the same in all. Nothing that lies there is ever changed.
    """
    target = Path(os.path.realpath(out))
    folder = partial(target)
    with explained(out):
        lock = acquire(folder, out)
    if already.earlier(folder, target) != earlier:  # another had the lock since that was read
        os.close(lock)
        give_up(folder, out)
        check_free(out, is_folder=is_folder, replace=replace)
        raise ResumeError(f"{out}: another qtool was at it just now; give the same command again")
    try:
        with closing(Journal(folder / "journal")) as journal:
            yield Workspace(out, folder, journal, earlier)
            raise AnotherRun(f"{out}: is of another run")
    except AlreadyMade:
        naming.finish(folder, target)
        if stating is not None:
            _state(target, stating, earlier.stated)
        remove(folder)
        forget(folder)
        raise
    except AnotherRun as error:
        naming.finish(folder, target)
        remove(folder)
        forget(folder)
        check_free(out, is_folder=is_folder, replace=replace)  # which refuses it, as a rule
        raise AnotherRun(f"{error}; the same command again takes its place") from None
    finally:
        os.close(lock)
        sweep_sources(target, out)


def _state(target: Path, stating: Stating, stated: bool) -> None:
    """Put beside an output what is to lie there, unless the run that made it has: that says how
    long it took, and on how many threads."""
    beside, text = stating(target)
    if not (stated and beside.is_file()):
        beside.write_text(text, encoding="utf-8")


def may_pass(error: BaseException) -> bool:
    """Whether the same command may get further: after a signal, or what the system refused.

    What is wrong with the source or the recipe stays wrong, and mending it makes another run.
    """
    if not isinstance(error, QtoolError) or isinstance(error, ResumeError | AskAgain):
        return True
    beneath: BaseException | None = error
    while beneath is not None:
        if isinstance(beneath, OSError | MemoryError):
            return True
        beneath = beneath.__cause__ or beneath.__context__
    return False


def _units(journal: Journal) -> str:
    count = len(journal.done)
    return "1 step" if count == 1 else f"{count} steps"
