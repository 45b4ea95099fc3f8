"""What `qtool verify` finds."""

from pathlib import Path

from qtool.verification.finding import Finding
from qtool.verification.run import verify_artifact


def serious(path: Path, engine: str | None = None) -> list[Finding]:
    verdict = verify_artifact(path, engine=engine, threads=1)
    return [f for f in verdict.findings if f.severity != "note"]
