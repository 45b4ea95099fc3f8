"""The provenance of an artifact as a file beside it: an in-toto Statement, with SLSA's predicate.

    {"_type": "https://in-toto.io/Statement/v1",
     "subject": [{"name": FILE, "digest": {"sha256": ...}}, ...],        every file of the artifact
     "predicateType": "https://slsa.dev/provenance/v1",
     "predicate": {"buildDefinition": ..., "runDetails": ...}}

It lies outside of the artifact, as OUT.provenance.json, because it knows the clock and the machine,
on which no byte of the artifact depends. The statement is not signed: any tool that signs in-toto
statements can do that.

Source: in-toto attestation framework, Statement v1; SLSA provenance v1.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qtool import __version__, hub
from qtool.checkpoints.checkpoint import hash_file
from qtool.checkpoints.gguf_models import is_gguf
from qtool.formats.safetensors_header import read_json
from qtool.provenance import record as provenance
from qtool.provenance.embedded import Embedded, read
from qtool.workspaces.naming import path_beside

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:qtool:quantize:1"
BUILDER = "urn:qtool"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SIDE = (".json", ".model", ".txt", ".jinja", ".tiktoken")  # of a source, beside its weights


@dataclass(frozen=True)
class Ran:
    """What only the run itself knows."""

    model: str  # as typed
    source: Path  # what that was resolved to
    threads: int
    seconds: Mapping[str, float] | None = None  # by stage; None where an earlier run made it
    peak_rss_bytes: int | None = None
    began: float | None = None  # since 1970
    imatrix: Path | None = None
    stats: Path | None = None
    beside: Mapping[str, str] | None = None  # digests of the source's files, from before the run
    gpu: str | None = None  # that did the work, if not the CPU


def text(artifact: Path, ran: Ran, out: Path) -> str:
    """The content of the file; out: the name that the artifact will have."""
    return json.dumps(statement(artifact, ran, out), indent=2, ensure_ascii=False) + "\n"


def write(artifact: Path, ran: Ran) -> Path:
    """Write the statement beside a finished artifact; one of an earlier try is replaced."""
    target = path_beside(artifact)
    content = text(artifact, ran, artifact)
    half = target.with_name(f".{target.name}.partial")
    try:
        half.write_text(content, encoding="utf-8")
        os.replace(half, target)
    finally:
        half.unlink(missing_ok=True)
    return target


def statement(artifact: Path, ran: Ran, out: Path) -> dict[str, Any]:
    """The whole of it."""
    record = read(artifact)
    return {
        "_type": STATEMENT,
        "subject": [_resource(name, path) for name, path in subjects(artifact, out).items()],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": _asked(record),
                "internalParameters": {},
                "resolvedDependencies": _inputs(record, ran),
            },
            "runDetails": {
                "builder": {"id": BUILDER, "version": {"qtool": record.version}},
                "metadata": _times(ran),
                "byproducts": [_measured(ran)],
            },
        },
    }


def subjects(artifact: Path, out: Path | None = None) -> dict[str, Path]:
    """Every file of an artifact, by its name beside the statement; out: where that is another."""
    name = artifact.name if out is None else out.name
    if artifact.is_file():
        return {name: artifact}
    return {
        f"{name}/{path.relative_to(artifact).as_posix()}": path
        for path in sorted(artifact.rglob("*"))
        if path.is_file()
    }


def unlike(artifact: Path) -> list[str]:
    """Files that are not as the statement beside the artifact says, missing and added ones too.

    FormatError where the statement is damaged, OSError where there is none.
    """
    said = _said(read_json(path_beside(artifact)))
    found = subjects(artifact)
    return sorted(
        name
        for name in said.keys() | found.keys()
        if name not in found or said.get(name) != hash_file(found[name])
    )


def source_files(artifact: Path) -> dict[str, str]:
    """SHA-256 of each file of the source, as the statement beside the artifact has it; or none."""
    beside = path_beside(artifact)
    if not beside.is_file():
        return {}
    predicate = read_json(beside).get("predicate")
    build = predicate.get("buildDefinition") if isinstance(predicate, dict) else None
    listed = build.get("resolvedDependencies") if isinstance(build, dict) else None
    return {name: one for name, one in _digests(listed).items() if not name.startswith("calib")}


def _said(content: Mapping[str, Any]) -> dict[str, str]:
    return _digests(content.get("subject"))


def _digests(listed: Any) -> dict[str, str]:
    """Resources with a name and a SHA-256."""
    found = {}
    for one in listed if isinstance(listed, list) else ():
        digest = one.get("digest") if isinstance(one, dict) else None
        if isinstance(digest, dict) and isinstance(one.get("name"), str):
            found[one["name"]] = str(digest.get("sha256"))
    return found


def _resource(name: str, path: Path) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": hash_file(path)}}


def _asked(record: Embedded) -> dict[str, Any]:
    """What the user decides, beside the inputs."""
    found: dict[str, Any] = {"recipe": dict(record.recipe), "source": record.source}
    if record.changes:
        found["set"] = list(record.changes)
    if record.max_shard_bytes is not None:
        found["max_shard_bytes"] = record.max_shard_bytes
    if record.requantized:
        found["requantize"] = True
    return found


def _inputs(record: Embedded, ran: Ran) -> list[dict[str, Any]]:
    """The source's files, the calibration tokens, and what was measured before."""
    found = []
    where = revision(ran)
    for name, digest in _digests_of(record, ran).items():
        one: dict[str, Any] = {"name": name, "digest": {"sha256": digest}}
        found.append({"uri": f"{where}/{name}", **one} if where is not None else one)
    if record.calibration is not None:
        digest = str(record.calibration.get("digest", "")).removeprefix("sha256:")
        found.append(
            {
                "name": "calibration tokens",
                "digest": {"sha256": digest},
                "annotations": {
                    key: value
                    for key, value in record.calibration.items()
                    if key not in ("digest", "environment")
                },
            }
        )
    for what, file in (("importance matrix", ran.imatrix), ("statistics", ran.stats)):
        if file is not None:
            annotations = {"file": file.name}
            found.append({**_resource(f"calibration {what}", file), "annotations": annotations})
    return found


def _digests_of(record: Embedded, ran: Ran) -> dict[str, str]:
    """SHA-256 of each file of the source, as the run read it: a folder may be another since."""
    known = {
        name: one.removeprefix("sha256:")
        for name, one in record.files.items()
        if name.endswith(".safetensors")  # of config.json the record has the meaning's digest
    }
    beside = ran.beside or {}
    files = _files(ran.source)
    if beside:
        files = [path for path in files if path.suffix == ".safetensors"]
    weights = {path.name: known.get(path.name) or hash_file(path) for path in files}
    return dict(sorted({**weights, **(known if beside else {}), **beside}.items()))


def digests_beside(source: Path) -> dict[str, str]:
    """SHA-256 of each file beside the weights of a folder; none of GGUF files."""
    if source.is_file() or is_gguf(source):
        return {}
    found = (path for path in _files(source) if path.suffix in _SIDE)
    return {path.name: hash_file(path) for path in found}


def _files(source: Path) -> list[Path]:
    """What an artifact is made of."""
    if source.is_file():
        return [source]
    if is_gguf(source):
        return sorted(source.glob("*.gguf"))
    return sorted(
        path
        for path in source.iterdir()
        if path.is_file() and path.suffix in (".safetensors", *_SIDE)
    )


def revision(ran: Ran) -> str | None:
    """The repository and commit that a download is of, such as hf://owner/name@COMMIT."""
    if Path(ran.model).exists():
        return None
    quantized = hub.parse_quantized(ran.model)
    found = hub.parse(ran.model) if quantized is None else quantized[0]
    if found is None:
        return None
    # The hub's cache calls the folder of a snapshot by its commit.
    parts = [part for part in ran.source.parts if _COMMIT.fullmatch(part)]
    return f"hf://{found.repository}@{parts[-1] if parts else found.revision}"


def _times(ran: Ran) -> dict[str, Any]:
    if ran.began is None:
        return {}
    total = (ran.seconds or {}).get("total", 0.0)
    return {"startedOn": _clock(ran.began), "finishedOn": _clock(ran.began + total)}


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _measured(ran: Ran) -> dict[str, Any]:
    """Environment and timings."""
    known: dict[str, Any] = {
        "environment": {"qtool": __version__, **provenance.with_gpu(ran.gpu)},
        "threads": ran.threads,
    }
    if ran.seconds is not None:
        known |= {"seconds": dict(ran.seconds), "peak_rss_bytes": ran.peak_rss_bytes}
    return {"name": "run", "annotations": known}
