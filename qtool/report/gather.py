"""From files to facts: everything that the page says, read or measured once.

An artifact that cannot be opened is in the report, too, with what verifying says of it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qtool import __version__
from qtool.errors import QtoolError, UsageError
from qtool.messages.progress import Progress
from qtool.messages.summary import OUTPUTS, WEIGHTS
from qtool.report import again, measured
from qtool.report.facts import (
    ArtifactFacts,
    Component,
    Quality,
    Reference,
    Report,
    Storage,
)
from qtool.report.names import COMPONENTS, decoder_prefix, place
from qtool.report.opened import Opened, Stored, open_artifact, stored_of
from qtool.report.sample import NO_SAMPLE
from qtool.verification.finding import LayerError, Verdict
from qtool.verification.run import verify_artifact

if TYPE_CHECKING:
    from qtool.cuda.device import Device

UNKNOWN = "unknown"  # the format of what cannot be opened
_COMPARED = "Of each layer's weights against the source, |W - Q| / |W|."
_RECORDED = {
    OUTPUTS: "As the artifact records them: of each layer's output on the calibration data.",
    WEIGHTS: "As the artifact records them: of each layer's weights.",
    "": "As the artifact records them: of each layer's output on the calibration data, or of its "
    "weights where no sums of its inputs were needed.",
}


@dataclass(frozen=True)
class Request:
    """What the user asked for; names as typed, and what they were resolved to."""

    artifacts: tuple[tuple[str, Path], ...]
    against: tuple[str, Path] | None
    text: Path | None
    windows: int | None
    length: int
    figures: tuple[Path, ...]  # files of `qtool eval --json`
    commands: tuple[str, ...]
    threads: int
    known: Mapping[str, Quality] = field(default_factory=dict)  # measured on `text` before, by path
    device: "Device | None" = None  # that measures; None: the CPU


def gather(request: Request, progress: Progress) -> Report:
    """The whole report."""
    labels = unique_labels([typed for typed, _ in request.artifacts])
    named = dict(zip((typed for typed, _ in request.artifacts), labels, strict=True))
    # What can be refused is refused before hours of reading.
    figures = measured.read_figures(request.figures, named)
    if request.text is not None:
        _check_text(request.text, request)
    reference = None
    if request.against is not None:
        reference = _reference(*request.against)
    artifacts = []
    for (typed, path), label in zip(request.artifacts, labels, strict=True):
        progress.say(f"checking {label}")
        with progress.stage("verify"):
            verdict = verify_artifact(
                path,
                against=None if request.against is None else request.against[1],
                progress=progress,
                threads=request.threads,
            )
        with progress.stage("look"):
            artifacts.append(_facts(typed, path, label, verdict, request.against is not None))
    figures, others = measured.of_these(figures, {one.label: one.size_bytes for one in artifacts})
    for sentence in others:
        progress.say(f"note: {sentence}")
    there = [one.label for one in artifacts if one.format != UNKNOWN]
    rows, said = _quality(request, figures, named, there, progress)
    return Report(
        __version__,
        reference,
        tuple(artifacts),
        rows,
        " ".join([said, *others]),
        measured.find_sweep(artifacts, rows),
        request.commands,
    )


def unique_labels(paths: Sequence[str]) -> list[str]:
    """The last part of each path; longer ends where two agree."""
    parts = [[part for part in path.split("/") if part] or [path] for path in paths]
    taken = [1] * len(parts)
    for _ in range(max(map(len, parts), default=0)):
        named = ["/".join(part[-count:]) for part, count in zip(parts, taken, strict=True)]
        for index, label in enumerate(named):
            if named.count(label) > 1:
                taken[index] += 1
    named = ["/".join(part[-count:]) for part, count in zip(parts, taken, strict=True)]
    if len(set(named)) < len(named):
        raise UsageError("an artifact is named twice; name each once")
    return named


def _reference(typed: str, path: Path) -> Reference:
    stored, size = stored_of(path)
    parameters = _parameters(stored)
    return Reference(typed, size, parameters, _components(stored))


def _parameters(stored: Iterable[Stored]) -> int:
    """How many there are; 0 where some are packed in no known way."""
    stored = tuple(stored)
    return sum(one.parameters for one in stored) if all(one.told for one in stored) else 0


def _components(stored: Iterable[Stored]) -> tuple[Component, ...]:
    stored = tuple(stored)
    prefix = decoder_prefix((one.name, one.parameters or one.nbytes) for one in stored)
    parts: dict[str, list[Stored]] = {name: [] for name in COMPONENTS}
    for one in stored:
        parts[place(one.name, prefix).component].append(one)
    sizes = {name: sum(one.nbytes for one in members) for name, members in parts.items()}
    return tuple(
        Component(name, _parameters(parts[name]), sizes[name]) for name in parts if sizes[name]
    )


def _storage(stored: Iterable[Stored]) -> tuple[Storage, ...]:
    groups: dict[str, list[Stored]] = defaultdict(list)
    for one in stored:
        groups[one.scheme].append(one)
    rows = [
        Storage(
            scheme,
            len(members),
            sum(one.parameters for one in members),
            sum(one.nbytes for one in members),
        )
        for scheme, members in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.scheme)))


def _facts(typed: str, path: Path, label: str, verdict: Verdict, compared: bool) -> ArtifactFacts:
    try:
        opened = open_artifact(typed, path)
    except QtoolError as error:
        said = "It cannot be opened; the checks say why."
        if not any(finding.severity == "error" for finding in verdict.findings):
            said = f"It cannot be opened: {error}."
        opened = Opened(UNKNOWN, _weight_bytes(path), (), NO_SAMPLE, (), said, None, (), ())
    parameters = _parameters(opened.stored)
    nbytes = sum(one.nbytes for one in opened.stored)
    dense = sum(one.parameters for one in opened.stored if not one.quantized)
    layers, where = _layers(verdict, opened, compared)
    return ArtifactFacts(
        path=typed,
        label=label,
        format=opened.format,
        size_bytes=opened.size_bytes,
        parameters=parameters,
        bits_per_weight=8 * nbytes / parameters if parameters else 0.0,
        unquantized_share=dense / parameters if parameters else 0.0,
        storage=_storage(opened.stored),
        components=_components(opened.stored),
        provenance=opened.provenance,
        origin=opened.origin,
        layers=layers,
        layers_from=where,
        codes=opened.found.codes,
        scales=opened.found.scales,
        not_sampled=opened.found.left_out,
        loading=opened.loading,
        findings=verdict.findings,
        checks=verdict.checks,
        recipe=opened.recipe,
        commands=tuple(again.commands(path, typed)),
    )


def _weight_bytes(path: Path) -> int:
    """Of what cannot be opened: the bytes of its weight files."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files if file.is_file())


def _layers(verdict: Verdict, opened: Opened, compared: bool) -> tuple[tuple[LayerError, ...], str]:
    """Those whose error is a number, and a sentence on where they come from."""
    layers = verdict.layers or opened.recorded
    of = next(iter(opened.recorded_of)) if len(opened.recorded_of) == 1 else ""
    said = _COMPARED if verdict.layers else _RECORDED.get(of, _RECORDED[""])
    if not layers and compared:
        return (), "No layer could be compared with the source."
    if not layers:
        return (), "The source was not given, and the artifact records no errors; give --against."
    finite = tuple(layer for layer in layers if math.isfinite(layer.relative_error))
    if len(finite) < len(layers):
        said += f" Of {len(layers) - len(finite)} layers it is no finite number."
    return finite, said


def _check_text(text: Path, request: Request) -> None:
    from qtool.quality.evaluate import Protocol, check_protocol

    check_protocol(Protocol("plain", text, request.windows, request.length))


def _quality(
    request: Request,
    figures: Sequence[Quality],
    labels: Mapping[str, str],
    there: Sequence[str],
    progress: Progress,
) -> tuple[tuple[Quality, ...], str]:
    """The rows, and a sentence on where they come from."""
    rows = list(figures)
    said = []
    if rows:
        said.append(f"Read from {', '.join(path.name for path in request.figures)}.")
    if request.text is not None:
        now, failed = _measure(request, request.text, labels, there, progress)
        rows += now
        said += [*(["Measured for this page."] if now else []), *failed]
    if not said:
        said.append("Nothing was measured; give --text FILE, or figures of qtool eval with --eval.")
    return measured.with_front(rows), " ".join(said)


def _measure(
    request: Request,
    text: Path,
    labels: Mapping[str, str],
    there: Sequence[str],
    progress: Progress,
) -> tuple[list[Quality], list[str]]:
    """Each artifact by itself, so that a broken one does not take the others with it."""
    from qtool.cuda.device import explained
    from qtool.quality.evaluate import Protocol, evaluate

    protocol = Protocol("plain", text, request.windows, request.length)
    against = None if request.against is None else request.against[1]
    rows, failed = [], []
    for typed, path in request.artifacts:
        if labels[typed] not in there:
            failed.append(f"{labels[typed]} was not measured: it cannot be opened.")
            continue
        if typed in request.known:
            rows.append(replace(request.known[typed], artifact=labels[typed]))
            continue
        progress.say(f"measuring {labels[typed]} on {text.name}")
        try:
            with explained(request.device, "the head and its logits"):
                (found,) = evaluate(
                    [path], against, protocol, request.threads, progress, device=request.device
                )
        except QtoolError as error:
            failed.append(f"{labels[typed]} could not be measured: {error}.")
            progress.say(f"warning: {failed[-1]}")
            continue
        rows.append(measured.quality_of(typed, found.json(), labels))
    return rows, failed
