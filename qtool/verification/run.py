"""`qtool verify`: open, check the files, then the headers, then every number once, and judge."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from qtool.artifact import Artifact, Entry
from qtool.errors import QtoolError, SourceError
from qtool.gguf.open import is_gguf
from qtool.progress import Progress
from qtool.scheme import GroupQuant, Scheme
from qtool.verification import attention, config, dense, fused, heads, numbers, tensors, tokens
from qtool.verification.files import check_files
from qtool.verification.finding import Finding, LayerError, Verdict
from qtool.verification.matrix import Measured, measure
from qtool.verification.subject import Subject, subject_of

Check = Callable[[Subject], Iterator[Finding]]
NumericCheck = Callable[[Artifact, Sequence[Measured]], Iterator[Finding]]

# Checks of headers and configs, by id; they read no tensor larger than a few numbers, but for
# `head`, which compares two.
STRUCTURAL: tuple[tuple[str, Check], ...] = (
    ("tensors", tensors.check_tensors),
    ("against", tensors.check_against),
    ("head", heads.check_head),
    ("dense-list", config.check_dense_list),
    ("scheme", config.check_scheme),
    ("unquantized", config.check_share),
    ("side-config", config.check_side_files),
    ("provenance", config.check_provenance),
    ("fused", fused.check_fused),
    ("global-scales", fused.check_merged),
    ("kv-scales", attention.check_kv_scales),
    ("tokenizer", tokens.check_tokenizer),
)
# Checks of measured matrices.
NUMERIC: tuple[tuple[str, NumericCheck], ...] = (
    ("scales", numbers.check_scales),
    ("codes", numbers.check_codes),
    ("zeros", numbers.check_zeros),
    ("zero-convention", numbers.check_convention),
    ("g-idx", numbers.check_order),
)


def verify_artifact(
    path: Path,
    *,
    against: Path | None = None,
    engine: str | None = None,
    tp: int = 1,
    progress: Progress | None = None,
) -> Verdict:
    """Everything that is wrong with an artifact, and with `against` how far each layer is off.

    Raises SourceError where there is nothing to look at; all else is in the verdict.
    """
    if not path.exists():
        raise SourceError(f"{path}: no such file or folder")
    if is_gguf(path):
        from qtool.verification.gguf import verify_gguf

        return verify_gguf(path, against, engine, tp, progress)
    findings = list(check_files(path))
    checks = ["files"]
    artifact = None
    if all(finding.severity != "error" for finding in findings):
        checks.append("readable")
        try:
            artifact = Artifact.open(path)
        except QtoolError as error:
            findings.append(Finding("error", "readable", "", str(error)))
    if artifact is None:
        findings.append(Finding("note", checks[-1], "", "nothing else was checked"))
        return Verdict(str(path), "unknown", engine, tp, tuple(findings), (), tuple(checks), 0.0)
    with ExitStack() as stack:
        source = None
        if against is not None:
            from qtool.quality.weights import open_weights

            source = stack.enter_context(open_weights(against))
        subject = subject_of(path, artifact, source)
        checks.append("shapes")
        findings += [Finding("error", "shapes", n, why) for n, why in subject.broken.items()]
        for name, check in STRUCTURAL:
            if name != "against" or source is not None:
                checks.append(name)
                findings += check(subject)
        matrices, layers, failed = _measure_all(subject, progress)
        findings += failed
        checks.append("dense-values")
        findings += dense.check_dense(subject)
        for name, numeric in NUMERIC:
            checks.append(name)
            findings += numeric(artifact, matrices)
    if engine is not None:
        from qtool.verification.engine_rules import engine_findings

        checks.append("engine")
        findings += engine_findings(artifact, engine, tp)
    return Verdict(
        str(path),
        artifact.found.format,
        engine,
        tp,
        tuple(findings),
        tuple(layers),
        tuple(checks),
        _unquantized(subject.entries.values()),
    )


def _measure_all(
    subject: Subject, progress: Progress | None
) -> tuple[list[Measured], list[LayerError], list[Finding]]:
    """Read every quantized matrix once."""
    quantized = [e for e in subject.entries.values() if isinstance(e.scheme, Scheme)]
    matrices: list[Measured] = []
    failed: list[Finding] = []
    steps = range(len(quantized)) if progress is None else progress.blocks(len(quantized), "matrix")
    for number in steps:
        entry = quantized[number]
        try:
            quant = subject.artifact.read(entry.name)
        except QtoolError as error:
            failed.append(Finding("error", "shapes", entry.name, str(error)))
            continue
        assert isinstance(quant, GroupQuant)
        matrices.append(measure(subject.artifact, entry, quant))
    return matrices, [], failed


def _unquantized(entries: Collection[Entry]) -> float:
    """The share of the numbers that are stored dense."""
    total = sum(entry.parameters for entry in entries)
    return sum(e.parameters for e in entries if e.scheme is None) / total if total else 0.0
