"""The same for GGUF files: the header against itself, its architecture and its tokenizer."""

from pathlib import Path

from qtool.errors import QtoolError
from qtool.formats.gguf_file import GgufFile
from qtool.gguf.inspect import GgufInspection
from qtool.gguf.open import open_source
from qtool.progress import Progress
from qtool.verification.finding import Finding, Verdict


def verify_gguf(
    path: Path, against: Path | None, engine: str | None, tp: int, progress: Progress | None
) -> Verdict:
    """All that is wrong with a GGUF model."""
    checks = ["readable"]
    findings: list[Finding] = []
    try:
        source = open_source(path)
    except QtoolError as error:
        findings.append(Finding("error", "readable", "", str(error)))
        return Verdict(str(path), "gguf", engine, tp, tuple(findings), (), tuple(checks), 0.0)
    try:
        if engine is not None:
            from qtool.verification.engine_rules import engine_findings

            checks.append("engine")
            findings += engine_findings(source, engine, tp)
        with GgufFile.open(source.path) as file:
            share = GgufInspection(file).unquantized_share
    finally:
        source.close()
    return Verdict(str(path), "gguf", engine, tp, tuple(findings), (), tuple(checks), share)
