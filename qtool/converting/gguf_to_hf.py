"""`qtool convert MODEL.gguf --to hf`: a Hugging Face checkpoint in a folder, with its tokenizer.

open -> plan (names, dtypes, config.json) -> stage a folder -> tensor by tensor: read, write
     -> config.json, tokenizer -> read back and compare -> qtool.json -> final name
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import __version__
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.gguf_models import is_gguf, source_files
from qtool.converting import resume
from qtool.converting.certificate import Certificate, Converted, Rounded, Squares
from qtool.converting.model import DTYPE_NAMES
from qtool.converting.resume import Place, at_once
from qtool.errors import FormatError, QtoolError, ResumeError
from qtool.formats.safetensors_file import (
    DTYPE_BYTES,
    Layout,
    StreamWriter,
    plan_shards,
    to_float32,
)
from qtool.formats.safetensors_header import read_json
from qtool.gguf.open import open_source
from qtool.gguf.source import GgufSource
from qtool.gguf.to_hf.files import (
    ONE_FILE,
    as_json,
    in_one_file,
    made_from,
    origin,
    quantized_again,
    side_files,
)
from qtool.gguf.to_hf.hf_tensor import HfTensor, put_back
from qtool.gguf.to_hf.model import HfModel, hf_model
from qtool.messages.progress import Progress
from qtool.provenance.digests import add_digests
from qtool.workspaces import program
from qtool.workspaces.identity import file_facts
from qtool.workspaces.journal import Journal
from qtool.workspaces.leftovers import made_beside
from qtool.workspaces.lock import empty
from qtool.workspaces.staging import check_space, with_notes
from qtool.workspaces.watched import marks

_AT_ONCE = 1 << 22  # numbers that are compared in one piece


# Where something of a layout is made, and what of it an earlier run has finished.
Making = Callable[[Layout], AbstractContextManager[Place]]


def convert_to_hf(
    source: GgufSource,
    out: Path,
    dtype: str | None,
    max_shard_bytes: int,
    progress: Progress,
    place: Making,
    digest: str | None = None,
) -> Converted:
    """Write the checkpoint to `out`; nothing is left under that name unless all succeeds.

    place: where it is made. digest: of the file, to be recorded.
    """
    model = hf_model(source, dtype)
    files = side_files(source, model)  # before the work: a tokenizer may be one nobody knows
    named = str(model.config["torch_dtype"])
    dequantized: dict[str, int] = {}
    for tensor in model.tensors:
        for kind in {t.type_in_file.name for t in tensor.in_file if t.type_in_file.weights > 1}:
            dequantized[kind] = dequantized.get(kind, 0) + 1
    specs = [spec for tensor in model.tensors for spec in tensor.specs]
    layout = plan_shards(specs, max_shard_bytes)
    with place(layout) as making, progress.stage("export"):
        folder = making.path
        _write(model, files, layout, folder, making.journal, progress)
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
        (folder / "qtool.json").write_bytes(as_json({"qtool": __version__, **record}))
        add_digests(folder)
        done = Converted(
            artifact=str(out),
            architecture=str(model.config["architectures"][0]),
            dtype=named,
            tensors=certificate.compared,
            size_bytes=layout.size,
            dequantized=dequantized,
            certificate=certificate,
            warnings=source.warnings,
        )
        making.conclude(asdict(done))
    return done


@contextmanager
def checkpoint_folder(
    path: Path, out: Path, progress: Progress, *, requantize: bool, fresh: bool = False
) -> Iterator[Path]:
    """`path` where it is a checkpoint; of a GGUF file one made beside `out`.

    That stays for as long as unfinished work on `out` does, and has the time of the file, so that
    it tells the file from others as the file itself would. fresh: it is made again in any case.

    UnsupportedError where the file is quantized, unless `requantize`.
    """
    if not is_gguf(path):
        yield path
        return
    files = source_files(path)
    before = marks(files)
    source = open_source(path)
    if (again := quantized_again(source, requantize)) is not None:
        progress.say(f"warning: {again}")
    facts = {**program.facts(), "source": [file_facts(file) for file in files]}
    with made_beside(out) as folder:
        made, note = folder / "model", folder / "made"
        if fresh or not _still_there(made, note, facts):
            empty(folder)
            check_space(out, in_one_file(hf_model(source, None)).size)
            convert_to_hf(source, made, None, ONE_FILE, progress, lambda _: at_once(made))
            for file, mark in before.items():
                if mark.state(file) != "same":
                    raise ResumeError(
                        f"{file}: was changed or removed while it was read; give the same command "
                        "again when it is as it is to be"
                    )
            # So that it is known again, as a file by its time, when it has to be made once more.
            newest = max(mark.time for mark in before.values())
            for file in made.iterdir():
                os.utime(file, ns=(newest, newest))
            note.write_text(json.dumps(facts | {"made": _facts(made)}), encoding="utf-8")
        try:
            yield made
        except QtoolError as error:
            if str(made) not in str(error):
                raise
            # Nobody knows the hidden folder; what is wrong with it is so of the file.
            said = str(error).replace(str(made), str(path))
            raise with_notes(type(error)(said), error) from error


def _still_there(made: Path, note: Path, facts: Mapping[str, Any]) -> bool:
    """Whether an earlier run has made the checkpoint of these files, and all of it is there."""
    if not made.is_dir() or not note.is_file():
        return False
    try:
        return read_json(note) == {**facts, "made": _facts(made)}
    except QtoolError:  # of a power cut
        return False


def _facts(folder: Path) -> list[list[Any]]:
    return [file_facts(file) for file in sorted(folder.iterdir())]


def _write(
    model: HfModel,
    files: Mapping[str, bytes],
    layout: Layout,
    folder: Path,
    journal: Journal | None,
    progress: Progress,
) -> None:
    steps = [(t.specs[0].name, {spec.name for spec in t.specs}) for t in model.tensors]
    with StreamWriter(folder, layout) as writer:
        done = len(resume.finished(journal, writer, steps))
        resume.say(progress, done, len(steps))
        for index in progress.blocks(len(steps), "tensor", first=done):
            for name, raw in model.tensors[index].arrays():
                writer.add(name, raw)
            resume.commit(journal, writer, steps[index])
        writer.close()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    written = Checkpoint.open(folder)
    for name, checksum in writer.checksums.items():
        if zlib.crc32(written.raw(name).data) != checksum:
            raise FormatError(f"{name}: reads back differently; the disk or memory is faulty")


def _rounded(model: HfModel, written: Checkpoint) -> Iterator[Rounded]:
    """The tensors whose numbers their dtype does not hold, and how far off they are."""
    for tensor in model.tensors:
        for number, spec in enumerate(tensor.specs):
            if tensor.copied(spec.dtype) or tensor.comes_back(spec.dtype):
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
                what = "whose products" if tensor.type.weights > 1 else "which"
                why = f"is {tensor.type.name}, {what} {named} does not hold"
                yield Rounded(spec.name, f"it is rounded to {named}", why, sums.relative_error)


def _values(tensor: HfTensor, number: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """One tensor's rows as the file has them, in pieces, each with the number of its first."""
    if tensor.module.rearranged:
        yield 0, put_back(tensor.source, tensor.module, tensor.groups)
        return
    rows, width = prod(tensor.specs[number].shape[:-1]), tensor.source.in_features
    step = max(1, _AT_ONCE // width)
    for first in range(0, rows, step):
        yield first, tensor.values(number, first, min(rows, first + step))
