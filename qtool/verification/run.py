"""`qtool verify`: open, check the files, then the headers, then every number once, and judge."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qtool.artifacts.artifact import Artifact, one_by_one
from qtool.artifacts.entry import Entry
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.decoder_names import alone_as
from qtool.checkpoints.fused_experts import apart_as
from qtool.checkpoints.gguf_models import is_gguf
from qtool.checkpoints.padding import asked_in, in_view, not_compared, padded_as
from qtool.errors import QtoolError, SourceError
from qtool.messages.progress import Progress
from qtool.native.library import default_threads
from qtool.record import is_statistics
from qtool.scheme import GroupQuant, Scheme
from qtool.streaming.in_order import in_order
from qtool.streaming.weights import rows_of
from qtool.verification import (
    attention,
    classes,
    config,
    dense,
    digests,
    fused,
    generation,
    heads,
    inputs,
    misfit,
    model_settings,
    numbers,
    once,
    online,
    quantization_form,
    recorded,
    settings,
    skip_lists,
    stored_as,
    stored_biases,
    tensors,
    tokens,
    unlike_settings,
)
from qtool.verification.against import (
    beside,
    error,
    folds,
    made_of,
    source_tensors,
)
from qtool.verification.against.compared import Compared
from qtool.verification.against.one_by_one import one_by_one as source_one_by_one
from qtool.verification.against.scaling import compare
from qtool.verification.against.side_by_side import Floats
from qtool.verification.dense_list import check_dense_list
from qtool.verification.files import check_files
from qtool.verification.finding import Finding, Verdict, said_by
from qtool.verification.matrix import Measured, measure
from qtool.verification.stated import CHECK as STATED
from qtool.verification.stated import check_stated, statement_of
from qtool.verification.subject import Subject, subject_of
from qtool.verification.tensor_names import of_attention
from qtool.verification.zero_convention import check_convention

Check = Callable[[Subject], Iterator[Finding]]
NumericCheck = Callable[[Artifact, Sequence[Measured]], Iterator[Finding]]

_DATA = {"codes", "values"}  # checks that run where numbers can be read at all
_MOST_WEIGHTS = 1 << 29  # of matrices in memory at once, a byte or two each

# Checks of headers and configs, by id; they read no tensor larger than a few numbers, but for
# `head`, which compares two.
STRUCTURAL: tuple[tuple[str, Check], ...] = (
    (classes.CHECK, classes.check_class),
    (model_settings.CHECK, model_settings.check_model_settings),
    ("tensors", tensors.check_tensors),
    ("dtypes", tensors.check_dtypes),
    ("against", source_tensors.check_against),
    ("head", heads.check_head),
    ("quantized-config", config.check_said),
    (quantization_form.CHECK, quantization_form.check_form),
    (skip_lists.CHECK, check_dense_list),
    ("scheme", config.check_scheme),
    ("unquantized", config.check_share),
    (stored_as.CHECK, stored_as.check_stored_as),
    ("provenance", config.check_provenance),
    ("recorded", recorded.check_recorded),
    (online.CHECK, online.check_online),
    ("fused", fused.check_fused),
    ("global-scales", fused.check_merged),
    (stored_biases.CHECK, stored_biases.check_biases),
    ("kv-scales", attention.check_kv_scales),
    ("input-scales", inputs.check_inputs),
    ("tokenizer", tokens.check_tokenizer),
    (generation.CHECK, generation.check_generation),
)
# Checks of measured matrices.
NUMERIC: tuple[tuple[str, NumericCheck], ...] = (
    ("scales", numbers.check_scales),
    ("codes", numbers.check_codes),
    ("zeros", numbers.check_zeros),
    ("zero-convention", check_convention),
    ("g-idx", numbers.check_order),
    ("alike", numbers.check_kinds),
)


def verify_artifact(
    path: Path,
    *,
    against: Path | None = None,
    engine: str | None = None,
    tp: int = 1,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Verdict:
    """Everything that is wrong with an artifact, and with `against` how far each layer is off.

    Raises SourceError where there is nothing to look at; all else is in the verdict.
    """
    if not path.exists():
        raise SourceError(f"{path}: no such file or folder")
    if engine is not None:
        from qtool.verification.engines.rules import check_engine

        check_engine(engine, tp)
    with np.errstate(all="ignore"):  # numbers that are not finite are told of in sentences
        verdict = _verdict(path, against, engine, tp, progress, threads or default_threads())
    known: dict[Path, str] = {}
    said: list[Finding] = []
    checks = [*verdict.checks]
    if (recorded := digests.recorded_digests(path)) is not None:
        said += digests.check_digests(path, recorded, known)
        checks.append(digests.CHECK)
    if (statement := statement_of(path)) is not None:
        said += check_stated(path, statement, known)
        checks.append(STATED)
    elif (
        recorded is None
        and not _DATA.isdisjoint(checks)
        and verdict.unquantized_share not in (1, None)
    ):
        said.append(digests.none_recorded(path))
    return replace(verdict, findings=(*said, *verdict.findings), checks=tuple(checks))


def _verdict(
    path: Path,
    against: Path | None,
    engine: str | None,
    tp: int,
    progress: Progress | None,
    threads: int,
) -> Verdict:
    """All but what a statement beside the artifact says."""
    if is_gguf(path):
        from qtool.verification.gguf.checks import verify_gguf

        return verify_gguf(path, against, engine, tp, progress, threads)
    findings = list(check_files(path))
    checks = ["files"]
    artifact = None
    if all(finding.severity != "error" for finding in findings):
        checks.append("readable")
        try:
            artifact = Artifact.open(path)
        except QtoolError as problem:
            findings.append(Finding("error", "readable", "", str(problem)))
    checkpoint = None if artifact is None else artifact.checkpoint
    if checkpoint is not None and is_statistics(checkpoint.metadata, checkpoint.tensors):
        what = "statistics of a model, for `qtool quantize --stats`, and no model"
        findings.append(Finding("error", "readable", "", what))
        artifact = None
    if artifact is None:
        findings.append(Finding("note", checks[-1], "", "nothing else was checked"))
        return Verdict(str(path), "unknown", engine, tp, tuple(findings), (), tuple(checks), 0.0)
    with ExitStack() as stack:
        source = opened = None
        apart = one_by_one(artifact)
        subject = subject_of(path, apart, None)
        if against is not None:
            from qtool.quality.weights import open_weights
            from qtool.verification.against.rotated import as_rotated

            opened = stack.enter_context(open_weights(against))
            if isinstance(opened, Checkpoint):
                here = apart.checkpoint
                opened = apart_as(alone_as(opened, here.config, here.tensors), here.tensors)
                opened = _as_wide(opened, subject)
            source, said = as_rotated(artifact, opened)
            findings += said
            multiple = asked_in((artifact.provenance or {}).get("recipe"))
            if multiple and not isinstance(opened, Checkpoint):
                source = opened = None
                findings.append(Finding("note", "against", "", not_compared(multiple)))
        if apart is not artifact and source is not None:
            source = source_one_by_one(source)
        subject = replace(subject, source=source)
        checks += [config.SIDE, misfit.CHECK]
        unfit = [*misfit.check_shapes(subject, apart)]
        # Shapes may be wrong by what another file says.
        findings += once.untold(unfit, said_by(config.SIDE, config.check_side_files(subject)))
        findings += unfit
        for name, check in STRUCTURAL:
            if name != "against" or source is not None:
                checks.append(name)
                findings += once.untold(findings, said_by(name, check(subject)))
        no_sense = once.wrong_settings(findings)
        if opened is not None:
            checks += [unlike_settings.CHECK, unlike_settings.VOCABULARY]
            said_so = said_by(unlike_settings.CHECK, settings.check_settings(subject, opened))
            findings += once.untold(findings, said_so)
            findings += said_by(
                unlike_settings.VOCABULARY, settings.check_vocabulary(subject, opened)
            )
        norms = folds.changed_norms(subject)
        matrices, compared, failed = _measure_all(subject, norms, threads, progress)
        findings += misfit.unread(failed)
        checks.append("dense-values")
        findings += said_by("dense-values", dense.check_dense(subject))
        for name, numeric in NUMERIC:
            checks.append(name)
            findings += said_by(name, numeric(subject.artifact, matrices))
        if source is not None:
            checks += beside.CHECKS
            findings, compared = beside.judged(subject, norms, compared, findings)
        layers = error.layer_errors(subject, compared)
    wrong = any(one.severity == "error" for one in findings)
    if against is not None and (wrong or made_of.made_of_it(subject) is not True):
        findings += source_tensors.check_quantized(against)
    if engine is not None:
        from qtool.verification.engines.rules import engine_findings

        checks.append("engine")
        findings = once.with_engine(findings, engine_findings(artifact, engine, tp, no_sense))
    return Verdict(
        str(path),
        artifact.found.format,
        engine,
        tp,
        tuple(findings),
        tuple(layers),
        tuple(checks),
        None if subject.untold else _unquantized(subject.entries.values()),
    )


def _as_wide(source: Checkpoint, subject: Subject) -> Checkpoint:
    """The source padded as the artifact is; as it is where only a config says so."""
    padded = padded_as(source, subject.config)
    wide = in_view(padded)
    if wide is None or any(wide.tensors[n].shape == subject.shape_of(n) for n in wide.pads):
        return padded
    return source


def _measure_all(
    subject: Subject,
    norms: Mapping[str, Mapping[str, Floats]],
    threads: int,
    progress: Progress | None,
) -> tuple[list[Measured], list[Compared], list[Finding]]:
    """Read every quantized matrix once, one a thread in memory."""
    quantized = [e for e in subject.entries.values() if isinstance(e.scheme, Scheme)]
    measured: dict[int, Measured] = {}
    compared: dict[int, Compared] = {}
    failed: dict[int, Finding] = {}

    def work(number: int) -> None:
        entry = quantized[number]
        try:
            quant = subject.artifact.read(entry.name)
        except QtoolError as problem:
            why = str(problem.__cause__ or problem)  # without the path
            failed[number] = Finding("error", misfit.CHECK, entry.name, why)
            return
        assert isinstance(quant, GroupQuant)
        with np.errstate(all="ignore"):  # what is not finite is told of by the check of scales
            look(number, entry, quant)

    def look(number: int, entry: Entry, quant: GroupQuant) -> None:
        measured[number] = measure(subject.artifact, entry, quant)
        source = subject.source
        if source is None or entry.name not in source.tensors:
            return
        if tuple(source.tensors[entry.name].shape) == entry.shape:
            near = norms.get(folds.block_of(subject, entry.name), {})
            compared[number] = compare(entry.name, quant, rows_of(source, entry.name), near)

    def steps(count: int) -> Iterable[int]:
        return range(count) if progress is None else progress.blocks(count, "step")

    largest = max((entry.parameters for entry in quantized), default=1)
    threads = min(threads, max(1, _MOST_WEIGHTS // largest)) if subject.source else threads
    in_order(len(quantized), threads, lambda: work, steps)
    return _sorted(measured), _sorted(compared), _sorted(failed)


def _sorted(found: Mapping[int, Any]) -> list[Any]:
    return [found[number] for number in sorted(found)]


def _unquantized(entries: Collection[Entry]) -> float:
    """The share of the model's numbers, of which scales of the cache are none, stored dense."""
    own = [e for e in entries if not of_attention(e.name) or e.name.endswith(".sinks")]
    total = sum(entry.parameters for entry in own)
    return sum(e.parameters for e in own if e.scheme is None) / total if total else 0.0
