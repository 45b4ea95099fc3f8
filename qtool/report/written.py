"""The page as a file, made in a hidden folder beside it. A run that was killed when the page had
its name is told finished by the same command (qtool.workspaces.already)."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qtool.errors import ResumeError
from qtool.messages.progress import Progress
from qtool.report.facts import Report
from qtool.report.gather import Request
from qtool.report.page import page
from qtool.workspaces import already, program
from qtool.workspaces.already import SAID, AlreadyMade
from qtool.workspaces.identity import file_facts
from qtool.workspaces.leftovers import check_free
from qtool.workspaces.staging import partial
from qtool.workspaces.workspace import COMMAND, workspace


def written(
    request: Request, out: Path, gathered: Callable[[], Report], progress: Progress
) -> dict[str, Any]:
    """The --json object of what the page is about."""
    target = Path(os.path.realpath(out))
    facts = {
        COMMAND: "report",
        **program.facts(),
        "report": list(request.commands),
        "source": [file_facts(file) for file in _files(request, target)],
    }
    before = already.earlier(partial(target), target)
    finished = before is not None and before.agrees(facts)
    check_free(out, is_folder=False, again=finished)
    # Before the place for it is made, which may lie in a folder that is looked at.
    found = None if finished else gathered()
    try:
        with workspace(out, is_folder=False, nbytes=0, fresh=False, facts=facts) as space:
            space.agree(facts)
            if found is None:  # what was finished has been removed since
                raise ResumeError(
                    f"{out}: another program removed what an earlier run had finished; give the "
                    "same command again"
                )
            space.artifact.write_bytes(page(found).encode())
            space.conclude(found.json())
    except AlreadyMade as known:
        progress.say(f"note: {SAID}")
        return dict(known.made)
    return found.json()


def _files(request: Request, target: Path) -> Iterator[Path]:
    """All that is looked at, which the page may lie among."""
    models = [path for _, path in request.artifacts]
    models += [] if request.against is None else [request.against[1]]
    texts = [] if request.text is None else [request.text]
    for path in (*models, *request.figures, *texts):
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in inside:
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not hidden and file.resolve() != target:
                yield file
