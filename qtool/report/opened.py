"""What opening an artifact tells: its tensors, a sample of its codes, its origin, how it loads."""

import math
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.artifacts.artifact import Artifact
from qtool.artifacts.untold import untold
from qtool.checkpoints.gguf_models import is_gguf
from qtool.formats.gguf_file import GgufFile
from qtool.gguf.inspect import GgufInspection
from qtool.gguf.open import open_source
from qtool.gguf_types import BY_NAME
from qtool.inspecting.inspect import inspect
from qtool.report import origin, sample
from qtool.report.facts import Loading
from qtool.report.names import decoder_prefix, place
from qtool.verification.finding import LayerError


@dataclass(frozen=True)
class Stored:
    """One tensor as it is stored; the same of both kinds of file."""

    name: str
    scheme: str
    quantized: bool
    parameters: int  # 0 where words are packed as no config says
    nbytes: int
    told: bool = True  # whether a config says how the matrix is packed that it is a part of


@dataclass(frozen=True)
class Opened:
    """What opening one artifact tells."""

    format: str
    size_bytes: int
    stored: tuple[Stored, ...]
    found: sample.Sample
    provenance: tuple[tuple[str, str], ...]
    origin: str
    recipe: dict[str, Any] | None
    recorded: tuple[LayerError, ...]
    loading: tuple[Loading, ...]
    recorded_of: frozenset[str] = frozenset()  # what the record says that its errors are of


def stored_of(path: Path) -> tuple[tuple[Stored, ...], int]:
    if is_gguf(path):
        with closing(open_source(path)) as source, GgufFile.open(source.path) as file:
            return _gguf_stored(file), file.size_bytes
    found = inspect(path)
    return _entries(found.artifact), found.size_bytes


def _entries(artifact: Artifact) -> tuple[Stored, ...]:
    packed = {name.rpartition(".")[0] for name in untold(artifact)}
    return tuple(
        Stored(entry.name, f"packed {entry.dtype}", True, 0, entry.nbytes, False)
        if entry.name.rpartition(".")[0] in packed
        else Stored(
            entry.name,
            f"dense {entry.dtype}" if entry.scheme is None else str(entry.scheme),
            entry.scheme is not None,
            entry.parameters,
            entry.nbytes,
        )
        for entry in artifact.entries.values()
    )


def _gguf_stored(file: GgufFile) -> tuple[Stored, ...]:
    return tuple(
        Stored(
            info.name,
            info.type.name if info.type.name in BY_NAME else f"dense {info.type.name}",
            info.type.name in BY_NAME,
            info.size,
            info.nbytes,
        )
        for info in file.tensors.values()
    )


def open_artifact(typed: str, path: Path) -> Opened:
    if is_gguf(path):
        with closing(open_source(path)) as source, GgufFile.open(source.path) as file:
            found = GgufInspection(file)
            stored = _gguf_stored(file)
            rows, said, recipe = origin.of_gguf(found)
            name = f"GGUF {file.version}" + (f" {found.file_type}" if found.file_type else "")
            return Opened(
                name, file.size_bytes, stored, sample.of_gguf(file, _kinds(stored)), tuple(rows),
                said, recipe, (),
                origin.loading(source, typed),
            )  # fmt: skip
    seen = inspect(path)
    artifact, stored = seen.artifact, _entries(seen.artifact)
    rows, said, recipe = origin.of_artifact(artifact)
    record = artifact.provenance or {}
    return Opened(
        artifact.found.label,
        seen.size_bytes,
        stored,
        sample.of_artifact(artifact, _kinds(stored)),
        tuple(rows),
        said,
        recipe,
        _recorded(record),
        origin.loading(artifact, typed),
        frozenset(str(row.get("of")) for row in _rows(record) if isinstance(row, dict)),
    )


def _kinds(stored: Iterable[Stored]) -> dict[str, str]:
    stored = tuple(stored)
    prefix = decoder_prefix((one.name, one.parameters) for one in stored)
    return {one.name: place(one.name, prefix).kind for one in stored}


def _rows(record: Mapping[str, Any]) -> list[Any]:
    listed = record.get("layers")
    return listed if isinstance(listed, list) else []


def _recorded(record: Mapping[str, Any]) -> tuple[LayerError, ...]:
    """The errors of layers that a record lists as objects, where it does."""
    found = []
    for row in _rows(record):
        if not isinstance(row, dict):
            return ()
        name, scheme, error = (row.get(key) for key in ("name", "scheme", "relative_error"))
        if not (isinstance(name, str) and isinstance(error, float) and math.isfinite(error)):
            return ()
        found.append(LayerError(name, str(scheme), error, None))
    return tuple(found)
