"""What a checkpoint's matrices become in a GGUF file: Q4_0, Q4_1, Q8_0, MXFP4 or NVFP4, or the
reason why not.

    symmetric, up to 4 bits     Q4_0      asymmetric and MLX's, up to 4 bits    Q4_1
    more bits                   Q8_0      MXFP4, NVFP4                          the same

--to gguf-q8_0 makes Q8_0 of all.

Everything else, names, order of rows, metadata and the tokenizer, is what the file has that
`qtool quantize` makes of an unquantized checkpoint (qtool.gguf.from_hf.source).
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.converting.blocks import (
    BLOCK,
    MXFP4,
    NVFP4,
    Q4_0,
    Q4_1,
    Q8_0,
    fits_bytes,
    offsets,
)
from qtool.converting.model import Model, Quantized, Tensor
from qtool.converting.nvfp4 import (
    Factors,
    against_matrix,
    against_tensor,
    checked_second,
    factors_of,
    is_nvfp4,
    scale_tensor,
)
from qtool.converting.obstacles import ANEW, OFFSETS, ROUNDED, SCALES, Obstacle, refuse
from qtool.converting.plan import info_of
from qtool.converting.survey import grouped, has_offsets, in_dtype
from qtool.converting.targets import Target
from qtool.errors import FormatError
from qtool.formats.layer_names import is_head
from qtool.formats.safetensors_file import TensorInfo
from qtool.gguf.from_hf.hf_rows import HfRows
from qtool.gguf.from_hf.source import hf_source
from qtool.gguf.source import GgufSource, SourceTensor
from qtool.gguf_mixtures.kinds import output_order
from qtool.gguf_types import BlockType
from qtool.messages.progress import Progress
from qtool.messages.sentences import AGAIN
from qtool.scheme import GroupQuant

_UNEQUAL = "is not as wide as all others that {} is made of"


@dataclass(frozen=True)
class GgufStep:
    """One tensor of the file; `parts` are the matrices that it is made of, none where it is copied
    from the checkpoint."""

    source: SourceTensor
    type: BlockType
    parts: tuple[Tensor, ...] = ()
    order: NDArray[np.int64] | None = None  # which row of the matrix each row is
    against: Mapping[str, Obstacle] | None = None  # by part: what is done because of what
    added: HfRows | None = None  # of a norm to which a number is added
    factors: Factors | None = None  # NVFP4's second scales, which another tensor holds

    def taken_back(self, raw: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """A norm's numbers: as the checkpoint has them, and as rows of the file say, all of them,
        less what was added."""
        assert self.added is not None
        known = replace(self.added, add=0).read(0, self.source.rows)
        found = np.ascontiguousarray(raw).view(np.float32) - np.float32(self.added.add)
        return known.view(np.float32), found


def gguf_plan(
    target: Target, model: Model, lossy: bool, progress: Progress
) -> tuple[GgufSource, list[GgufStep]]:
    """Every tensor in the order of writing; refuses what cannot be done."""
    assert model.checkpoint is not None
    source = hf_source(unquantized(model, model.checkpoint))
    by_name = {tensor.name: tensor for tensor in model.quantized}
    names = {tensor.name for tensor in source.tensors}
    tensors = output_order(source.tensors)
    steps: list[GgufStep] = []
    obstacles: list[Obstacle] = []
    for number in progress.blocks(len(tensors), "tensor"):
        step = _step(target, tensors[number], by_name)
        if step.factors is not None:
            step = _with_factors(step, source.architecture, names)
        steps.append(step)
        obstacles += (step.against or {}).values()
    refuse(model.path, target, obstacles, lossy)
    scales = [scale_tensor(s.source, s.factors) for s in steps if s.factors is not None]
    steps += [GgufStep(scale, scale.type) for scale in scales]
    there = {step.source.name: step for step in steps}
    return source, [there[t.name] for t in output_order(step.source for step in steps)]


def _with_factors(step: GgufStep, architecture: str, names: Container[str]) -> GgufStep:
    """The step, as long as llama.cpp makes something good of it; else as Q8_0."""
    why = against_tensor(step.source, architecture, names)
    return step if why is None else _as_q8_0(step, why)


def unquantized(model: Model, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as it would be without quantization, as far as headers tell."""
    embeddings = {t.dtype for t in model.tensors if t.read is None and "embed" in t.name}
    tensors: dict[str, TensorInfo] = {}
    for tensor in model.tensors:
        info = info_of(tensor)
        if tensor.read is None:
            info = checkpoint.tensors[tensor.name]
        elif is_head(tensor.module) and info.dtype in embeddings:
            # It has codes, so it differs from the embedding; no byte of it is to be compared.
            info = replace(info, dtype="F32")
        tensors[tensor.name] = info
    files = {
        name: checkpoint.file_of(name) if name in checkpoint.tensors else checkpoint.files[0]
        for name in tensors
    }
    return replace(checkpoint, config=model.config, tensors=tensors, _file_of=files)


def _step(target: Target, source: SourceTensor, by_name: Mapping[str, Tensor]) -> GgufStep:
    parts = tuple(by_name[name] for name in source.origin if name in by_name)
    reader = getattr(source.read, "__self__", None)
    if not parts and isinstance(reader, HfRows) and reader.add:
        return _added(source, replace(reader, wide=True))
    if not parts:
        return GgufStep(source, source.type)
    name = parts[0].name
    if not isinstance(reader, HfRows) or reader.add or len(parts) != len(source.origin):
        why = f"belongs to {source.name} together with tensors that are not quantized"
        return GgufStep(source, Q8_0, parts, None, {name: _stuck(name, why)})
    order = None
    if reader.columns is not None or reader.cut is not None:
        why = f"has columns that {source.name} has in another order, or as rows"
        return GgufStep(source, Q8_0, parts, None, {name: _stuck(name, why)})
    if reader.rows is not None:
        if len(parts) > 1:
            why = f"is one of several tensors whose rows {source.name} mixes"
            return GgufStep(source, Q8_0, parts, None, {name: _stuck(name, why)})
        order = reader.rows.forward(
            np.arange(source.rows, dtype=np.int64), reader.groups, source.rows
        )
    found = {part.name: _looked_at(part, target) for part in parts}
    types = {one.type for one in found.values()}
    against = {part: one.obstacle for part, one in found.items() if one.obstacle is not None}
    if NVFP4 in types:
        return _nvfp4(GgufStep(source, NVFP4, parts, order, against), found)
    type_ = max(types, key=lambda kind: kind.nbytes)  # Q4_1 holds what Q4_0 does
    if len(types) > 1 and types != {Q4_0, Q4_1}:
        against[name] = Obstacle(name, _UNEQUAL.format(source.name))
    return GgufStep(source, type_, parts, order, against)


def _stuck(name: str, why: str) -> Obstacle:
    """A matrix that no type can have as it is, by --lossy neither."""
    return Obstacle(name, why, hint="a GGUF recipe takes it: `qtool quantize` with --requantize")


def _nvfp4(step: GgufStep, found: Mapping[str, "_Looked"]) -> GgufStep:
    """A tensor of which some parts are NVFP4: with their second scales, or as Q8_0."""
    if any(one.type is not NVFP4 for one in found.values()):
        said = [obstacle.reason for obstacle in (step.against or {}).values()]
        return _as_q8_0(step, said[0] if said else _UNEQUAL.format(step.source.name))
    factors = factors_of(step.source, [one.second for one in found.values()])
    if isinstance(factors, str):
        return _as_q8_0(step, factors)
    return replace(step, factors=factors)


def _as_q8_0(step: GgufStep, why: str) -> GgufStep:
    """The step where NVFP4 does not do."""
    lossy = None if any(part.shape[1] % BLOCK for part in step.parts) else ANEW
    against = {part.name: Obstacle(part.name, why, lossy) for part in step.parts}
    return replace(step, type=Q8_0, against=against, factors=None)


def _added(source: SourceTensor, reader: HfRows) -> GgufStep:
    """A norm that the file has with 1 added: in float32, as the model itself adds it, and not in
    the checkpoint's float16, as convert_hf_to_gguf.py does, which rounds nearly all of them."""
    step = GgufStep(replace(source, read=reader.read), source.type, added=reader)
    if np.array_equal(*step.taken_back(reader.read(0, source.rows))):
        return step
    name = source.origin[0]
    why = f"is stored with {reader.add} added, and float32 rounds the sum"
    return replace(step, against={name: Obstacle(name, why, ROUNDED)})


@dataclass(frozen=True)
class _Looked:
    """The block type of one matrix, what stands against it, and NVFP4's second scale."""

    type: BlockType
    obstacle: Obstacle | None
    second: np.float32 | None = None


def _looked_at(tensor: Tensor, target: Target) -> _Looked:
    assert tensor.read is not None
    value = tensor.read()
    quant = in_blocks(value)
    if quant is None:
        return _Looked(Q8_0, _in_no_blocks(tensor, value))
    if not np.isfinite(quant.scale).all():
        raise FormatError(f"{tensor.name}: a scale is not finite; the artifact is damaged")
    if is_nvfp4(quant) and target.layout != "Q8_0":
        why, second = against_matrix(quant), checked_second(tensor.name, quant)
        obstacle = None if why is None else Obstacle(tensor.name, why, ANEW)
        return _Looked(NVFP4 if why is None else Q8_0, obstacle, second)
    return _Looked(*_in_type(tensor, quant, target))


def _in_type(
    tensor: Tensor, quant: GroupQuant, target: Target
) -> tuple[BlockType, Obstacle | None]:
    """A matrix whose codes some type has."""
    type_ = _type(quant, target)
    columns, size = quant.shape[1], quant.scheme.group_size
    if columns % BLOCK:
        reason = f"has {columns} in_features, which blocks of {BLOCK} do not divide"
        return type_, Obstacle(tensor.name, reason)
    if quant.g_idx is not None:
        reason = "has columns out of group order (desc_act), which GGUF cannot store"
        return type_, Obstacle(tensor.name, reason, ANEW)
    if size > 0 and size % BLOCK:
        reason = f"has groups of {size}, which are no multiple of {BLOCK}"
        return type_, Obstacle(tensor.name, reason, ANEW)
    if quant.scheme.is_float:
        if type_ is MXFP4:
            return type_, None
        reason = f"is stored as {tensor.stored}, of which Q8_0 has no codes"
        return type_, Obstacle(tensor.name, reason, ANEW, hint="--to gguf holds it")
    if type_ is Q8_0 and not fits_bytes(quant):
        reason = "has codes more than 127 above or 128 below their zero, which Q8_0 cannot hold"
        return type_, Obstacle(tensor.name, reason, ANEW)
    if quant.offset is not None and not np.isfinite(quant.offset.astype(np.float32)).all():
        reason = "has biases that are NaN or infinite: it is damaged"
        return type_, Obstacle(tensor.name, reason, hint=AGAIN)
    half = in_dtype(quant.scale, "float16")
    if not np.isfinite(half).all():
        reason = f"has scales up to {float(np.abs(quant.scale).max()):.3g}, beyond float16"
        return type_, Obstacle(tensor.name, reason)
    minimums, exact = offsets(quant)
    if type_ is Q4_1 and not np.isfinite(minimums).all():
        return type_, Obstacle(tensor.name, "has minimums beyond float16")
    if type_ is Q8_0 and has_offsets(quant):
        hint = "--to gguf holds them" if quant.scheme.bits <= 4 else ""
        reason = f"has {quant.scheme.bits}-bit codes with biases (mlx), for which Q8_0 has no place"
        return type_, Obstacle(tensor.name, reason, ANEW, hint=hint)
    if (half.astype(np.float32) != quant.scale.astype(np.float32)).any():
        reason = f"has {quant.scheme.scale_dtype} scales, which float16 rounds"
        return type_, Obstacle(tensor.name, reason, SCALES)
    if type_ is Q4_1 and not exact:
        if has_offsets(quant):
            reason = f"has {quant.scheme.scale_dtype} biases (mlx), which float16 rounds"
            return type_, Obstacle(tensor.name, reason, OFFSETS)
        reason = "has zero points whose products with the scales Q4_1 rounds"
        return type_, Obstacle(tensor.name, reason, OFFSETS, hint="--to gguf-q8_0 holds them")
    return type_, None


def in_blocks(value: Quantized) -> GroupQuant | None:
    """A matrix as codes that some type has; None where none has them."""
    quant = grouped(value)
    if quant is not None or not isinstance(value, GroupQuant):
        return quant
    scheme = value.scheme
    mxfp4 = scheme.book == "e2m1" and scheme.scale_dtype == "e8m0" and scheme.group_size == BLOCK
    if has_offsets(value) or is_nvfp4(value) or (mxfp4 and scheme.rows == 1 and not scheme.outer):
        return value
    return None


def _in_no_blocks(tensor: Tensor, value: Quantized) -> Obstacle:
    """Why no type has the codes of a matrix."""
    if isinstance(value, GroupQuant) and not value.scheme.is_float:
        reason = f"is stored as {tensor.stored} with scales of two factors, which no type has"
        return Obstacle(tensor.name, reason, ANEW)
    reason = f"is stored as {tensor.stored}, not as integers and scales"
    if isinstance(value, GroupQuant):
        reason = f"is stored as {tensor.stored}, of whose numbers no type has codes"
    hint = "dequantize it with --to hf, and quantize that"
    return Obstacle(tensor.name, reason, hint=hint)


def _type(quant: GroupQuant, target: Target) -> BlockType:
    if quant.scheme.is_float:
        return Q8_0 if target.layout == "Q8_0" else MXFP4
    if has_offsets(quant):
        return Q4_1 if quant.scheme.bits <= 4 and target.layout != "Q8_0" else Q8_0
    if target.layout == "Q8_0" or quant.scheme.bits > 4:
        return Q8_0
    symmetric = bool((quant.zero == 1 << (quant.scheme.bits - 1)).all())
    return Q4_0 if symmetric else Q4_1
