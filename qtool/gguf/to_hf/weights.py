"""A GGUF file as something that transformers can run: names, row order and config of a checkpoint.

Tensors are dequantized to float32 when they are read, one at a time; config.json and the tokenizer,
which transformers opens by path, are written into a temporary folder. Nothing else touches the
disk.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.errors import QtoolError
from qtool.formats.safetensors_header import TensorInfo, TensorSpec
from qtool.gguf.source import GgufSource, SourceTensor
from qtool.gguf.to_hf.files import side_files
from qtool.gguf.to_hf.hf_tensor import HfTensor, put_back
from qtool.gguf.to_hf.joined import Part
from qtool.gguf.to_hf.model import HfModel, hf_model
from qtool.gguf_types import BlockType


@dataclass(frozen=True)
class GgufWeights:
    """See qtool.streaming.weights.Weights; every tensor is float32."""

    path: Path
    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    _places: Mapping[str, tuple[HfTensor, int]]  # and which of the stacked parts

    def types(self) -> Mapping[str, BlockType]:
        """How the file stores each tensor."""
        return {name: tensor.type for name, (tensor, _) in self._places.items()}

    def stored_rows(self, name: str) -> tuple[BlockType, NDArray[np.uint8]] | None:
        """A matrix in blocks, uint8 [out, bytes of a row], in the checkpoint's order of rows; None
        where it is stored as floats, or holds other numbers than the checkpoint."""
        tensor, number = self._places[name]
        shape, module = self.tensors[name].shape, tensor.module
        if len(shape) != 2 or tensor.source.type.weights == 1 or module.add:
            return None
        if module.columns is not None or module.values is not None:
            return None
        start = number * shape[0] if len(tensor.specs) > 1 else 0
        rows = tensor.source.read(start, start + shape[0])
        if module.rows is not None:
            order = np.arange(shape[0], dtype=np.int64)
            rows = rows[module.rows.inverse(order, tensor.groups, shape[0])]
        return tensor.source.type, rows

    def file_of(self, name: str) -> Path:
        """The GGUF file."""
        return self.path

    def part(self, name: str, first: int, last: int) -> NDArray[np.uint8]:
        """The float32 bytes of a tensor, from `first` to `last` of its leading axis."""
        tensor, number = self._places[name]
        shape = self.tensors[name].shape
        if not tensor.module.rearranged and len(shape) > 1:
            each = prod(shape[1:-1])  # rows to one of the leading axis
            values = tensor.values(number, first * each, last * each)
        else:
            values = self.float32(name)[first:last]
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def array(self, name: str) -> NDArray[Any]:
        """A tensor, float32."""
        return self.float32(name)

    def float32(self, name: str) -> NDArray[np.float32]:
        """A tensor of its own shape."""
        tensor, number = self._places[name]
        if tensor.module.rearranged:
            return put_back(tensor.source, tensor.module, tensor.groups).reshape(
                self.tensors[name].shape
            )
        shape = self.tensors[name].shape
        return tensor.values(number, 0, prod(shape[:-1])).reshape(shape)


@contextmanager
def gguf_weights(source: GgufSource) -> Iterator[tuple[GgufWeights, GgufSource]]:
    """The model to run, and the source with the checkpoint's names as origins of its tensors."""
    model = hf_model(source, "float32")
    places = {
        spec.name: (tensor, number)
        for tensor in model.tensors
        for number, spec in enumerate(tensor.specs)
    }
    tensors = {
        spec.name: TensorInfo(spec.name, "F32", spec.shape, 0, 4 * prod(spec.shape))
        for tensor in model.tensors
        for spec in tensor.specs
    }
    model = replace(model, config=_as_engine(model.config))
    files = side_files(source, model)
    with TemporaryDirectory(prefix="qtool-") as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        weights = GgufWeights(source.path, Path(folder), model.config, tensors, places)
        try:
            yield weights, with_origins(source, model)
        except QtoolError as error:
            # Nobody knows the temporary folder; what is wrong with it is so of the file.
            raise type(error)(str(error).replace(folder, str(source.path))) from error


def _as_engine(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json of what llama.cpp computes: it rounds where YaRN's ramp begins and ends,
    whatever gpt-oss asks for."""
    rope = config.get("rope_scaling")
    if not isinstance(rope, Mapping) or rope.get("truncate") is not False:
        return config
    return {**config, "rope_scaling": {**rope, "truncate": True}}


def with_origins(source: GgufSource, model: HfModel) -> GgufSource:
    """The source, each tensor with the names of the checkpoint tensors that it stands for, and
    where its rows are in them."""
    known: dict[str, tuple[Part, Sequence[TensorSpec]]] = {}
    for one in model.tensors:
        parts = one.parts or (Part(one.source, one.module, one.groups),)
        known |= {part.tensor.name: (part, one.specs) for part in parts}
    tensors = tuple(
        tensor if (found := known.get(tensor.name)) is None else _with_origin(tensor, *found)
        for tensor in source.tensors
    )
    return replace(source, tensors=tensors)


def _with_origin(tensor: SourceTensor, part: Part, specs: Sequence[TensorSpec]) -> SourceTensor:
    module = part.module
    order = None if module.rows is None else module.rows.order(part.groups, tensor.rows)
    names = tuple(spec.name for spec in specs)
    cut = module.cut if part.module.is_part else None
    return replace(tensor, origin=names, order=order, columns=module.columns, cut=cut)
