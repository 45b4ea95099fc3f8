"""`qtool convert MODEL.gguf --to hf`: a Hugging Face checkpoint in a folder, with its tokenizer.

open -> plan (names, dtypes, config.json) -> stage a folder -> tensor by tensor: read, write
     -> config.json, tokenizer -> read back and compare -> qtool.json -> final name
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import __version__
from qtool.checkpoint import Checkpoint
from qtool.convert.certificate import Certificate, Rounded, Squares
from qtool.convert.model import DTYPE_NAMES
from qtool.errors import FormatError, QtoolError, UnsupportedError
from qtool.formats.safetensors_file import DTYPE_BYTES, StreamWriter, plan_shards, to_float32
from qtool.gguf.open import is_gguf, open_source
from qtool.gguf.source import GgufSource
from qtool.gguf.to_hf import HfModel, HfTensor, hf_model, put_back
from qtool.gguf.tokenizer_files import tokenizer_files
from qtool.gguf_types import BY_NAME
from qtool.runs.progress import Progress
from qtool.runs.staging import staged

try:
    import fcntl
except ImportError:  # Windows: what a killed run left is then left
    fcntl = None  # type: ignore[assignment]

_AT_ONCE = 1 << 22  # numbers that are compared in one piece
_GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Converted:
    """What was written."""

    artifact: str
    architecture: str
    dtype: str
    tensors: int
    size_bytes: int
    dequantized: dict[str, int]  # block type -> tensors that are plain numbers now
    certificate: Certificate
    warnings: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether every number is the one of the GGUF file."""
        return self.certificate.exact


def convert_to_hf(
    source: GgufSource,
    out: Path,
    dtype: str | None,
    max_shard_bytes: int,
    progress: Progress,
    digest: str | None = None,
) -> Converted:
    """Write the checkpoint to `out`; nothing is left under that name unless all succeeds.

    digest: of the file, to be recorded.
    """
    model = hf_model(source, dtype)
    files = side_files(source, model)  # before the work: a tokenizer may be one nobody knows
    named = str(model.config["torch_dtype"])
    dequantized: dict[str, int] = {}
    for tensor in model.tensors:
        if tensor.source.type.weights > 1:
            kind = tensor.source.type.name
            dequantized[kind] = dequantized.get(kind, 0) + 1
    with staged(out) as folder, progress.stage("export"):
        size = _write(model, files, folder, max_shard_bytes, progress)
        certificate = Certificate(
            source=origin(source) | {"digest": digest, "dtype": named},
            format="hf",
            layout="",
            compared=sum(len(tensor.specs) for tensor in model.tensors),
            matrices=sum(dequantized.values()),
            rounded=[*_rounded(model, Checkpoint.open(folder))],
            dropped=model.dropped,
        )
        record = {"made_from": made_from(source), "conversions": [certificate.json()]}
        (folder / "qtool.json").write_bytes(_json({"qtool": __version__, **record}))
    return Converted(
        artifact=str(out),
        architecture=str(model.config["architectures"][0]),
        dtype=named,
        tensors=certificate.compared,
        size_bytes=size,
        dequantized=dequantized,
        certificate=certificate,
        warnings=source.warnings,
    )


@contextmanager
def checkpoint_folder(
    path: Path, out: Path, progress: Progress, *, requantize: bool
) -> Iterator[Path]:
    """`path` where it is a checkpoint; of a GGUF file one made beside `out`, for as long as needed.

    UnsupportedError where the file is quantized, unless `requantize`.
    """
    if not is_gguf(path):
        yield path
        return
    source = open_source(path)
    quantized = [t for t in source.tensors if t.type.name in BY_NAME]
    if quantized and not requantize:
        raise UnsupportedError(
            f"{path}: {quantized[0].name} is quantized already, as {quantized[0].type.name}; "
            "quantizing it again loses more than quantizing the original: use the F16, BF16 or F32 "
            "file, or give --requantize"
        )
    if quantized:
        kinds = ", ".join(sorted({tensor.type.name for tensor in quantized}))
        progress.say(
            f"warning: the source is quantized already ({kinds}): quantizing it again loses more "
            "than quantizing the original does"
        )
    parents = out.absolute().parents
    near = next(parent for parent in parents if parent.is_dir())
    prefix = f".{out.name}.from-gguf."
    for left in near.glob(f"{escape(prefix)}*"):
        _sweep(left)
    with TemporaryDirectory(prefix=prefix, dir=near) as folder, _held(Path(folder)):
        made = Path(folder) / "model"
        convert_to_hf(source, made, None, 1 << 62, progress)
        yield made


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Whether no other process is at work in a folder; none is let in while the body lasts."""
    descriptor = os.open(folder, os.O_RDONLY)
    alone = fcntl is not None
    try:
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                alone = False
        yield alone
    finally:
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove the checkpoint of a run that was killed: it may be as large as the model."""
    with suppress(OSError), _held(folder) as alone:
        if alone and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)


def _write(
    model: HfModel,
    files: Mapping[str, bytes],
    folder: Path,
    max_shard_bytes: int,
    progress: Progress,
) -> int:
    specs = [spec for tensor in model.tensors for spec in tensor.specs]
    layout = plan_shards(specs, max_shard_bytes)
    with StreamWriter(folder, layout) as writer:
        for index in progress.blocks(len(model.tensors), "tensor"):
            for name, raw in model.tensors[index].arrays():
                writer.add(name, raw)
        writer.close()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    written = Checkpoint.open(folder)
    for name, checksum in writer.checksums.items():
        if zlib.crc32(written.raw(name).data) != checksum:
            raise FormatError(f"{name}: reads back differently; the disk or memory is faulty")
    return layout.size


def _rounded(model: HfModel, written: Checkpoint) -> Iterator[Rounded]:
    """The tensors whose numbers their dtype does not hold, and how far off they are."""
    for tensor in model.tensors:
        for number, spec in enumerate(tensor.specs):
            if tensor.copied(spec.dtype):
                continue
            sums = Squares()
            for first, values in _values(tensor, number):
                if len(spec.shape) == 2:
                    raw = written.part(spec.name, first, first + len(values))
                else:  # its first axis is no axis of rows
                    start = first * (spec.nbytes // prod(spec.shape[:-1]))
                    count = values.size * DTYPE_BYTES[spec.dtype]
                    raw = written.raw(spec.name)[start : start + count]
                sums.add(values, to_float32(raw, spec.dtype, values.shape))
            if not sums.same:
                named = DTYPE_NAMES[spec.dtype]
                what = "whose products" if tensor.source.type.weights > 1 else "which"
                why = f"is {tensor.source.type.name}, {what} {named} does not hold"
                yield Rounded(spec.name, f"it is rounded to {named}", why, sums.relative_error)


def _values(tensor: HfTensor, number: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """One tensor's rows as the file has them, in pieces, each with the number of its first."""
    if tensor.module.rows is not None:
        yield 0, put_back(tensor.source, tensor.module, tensor.groups)
        return
    rows, width = prod(tensor.specs[number].shape[:-1]), tensor.source.in_features
    step = max(1, _AT_ONCE // width)
    for first in range(0, rows, step):
        yield first, tensor.values(number, first, min(rows, first + step))


def side_files(source: GgufSource, model: HfModel) -> dict[str, bytes]:
    """config.json and the tokenizer, by file name."""
    try:
        tokenizer = tokenizer_files(source.metadata)
    except QtoolError as error:  # it knows the keys alone
        raise type(error)(f"{source.path}: {error}") from None
    generation = {key: value for key in _GENERATION if (value := model.config[key]) is not None}
    return {
        "config.json": _json(model.config),
        "generation_config.json": _json(generation),
        **tokenizer,
    }


def origin(source: GgufSource) -> dict[str, Any]:
    """What a certificate says of the file."""
    types = sorted({tensor.type.name for tensor in source.tensors if tensor.type.weights > 1})
    return {"format": "gguf", "layout": ", ".join(types), "digest": None, "group_size": None,
            "scale_dtype": None}  # fmt: skip


def made_from(source: GgufSource) -> dict[str, Any]:
    """The same for what is later made of the checkpoint."""
    name = source.metadata.get("general.name")
    return {
        "format": "gguf",
        "architecture": source.architecture,
        "name": None if name is None else str(name.value),
        "types": sorted({tensor.type.name for tensor in source.tensors}),
    }


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
