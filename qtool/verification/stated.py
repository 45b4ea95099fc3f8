"""Whether a file is still the one that the statement beside the artifact was made of.

OUT.provenance.json (qtool.provenance.statement) has the SHA-256 of every file of OUT. A bit that
turned since, which no rule of a format tells from a weight, is found by nothing else. The statement
may come from anybody: its names are looked up in the artifact's own folder, and nowhere else.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from qtool.checkpoints.checkpoint import hash_file
from qtool.errors import QtoolError
from qtool.formats.safetensors_header import read_json
from qtool.record import CARD
from qtool.verification.finding import Finding, Severity
from qtool.workspaces.naming import path_beside

CHECK = "statement"
SHA256 = re.compile("[0-9a-f]{64}")
MISSING = "no such file"
_SHOWN = 100  # characters of what a stranger wrote


def statement_of(artifact: Path) -> Path | None:
    """The statement that lies beside an artifact, if there is one."""
    beside = path_beside(Path(os.path.abspath(artifact)))
    return beside if beside.is_file() else None


def check_stated(artifact: Path, statement: Path, known: dict[Path, str]) -> Iterator[Finding]:
    """Compare the digest of each file that is stated with that of the file that is there.

    known: digests by path, which it adds to: a file that is named a million times is read once.
    """
    try:
        listed = read_json(statement).get("subject")
    except QtoolError as problem:
        yield Finding("error", CHECK, statement.name, f"{problem}; remove it, or fetch it again")
        return
    if not isinstance(listed, list) or not listed:
        yield Finding(
            "warning", CHECK, statement.name,
            f"{statement.name} states no file's SHA-256 (`subject`), as `quantize --provenance` "
            "does: nothing was compared with it",
        )  # fmt: skip
        return
    for subject in listed:
        yield from _compared(artifact, statement.name, subject, known)


def _compared(
    artifact: Path, statement: str, subject: Any, known: dict[Path, str]
) -> Iterator[Finding]:
    """One subject: {"name": "OUT/FILE", "digest": {"sha256": ...}}; of a GGUF file "OUT.gguf"."""
    name = subject.get("name") if isinstance(subject, dict) else None
    digest = subject.get("digest") if isinstance(subject, dict) else None
    said = digest.get("sha256") if isinstance(digest, dict) else None
    if not isinstance(name, str) or not isinstance(said, str) or not SHA256.fullmatch(said):
        yield Finding(
            "error", CHECK, statement,
            f"{statement} has a subject without a name and a SHA-256: {str(subject)[:_SHOWN]!r}",
        )  # fmt: skip
        return
    path = place(artifact, name)
    if path is None:
        yield Finding(
            "error", CHECK, statement,
            f"{statement} states the SHA-256 of {name[:_SHOWN]!r}, which is no file of "
            f"{artifact.name}; it belongs to another artifact, or somebody changed it",
        )  # fmt: skip
        return
    if path not in known:
        known[path] = found_digest(path)
    if (found := known[path]) == said:
        return
    # Both stand where the artifact was given: the statement calls it what it was called then.
    shown = artifact / str(path.relative_to(artifact))[:_SHOWN]
    if SHA256.fullmatch(found):
        wrong = (
            f"is not the file that {statement} was written for: its SHA-256 is {found}, stated is "
            f"{said}; fetch or make it again, or remove the statement if the file was changed on "
            "purpose"
        )
    elif found == MISSING:
        wrong = (
            f"is missing: {statement} states its SHA-256; fetch or make it again, or remove the "
            "statement if the file was removed on purpose"
        )
    else:
        wrong = f"cannot be compared with {statement}: {found}"
    severity: Severity = "warning" if path.name == CARD else "error"
    yield Finding(severity, CHECK, str(shown), f"{shown} {wrong}")


def found_digest(path: Path) -> str:
    """Its SHA-256, or why it has none."""
    try:
        return hash_file(path) if path.is_file() else MISSING
    except (QtoolError, OSError) as problem:
        return str(problem)


def place(artifact: Path, name: str) -> Path | None:
    """Where a subject lies; None where that is not in the artifact.

    The first part is what the artifact was called then: it may have been renamed since.
    """
    parts = PurePosixPath(name).parts
    if "\0" in name or "\\" in name or name.startswith("/") or ".." in parts:
        return None
    if artifact.is_dir():
        return artifact.joinpath(*parts[1:]) if len(parts) > 1 else None
    return artifact if len(parts) == 1 else None
