"""A GGUF file as the Hugging Face checkpoint that it was made of: the inverse of `from_hf.source`.

    checkpoint[s] = gguf[inverse(s)] - add        rows and norms put back as the table says
    experts stacked in one tensor                 -> one tensor each
    several tensors that are parts of one         -> that one (`joined`)

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

from qtool.checkpoints.hf_config import count
from qtool.errors import FormatError
from qtool.formats.safetensors_header import TensorSpec
from qtool.gguf.architectures import TABLE, Architecture
from qtool.gguf.architectures.modules import HEADS, Module
from qtool.gguf.architectures.mtp import MTP, name_in_checkpoint
from qtool.gguf.architectures.shapes import expected_shape
from qtool.gguf.from_hf.hf_tensors import ALWAYS_FLOAT32
from qtool.gguf.from_hf.source import NOTHING_READS, gguf_names
from qtool.gguf.second_scales import with_scales
from qtool.gguf.source import GgufSource, SourceTensor
from qtool.gguf.to_hf.biases import check_biases
from qtool.gguf.to_hf.classes import class_of
from qtool.gguf.to_hf.config import check_way_back, hf_config
from qtool.gguf.to_hf.hf_tensor import PLAIN, HfTensor, floats_of, stored_again, taken_back
from qtool.gguf.to_hf.joined import Part, joined
from qtool.gguf_mixtures.kinds import stored_shape
from qtool.gguf_types import F32, I32

DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_MOST_DIVISORS = 1 << 16


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
    source = with_scales(source)
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
    dropped = [*source.dropped]
    dropped += [(name, "rope settings of config.json say the same") for name in vectors]
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
            dtype = PLAIN.get(tensor.type_in_file, "F16")
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
                module = replace(module, add=0, transposed=False)  # which weights are
            tensor = tensors.get(gguf_name + suffix)
            if tensor is None:
                head = name in HEADS and config["tie_word_embeddings"]
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
                f"{source.path}: {tensor.name} holds numbers that are not all below zero, or above "
                "it, as those are that the checkpoint has the logarithms of"
            )
    if module.whole != (tensor.type == I32):
        raise FormatError(f"{source.path}: {tensor.name} is {tensor.type.name}, which it cannot be")
    if module.each is not None and len(tensor.shape) < 2:
        raise FormatError(
            f"{source.path}: {tensor.name} has the shape {list(tensor.shape)}, expected a stack"
        )


def _named(row: Architecture, config: Mapping[str, Any], block: int, suffix: str, name: str) -> str:
    """What the checkpoint calls it."""
    whole = name.replace("{b}", str(block)) + suffix
    return name_in_checkpoint(whole, config) if row.mtp == MTP else whole


def _specs(
    tensor: SourceTensor, module: Module, named: Callable[[str], str], dtype: str
) -> tuple[TensorSpec, ...]:
    if module.each is None or module.within:
        name, shape = named(module.within or module.name), tensor.shape
        if module.folded:
            shape = (prod(shape),)
        elif module.transposed:
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
    if module.whole:
        return "I64"
    widened = tensor.type == F32 and (
        len(tensor.shape) == 1
        or bias
        or module.add
        or module.folded
        or module.values is not None
        or tensor.name.endswith(ALWAYS_FLOAT32)
    )
    if not widened:
        return PLAIN.get(tensor.type_in_file, dtype) if keep else dtype
    there = floats_of(tensor, 0, tensor.rows).reshape(tensor.shape)
    values = taken_back(there, module)
    # Rates of a checkpoint in float16 are rounded once more, and no others come back as they are.
    tried = (dtype,) if module.values is None else (dtype, "F32", "F16")
    same = (one for one in tried if np.array_equal(stored_again(values, one, module), there))
    return next(same, "F32")
