"""A GGUF file seen as the Hugging Face checkpoint that it was made of: the inverse of `from_hf`.

    checkpoint[s] = gguf[inverse(s)] - add        rows and norms put back as the table says
    experts stacked in one tensor                 -> one tensor each

Matrices of float16 and bfloat16 keep their bytes; quantized ones are dequantized and rounded once.
What llama.cpp keeps in float32 goes back to the model's dtype where that loses nothing, so that the
way to GGUF again gives the same bytes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.errors import FormatError, UnsupportedError
from qtool.formats.safetensors_header import TensorSpec
from qtool.gguf.architectures import TABLE, Architecture
from qtool.gguf.architectures.modules import Module
from qtool.gguf.architectures.prediction import MTP, name_in_checkpoint
from qtool.gguf.architectures.shapes import expected_shape
from qtool.gguf.from_hf import NOTHING_READS, gguf_names
from qtool.gguf.hf_config import count
from qtool.gguf.hf_tensors import ALWAYS_FLOAT32
from qtool.gguf.joined import Part, joined
from qtool.gguf.kinds import stored_shape
from qtool.gguf.source import GgufSource, SourceTensor, as_floats
from qtool.gguf.to_hf_biases import check_biases
from qtool.gguf.to_hf_config import check_way_back, class_of, hf_config
from qtool.gguf_types import BF16, F16, F32, BlockType
from qtool.native import floats

DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_MOST_DIVISORS = 1 << 16
_AT_ONCE = 1 << 22  # numbers that are float32 in memory
_PLAIN = {F16: "F16", BF16: "BF16", F32: "F32"}


@dataclass(frozen=True)
class HfTensor:
    """One GGUF tensor, and the tensors of the checkpoint that it becomes; or one of these, and the
    GGUF tensors that it is put together of."""

    source: SourceTensor  # or as if the file had the whole
    module: Module
    groups: int  # heads or experts that its rows fall into
    specs: tuple[TensorSpec, ...]  # one, or one per expert
    parts: tuple[Part, ...] = ()

    @property
    def in_file(self) -> tuple[SourceTensor, ...]:
        """The file's own tensors."""
        return tuple(part.tensor for part in self.parts) or (self.source,)

    @property
    def type(self) -> BlockType:
        """How the file stores it: of several types, one in blocks."""
        return max((tensor.type for tensor in self.in_file), key=lambda one: one.weights)

    def arrays(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """Each tensor's name and bytes."""
        for number, spec in enumerate(self.specs):
            yield spec.name, self.bytes_of(number)

    def copied(self, dtype: str) -> bool:
        """Whether the file's own bytes are what is stored as this dtype."""
        changed = self.module.add or self.module.values is not None or self.type.weights > 1
        return _PLAIN.get(self.source.type) == dtype and not changed

    def comes_back(self, dtype: str) -> bool:
        """Whether numbers that llama.cpp stores another way give the file's own once more."""
        if self.module.values is None:
            return False
        there = floats_of(self.source, 0, self.source.rows)
        return np.array_equal(_again(_taken_back(there, self.module), dtype, self.module), there)

    def values(self, number: int, first: int, last: int) -> NDArray[np.float32]:
        """float32 [last - first, in_features]: rows of one of the tensors."""
        start = number * prod(self.specs[0].shape[:-1]) if len(self.specs) > 1 else 0
        return _taken_back(floats_of(self.source, start + first, start + last), self.module)

    def bytes_of(self, number: int) -> NDArray[np.uint8]:
        """The bytes of one of the tensors."""
        spec = self.specs[number]
        if self.module.rearranged:
            return _stored(put_back(self.source, self.module, self.groups), spec.dtype, spec.name)
        # Vectors of several experts are rows of one tensor.
        rows = prod(spec.shape[:-1])
        start = number * rows if len(self.specs) > 1 else 0
        if self.copied(spec.dtype):
            return np.ascontiguousarray(self.source.read(start, start + rows)).reshape(-1)
        out = np.empty(spec.nbytes, np.uint8)
        width = spec.nbytes // rows
        step = max(1, _AT_ONCE // max(1, self.source.in_features))
        for first in range(0, rows, step):
            last = min(rows, first + step)
            values = self.values(number, first, last)
            out[first * width : last * width] = _stored(values, spec.dtype, spec.name)
        return out


@dataclass(frozen=True)
class HfModel:
    """What is to be written; `dropped` are tensors of the file that config.json stands for."""

    config: Mapping[str, Any]
    tensors: tuple[HfTensor, ...]
    dropped: tuple[tuple[str, str], ...]
    dtype: str  # of the matrices: F16, BF16 or F32


def hf_model(source: GgufSource, dtype: str | None = None, usual: str | None = None) -> HfModel:
    """Plan the checkpoint; `dtype` (float16, bfloat16, float32) by default as the file has it.

    usual: what most matrices were before they were quantized, F16, BF16 or F32, where that is
    known. Reads only vectors. UnsupportedError where transformers has no such model, FormatError
    where the file lacks a tensor or has one that no module of the table is.
    """
    check_way_back(source)
    row = TABLE[class_of(source)]
    tensors = {tensor.name: tensor for tensor in source.tensors}
    vectors = {}
    for name in _COMPUTED:
        if name in tensors:
            if prod(tensors[name].shape) > _MOST_DIVISORS:
                raise FormatError(
                    f"{source.path}: {name} has the shape {list(tensors[name].shape)}, expected "
                    "a number for each two elements of a head"
                )
            vectors[name] = floats_of(tensors[name], 0, tensors[name].rows).reshape(-1)
    wanted = DTYPES[dtype] if dtype is not None else usual or _usual_dtype(source)
    named = {code: name for name, code in DTYPES.items()}[wanted]
    config = hf_config(source, vectors, named)
    completed = row.completed(config)
    check_biases(row, completed, tensors.keys(), source)
    found = list(_tensors(source, row, completed, tensors, wanted, keep=dtype is None))
    used = {tensor.name for one in found for tensor in one.in_file}
    dropped = [(name, "rope settings of config.json say the same") for name in vectors]
    unread = {f"{name}.weight" for name in gguf_names(row.passed_over, completed).values()}
    dropped += [(name, NOTHING_READS) for name in tensors if name in unread]
    for name in tensors:
        if name not in used and name not in vectors and name not in unread:
            raise FormatError(
                f"{source.path}: no module of {config['architectures'][0]} is the tensor {name!r}"
            )
    return HfModel(config, tuple(found), tuple(dropped), wanted)


def _usual_dtype(source: GgufSource) -> str:
    """That of most numbers; float16 where they are quantized."""
    sizes: dict[str, int] = {}
    for tensor in source.tensors:
        if len(tensor.shape) > 1:
            dtype = _PLAIN.get(tensor.type, "F16")
            sizes[dtype] = sizes.get(dtype, 0) + prod(tensor.shape)
    return max(sizes, key=lambda name: sizes[name], default="F32")


def _tensors(
    source: GgufSource,
    row: Architecture,
    config: Mapping[str, Any],
    tensors: Mapping[str, SourceTensor],
    dtype: str,
    keep: bool,
) -> Iterator[HfTensor]:
    modules = {module.name: module.fitted(config) for module in row.modules}
    parts: dict[str, list[Part]] = {}
    for (name, block), gguf_name in gguf_names(row, config).items():
        left_out = block >= config["num_hidden_layers"] and not any(
            other.startswith(f"blk.{block}.") for other in tensors
        )
        for suffix, end in modules[name].ends:
            module = modules[name]
            if suffix == ".bias":
                module = replace(module, add=0, turned=False)  # which weights are
            tensor = tensors.get(gguf_name + suffix)
            if tensor is None:
                head = name in ("lm_head", "embed_out") and config["tie_word_embeddings"]
                needed = suffix == module.ends[0][0] or module.packed  # whose biases are, too
                if needed and module.required(config) and not head and not left_out:
                    raise FormatError(
                        f"{source.path}: lacks {gguf_name}{suffix}, which {row.name} needs"
                    )
                continue
            groups = 1 if module.rows is None else count(config, module.rows.groups)
            tensor = _shaped(source, tensor, expected_shape(module, config, suffix, block))
            _check_rows(source, tensor, module, groups)
            stored = _dtype_of(tensor, module, dtype, keep, suffix == ".bias")
            named = partial(_named, row, config, block, end)
            if module.is_part:
                part = Part(tensor, module, groups, bias=suffix == ".bias")
                parts.setdefault(named(module.within), []).append(part)
                continue
            yield HfTensor(tensor, module, groups, _specs(tensor, module, named, stored))
    for whole, own in parts.items():
        yield _put_together(source, whole, own, dtype, keep)


def _put_together(
    source: GgufSource, name: str, parts: Sequence[Part], dtype: str, keep: bool
) -> HfTensor:
    """The tensor `name` of the checkpoint."""
    module, bias = Module(name), parts[0].bias
    whole = joined(parts, name, str(source.path))
    in_blocks = any(part.tensor.type.weights > 1 for part in parts)
    stored = dtype if in_blocks else _dtype_of(whole, module, dtype, keep, bias)
    return HfTensor(whole, module, 1, (TensorSpec(name, stored, whole.shape),), tuple(parts))


def _shaped(
    source: GgufSource, tensor: SourceTensor, expected: tuple[int, ...] | None
) -> SourceTensor:
    """The tensor in the shape that config.json gives it; FormatError where it has another."""
    if expected is None:
        return tensor
    if stored_shape(expected) != stored_shape(tensor.shape):
        raise FormatError(
            f"{source.path}: {tensor.name} has the shape {list(tensor.shape)}, and the metadata "
            f"say {list(expected)}"
        )
    return replace(tensor, shape=expected)  # a file leaves leading axes of one out


def _check_rows(source: GgufSource, tensor: SourceTensor, module: Module, groups: int) -> None:
    """FormatError unless the rows fall into the groups, and the stacked parts are a stack."""
    rows = tensor.in_features if len(tensor.shape) == 1 else tensor.rows
    if module.rows is not None and rows % (groups * module.rows.unit):
        raise FormatError(
            f"{source.path}: {tensor.name} has {rows} rows, which are not {groups} groups "
            f"({module.rows.groups}) of a multiple of {module.rows.unit}"
        )
    if module.values is not None:
        found = module.values.inverse(floats_of(tensor, 0, tensor.rows))
        if not np.isfinite(found).all():
            raise FormatError(
                f"{source.path}: {tensor.name} holds numbers that are not below zero, as all are "
                "that the checkpoint has the logarithms of"
            )
    if module.each is not None and len(tensor.shape) < 2:
        raise FormatError(
            f"{source.path}: {tensor.name} has the shape {list(tensor.shape)}, expected a stack"
        )


def _named(row: Architecture, config: Mapping[str, Any], block: int, suffix: str, name: str) -> str:
    """What the checkpoint calls it."""
    whole = name.replace("{b}", str(block)) + suffix
    return name_in_checkpoint(whole, config) if row.predicts == MTP else whole


def _specs(
    tensor: SourceTensor, module: Module, named: Callable[[str], str], dtype: str
) -> tuple[TensorSpec, ...]:
    if module.each is None or module.within:
        name, shape = named(module.within or module.name), tensor.shape
        if module.folded:
            shape = (prod(shape),)
        elif module.turned:
            shape = shape[::-1]
        elif module.squeezed and len(shape) > 1:
            shape = (*shape[:-1], 1, shape[-1])
        return (TensorSpec(name, dtype, shape),)
    pattern = named(module.each[0])
    return tuple(
        TensorSpec(pattern.replace("{i}", str(i)), dtype, tensor.shape[1:])
        for i in range(tensor.shape[0])
    )


def _dtype_of(tensor: SourceTensor, module: Module, dtype: str, keep: bool, bias: bool) -> str:
    """The dtype of a matrix as asked; what llama.cpp widens gets it where that loses nothing."""
    widened = tensor.type == F32 and (
        len(tensor.shape) == 1
        or bias
        or module.add
        or module.folded
        or module.values is not None
        or tensor.name.endswith(ALWAYS_FLOAT32)
    )
    if not widened:
        return _PLAIN.get(tensor.type, dtype) if keep else dtype
    there = floats_of(tensor, 0, tensor.rows).reshape(tensor.shape)
    values = _taken_back(there, module)
    # Rates of a checkpoint in float16 are rounded once more, and no others come back as they are.
    tried = (dtype,) if module.values is None else (dtype, "F32", "F16")
    same = (one for one in tried if np.array_equal(_again(values, one, module), there))
    return next(same, "F32")


def _again(values: NDArray[np.float32], dtype: str, module: Module) -> NDArray[np.float32]:
    """What the file would have of `values` stored as dtype. llama.cpp's converter adds to float16
    in float16, which gives numbers that the sum in float32 gives, too."""
    held = values
    if dtype == "F16":
        held = floats.from_float16(floats.to_float16(values))
    elif dtype == "BF16":
        held = floats.from_bfloat16(floats.to_bfloat16(values))
    if module.values is None:
        return held + np.float32(module.add)
    made = module.values.forward(held)
    return floats.from_float16(floats.to_float16(made)) if dtype == "F16" else made


def _taken_back(values: NDArray[np.float32], module: Module) -> NDArray[np.float32]:
    """The checkpoint's numbers of those that llama.cpp stores."""
    if module.values is not None:
        return module.values.inverse(values)
    return values - np.float32(module.add) if module.add else values


def floats_of(tensor: SourceTensor, first: int, last: int) -> NDArray[np.float32]:
    """Rows first to last as float32 [last - first, in_features]."""
    return as_floats(tensor, np.ascontiguousarray(tensor.read(first, last)))


def put_back(tensor: SourceTensor, module: Module, groups: int) -> NDArray[np.float32]:
    """The tensor's values, float32 of its shape, as the checkpoint has them."""
    values = floats_of(tensor, 0, tensor.rows)
    if module.rows is not None:
        rows = values.reshape(-1) if len(tensor.shape) == 1 else values
        order = np.arange(len(rows), dtype=np.int64)
        values = rows[module.rows.inverse(order, groups, len(rows))]
    if module.columns is not None:
        found = np.empty_like(values)
        found[:, module.columns] = values
        values = found
    found = _taken_back(values, module).reshape(tensor.shape)
    return np.ascontiguousarray(found.T) if module.turned else found


def _stored(values: NDArray[np.float32], dtype: str, name: str) -> NDArray[np.uint8]:
    values = np.ascontiguousarray(values)
    if dtype == "F32":
        return values.reshape(-1).view(np.uint8)
    if dtype == "BF16":
        return floats.to_bfloat16(values).reshape(-1).view(np.uint8)
    half = floats.to_float16(values)
    if not np.isfinite(half).all():
        raise UnsupportedError(
            f"{name}: values up to {np.abs(values).max():.3g} do not fit into float16; "
            "use --dtype bfloat16"
        )
    return half.reshape(-1).view(np.uint8)
