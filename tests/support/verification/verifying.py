"""What `qtool verify` finds."""

import json
from collections.abc import Sequence
from pathlib import Path

from qtool.hub import tiny_folder
from qtool.record import FILE_NAME, FILES
from qtool.verification.finding import Finding
from qtool.verification.run import verify_artifact


def serious(path: Path, engine: str | None = None) -> list[Finding]:
    verdict = verify_artifact(path, engine=engine, threads=1)
    return [f for f in verdict.findings if f.severity != "note"]


def forget_digests(folder: Path) -> None:
    """Leave the other checks to find what is wrong."""
    if (folder / FILE_NAME).is_file():
        record = json.loads((folder / FILE_NAME).read_text())
        del record[FILES]
        (folder / FILE_NAME).write_text(json.dumps(record))


def but_digests(findings: Sequence[Finding]) -> list[Finding]:
    """Without the note that nothing is recorded."""
    return [f for f in findings if (f.severity, f.check) != ("note", "digests")]


def errors_of(artifact: Path) -> list[Finding]:
    """For transformers, without warnings."""
    findings = verify_artifact(artifact, engine="transformers").findings
    return [finding for finding in findings if finding.severity == "error"]


def beside_tiny(path: Path) -> list[Finding]:
    """What is serious of an artifact of `tiny`, with its source."""
    verdict = verify_artifact(path, against=tiny_folder(), threads=1)
    return [f for f in verdict.findings if f.severity != "note"]
