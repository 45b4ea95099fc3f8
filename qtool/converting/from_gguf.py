"""A GGUF file as a model to convert: its tensors under the names and in the order of a checkpoint.

Rows that llama.cpp keeps in another order are put back, codes and all.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np

from qtool.converting.blocks import BlockMatrix
from qtool.converting.model import DTYPES, Model, Tensor
from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import Kind
from qtool.formats.safetensors_file import parse_json
from qtool.gguf.from_gguf import gguf_source
from qtool.gguf.source import GgufSource
from qtool.gguf.to_hf.files import made_from, side_files
from qtool.gguf.to_hf.hf_tensor import HfTensor
from qtool.gguf.to_hf.model import HfModel, hf_model

PROVENANCE = "qtool.provenance"  # the key that holds what a folder has in qtool.json


def gguf_model(file: GgufFile) -> Model:
    """Reads the header and vectors; `file` stays open while tensors are read."""
    source = gguf_source(file)
    record = _provenance(source)
    made = _last(record)
    usual = DTYPES.get(str(made.get("dtype"))) or _plain_dtype(source)
    size = made.get("group_size")
    model = hf_model(source, usual=usual)
    if all(tensor.type.weights == 1 for tensor in model.tensors):
        raise UnsupportedError(
            f"{file.path}: no tensor is quantized; `qtool quantize` does that, from this file too"
        )
    tensors = [
        _tensor(tensor, number) for tensor in model.tensors for number in range(len(tensor.specs))
    ]
    types = sorted({t.type.name for t in source.tensors if t.type.weights > 1})
    return Model(
        path=file.path,
        format="gguf",
        layout=", ".join(types),
        config=model.config,
        dtype=model.dtype,
        tensors=tuple(sorted(tensors, key=lambda tensor: tensor.name)),
        digest=lambda: f"sha256:{digest(file)}",
        provenance={"made_from": made_from(source)} if record is None else record,
        side_files=partial(_side_files, source, model),
        group_size=size if isinstance(size, int) and not isinstance(size, bool) else None,
        dropped=model.dropped,
        warnings=source.warnings,
    )


def _tensor(tensor: HfTensor, number: int) -> Tensor:
    spec, type_ = tensor.specs[number], tensor.type
    if type_.weights == 1:
        raw = partial(tensor.bytes_of, number)
        return Tensor(spec.name, spec.shape, spec.dtype, spec.dtype, raw=raw)
    if len(spec.shape) > 2:
        named = ", ".join(one.name for one in tensor.in_file)
        raise UnsupportedError(
            f"{named}: is {spec.name} in the checkpoint, all experts in one tensor, which no "
            "other format has in codes; dequantize the file with --to hf, and quantize that"
        )
    read = partial(_read, tensor, number)
    return Tensor(spec.name, spec.shape, spec.dtype, type_.name, type_.weights, "float16", read)


def _read(tensor: HfTensor, number: int) -> BlockMatrix:
    rows = prod(tensor.specs[number].shape[:-1])
    if tensor.module.add or tensor.module.values is not None:
        raise UnsupportedError(f"{tensor.source.name}: blocks to which a number is added")
    if tensor.source.stored is not None:
        raise UnsupportedError(
            f"{tensor.source.name}: is {tensor.type.name} with a second scale by which it is "
            "multiplied, which becomes codes of no other format to the last bit; dequantize the "
            "file with --to hf"
        )
    if tensor.source.type != tensor.type:
        named = ", ".join(one.name for one in tensor.in_file)
        raise UnsupportedError(
            f"{tensor.source.name}: is put together of {named}, whose blocks lie across it or are "
            "of several types, so that they cannot be stored as they are; dequantize them with "
            "--to hf"
        )
    if tensor.module.columns is not None:
        raise UnsupportedError(
            f"{tensor.source.name}: blocks whose columns the checkpoint has in another order, so "
            "that they cannot be stored as they are; dequantize them with --to hf"
        )
    first = number * rows if len(tensor.specs) > 1 else 0
    raw = np.ascontiguousarray(tensor.source.read(first, first + rows))
    if tensor.module.rows is not None:
        order = np.arange(rows, dtype=np.int64)
        raw = raw[tensor.module.rows.inverse(order, tensor.groups, rows)]
    return BlockMatrix(raw, tensor.source.type)


def _side_files(source: GgufSource, model: HfModel) -> Iterable[tuple[str, bytes]]:
    for name, content in side_files(source, model).items():
        if name != "config.json":
            yield name, content


def _provenance(source: GgufSource) -> Mapping[str, Any] | None:
    """What qtool wrote of an earlier conversion."""
    value = source.metadata.get(PROVENANCE)
    if value is None or value.kind is not Kind.STRING:
        return None
    try:
        found: Mapping[str, Any] = parse_json(value.value.encode(), PROVENANCE)
    except (FormatError, UnicodeEncodeError):
        return None
    return found


def _last(record: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What the last conversion says of its source."""
    made = record.get("conversions") if record is not None else None
    last = made[-1] if isinstance(made, list) and made else {}
    found = last.get("from") if isinstance(last, dict) else None
    return found if isinstance(found, dict) else {}


def _plain_dtype(source: GgufSource) -> str | None:
    """The dtype of the embedding, unless that is quantized."""
    names = {"F16": "F16", "BF16": "BF16", "F32": "F32"}
    types = {tensor.name: tensor.type.name for tensor in source.tensors}
    return names.get(types.get("token_embd.weight", ""))


def digest(file: GgufFile) -> str:
    """SHA-256 of a model's only file, or over the digests of its parts."""
    digests = []
    for path in file.files:
        with path.open("rb") as part:
            digests.append(hashlib.file_digest(part, "sha256").hexdigest())
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(f"{one}\n" for one in digests).encode()).hexdigest()
