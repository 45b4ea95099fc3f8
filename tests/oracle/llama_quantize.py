"""llama-quantize and llama-imatrix, and what they made, remembered between runs.

QTOOL_ORACLE_LLAMA names the folder of llama.cpp's tools. QTOOL_ORACLE_CACHE may name a folder for
what is slow to make: importance matrices, and digests of quantized files, by what went in.
"""

import hashlib
import json
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qtool.formats.gguf_values import Kind, Value
from qtool.native.library import default_threads
from support.gguf import gguf_files


def tools() -> Path | None:
    """The folder of the tools, if the environment says so."""
    named = os.environ.get("QTOOL_ORACLE_LLAMA")
    return Path(named) if named else None


@dataclass(frozen=True)
class File:
    """A GGUF file by its header, and a digest of each tensor's bytes."""

    metadata: dict[str, Any]  # in file order: kind, value or digest of a long one
    tensors: list[list[Any]]  # in file order: name, shape, type, offset, digest
    padding: str  # digest of everything behind the header


def described(path: Path) -> File:
    """What is compared of a file."""
    header = gguf_files.header(path)
    raw = gguf_files.data(path)
    tensors = []
    for info in header.tensors:
        offset = info.start - header.data_start
        digest = hashlib.sha256(raw[offset : offset + info.nbytes]).hexdigest()
        tensors.append([info.name, list(info.shape), info.type.name, offset, digest])
    metadata = {key: _stated(value) for key, value in header.metadata.items()}
    return File(metadata, tensors, hashlib.sha256(raw).hexdigest())


def _stated(value: Value) -> list[Any]:
    if value.kind is not Kind.ARRAY:
        return [value.kind.name, value.value]
    assert value.element is not None
    text = json.dumps(list(value.value)).encode("utf-8", "surrogateescape")
    return [value.kind.name, value.element.name, hashlib.sha256(text).hexdigest()]


def run(tool: str, *words: object) -> None:
    """Run a tool; subprocess.CalledProcessError where it fails."""
    folder = tools()
    assert folder is not None
    subprocess.run(
        [folder / tool, *map(str, words)],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        check=True,
    )


def quantized(
    source: Path, type_: str, imatrix: Path | None, folder: Path, *more: str
) -> File | None:
    """What llama-quantize makes of `source`, with `more` options; None where it refuses."""
    key = hashlib.sha256(" ".join((type_, *more)).encode())
    for path in (source, imatrix):
        if path is not None:
            key.update(hashlib.file_digest(path.open("rb"), "sha256").digest())
    remembered = _kept_in(folder) / f"{key.hexdigest()}.json"
    if remembered.exists():
        known = json.loads(remembered.read_text())
        return None if known is None else File(**known)
    out = folder / "theirs.gguf"
    options = [*more] if imatrix is None else [*more, "--imatrix", imatrix]
    try:
        run("llama-quantize", *options, source, out, type_, default_threads())
        found = described(out)
    except subprocess.CalledProcessError as error:
        said = error.stderr + error.stdout
        assert b"imatrix" in said or b"no tensor type fallback" in said, said[-1000:]
        found = None
    out.unlink(missing_ok=True)
    remembered.write_text(json.dumps(None if found is None else asdict(found)))
    return found


def imatrix(model: Path, text: Path, folder: Path, chunks: int = 4) -> Path:
    """An importance matrix that llama-imatrix measured."""
    digest = hashlib.file_digest(model.open("rb"), "sha256").hexdigest()
    out = _kept_in(folder) / f"imatrix-{digest}.gguf"
    if not out.exists():
        partial = out.with_suffix(".part.gguf")
        words = ("-m", model, "-f", text, "-o", partial, "--chunks", chunks, "-c", 256)
        run("llama-imatrix", *words, "-t", default_threads())
        partial.rename(out)
    return out


def _kept_in(folder: Path) -> Path:
    named = os.environ.get("QTOOL_ORACLE_CACHE")
    found = Path(named) if named else folder
    found.mkdir(parents=True, exist_ok=True)
    return found
