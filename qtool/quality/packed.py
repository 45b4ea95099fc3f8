"""Quantized matrices on a device as their files store them, and the kernels that read them there.

What has no kernel here (bitsandbytes, QServe, AWQ in strips) is None: whoever asks takes the CPU's
float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.artifacts.artifact import Artifact
from qtool.artifacts.entry import Entry
from qtool.cuda import float_tasks, pack_gemv_tasks, tasks
from qtool.cuda.tasks import Task
from qtool.formats import bits, gptq, gptq_zeros
from qtool.formats import compressed_tensors_read as compressed
from qtool.formats.stored_codes import one_number
from qtool.gguf.to_hf.weights import GgufWeights
from qtool.quality.weights import ArtifactWeights
from qtool.scheme import GroupQuant, Scheme
from qtool.streaming.weights import Weights

Put = Callable[[NDArray[Any]], Any]  # a copy on the device, where a kernel can begin to read
Out = Any  # a tensor of the device, [out, in]; in a product [vectors, out]
Room = Callable[[int], Any]  # float32 of so many numbers on the device
_KINDS = {"int": "uint8", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_FP4_SCALES = {"e8m0": "e8m0", "float8_e4m3": "e4m3fn"}
_SECOND = {
    "divides": ("divisor", "weight_global_scale"),
    "multiplies": ("factor", "weight_scale_2"),
}


@dataclass(frozen=True)
class Packed:
    """One matrix. The functions hold its tensors on the device, and make tasks."""

    shape: tuple[int, int]
    dense: Callable[[Out], Task]  # its numbers into `out`, float32, float16 or bfloat16
    # (x float16 [1 to 8, in], out float16 [1 to 8, out], room) -> x W', without W in memory; one
    # after the other, since blocks count themselves by numbers that the matrix has once
    times: Callable[[Any, Out, Room], tuple[Task, ...]] | None = None


def packed(weights: Weights, name: str, put: Put) -> Packed | None:
    """A matrix, by its checkpoint name; None where the CPU has to dequantize it, or it is dense."""
    if isinstance(weights, GgufWeights):
        return _blocks(weights, name, put)
    if isinstance(weights, ArtifactWeights):
        entry = weights.artifact.entry(name)
        if isinstance(entry.scheme, Scheme) and len(entry.shape) == 2 and 0 not in entry.shape:
            return _matrix(weights.artifact, entry, entry.scheme, put)
    return None


def _blocks(weights: GgufWeights, name: str, put: Put) -> Packed | None:
    found = weights.stored_rows(name)
    if found is None:
        return None
    type_, rows = found
    there, width = put(rows), weights.tensors[name].shape[1]

    def dense(out: Out) -> Task:
        return float_tasks.gguf(there, type_, width, out=out)

    if type_.name != "Q4_K":
        return Packed((len(rows), width), dense, None)
    done = put(np.zeros(pack_gemv_tasks.counters(len(rows)), np.int32))

    def times(x: Any, out: Out, room: Room) -> tuple[Task, ...]:
        return pack_gemv_tasks.gemv_q4_k(there, width, x, out=out, room=room, done=done)

    return Packed((len(rows), width), dense, times)


def _matrix(artifact: Artifact, entry: Entry, scheme: Scheme, put: Put) -> Packed | None:
    shape = (entry.shape[0], entry.shape[1])
    if scheme.outer in ("after", "rows", "offset"):
        return None
    if artifact.found.format == "awq":
        return _awq(artifact, entry, scheme, shape, put)
    if artifact.found.format == "gptq":
        return _gptq(artifact, entry, scheme, shape, put)
    if scheme.book == "e2m1":
        return _fp4(artifact, entry, scheme, put)
    if scheme.book == "int" and entry.stored[0].endswith(".weight_packed"):
        return _words(artifact, entry, scheme, shape, put)
    return _bytes(artifact, entry, put)


def _counters(shape: tuple[int, int], scheme: Scheme, scales: Any, put: Put) -> Any:
    """What the blocks of a product count themselves by; None where no kernel multiplies."""
    if not _fused(shape, scheme, scales):
        return None
    return put(np.zeros(pack_gemv_tasks.counters(shape[0]), np.int32))


def _tensor(artifact: Artifact, entry: Entry, last: str, put: Put) -> Any:
    return put(artifact.stored_tensor(f"{entry.module}.{last}"))


def _awq(
    artifact: Artifact, entry: Entry, scheme: Scheme, shape: tuple[int, int], put: Put
) -> Packed | None:
    layout, size = artifact.found.layout, scheme.group_size
    if layout not in ("gemm", "gemv"):
        return None  # scaled zeros, which the CPU looks at: not all stand for whole ones
    names = ("qweight", "qzeros", "scales")
    qweight, zeros, scales = (_tensor(artifact, entry, last, put) for last in names)
    if layout == "gemv":
        return Packed(shape, lambda out: tasks.awq_gemv(qweight, zeros, scales, size, out=out))
    done = _counters(shape, scheme, scales, put)

    def times(x: Any, out: Out, room: Room) -> tuple[Task, ...]:
        return pack_gemv_tasks.gemv_awq(
            qweight, zeros, scales, size, x, out=out, room=room, done=done
        )

    return Packed(
        shape,
        lambda out: tasks.awq_gemm(qweight, zeros, scales, size, out=out),
        None if done is None else times,
    )


def _fused(shape: tuple[int, int], scheme: Scheme, scales: Any) -> bool:
    """Whether the kernels that multiply 4-bit words take a matrix."""
    size = scheme.group_size if scheme.group_size > 0 else shape[1]
    whole = (
        shape[0] % 8 == 0
        and shape[1] % pack_gemv_tasks.RUN == 0
        and size % pack_gemv_tasks.RUN == 0
    )
    return whole and scheme.bits == 4 and str(scales.dtype) == "torch.float16"


def _gptq(
    artifact: Artifact, entry: Entry, scheme: Scheme, shape: tuple[int, int], put: Put
) -> Packed | None:
    if shape[1] * scheme.bits % 32:
        return None  # words that end behind the last row
    stored, name = artifact.stored_tensor, f"{entry.module}.g_idx"
    words = stored(f"{entry.module}.qzeros")
    told = (artifact.found, scheme, words, shape[0])
    if not np.array_equal(gptq_zeros.meant(*told), gptq_zeros.by_fields(*told)):
        return None  # zeros that carry from one to the next, which the CPU reads
    fields = bits.unpack(words, scheme.bits, shape[0])
    version = gptq_zeros.version_of(artifact.found, scheme, fields)
    index = stored(name) if name in entry.stored else None
    order = gptq.order_of(entry.module, index, scheme, shape)
    g_idx = None if order is None else put(order)
    names = ("qweight", "qzeros", "scales")
    qweight, zeros, scales = (_tensor(artifact, entry, last, put) for last in names)
    size = scheme.group_size
    done = None if g_idx is not None else _counters(shape, scheme, scales, put)

    def dense(out: Out) -> Task:
        given = (qweight, zeros, scales, scheme.bits, size)
        return tasks.gptq(*given, version=version, out=out, g_idx=g_idx)

    def times(x: Any, out: Out, room: Room) -> tuple[Task, ...]:
        options: dict[str, Any] = {"version": version, "out": out, "room": room, "done": done}
        return pack_gemv_tasks.gemv_gptq(qweight, zeros, scales, size, x, **options)

    return Packed(shape, dense, None if done is None else times)


def _words(
    artifact: Artifact, entry: Entry, scheme: Scheme, shape: tuple[int, int], put: Put
) -> Packed:
    """compressed-tensors' pack-quantized."""
    lasts = ("weight_scale", "weight_zero_point", "weight_g_idx")
    names = {last: f"{entry.module}.{last}" for last in lasts}
    stored = {n: artifact.stored_tensor(n) for n in names.values() if n in entry.stored}
    words, scale = (_tensor(artifact, entry, last, put) for last in ("weight_packed", lasts[0]))
    zero = None if scheme.symmetric else put(stored[names["weight_zero_point"]])
    order = compressed.order_of(entry.module, stored, scheme, shape)
    g_idx = None if order is None else put(order)
    scale = scale.reshape(scheme.grid(shape))

    def dense(out: Out) -> Task:
        given = (words, scale, shape, scheme.bits, scheme.group_size)
        return tasks.pack_quantized(*given, out=out, zero_point=zero, g_idx=g_idx)

    return Packed(shape, dense)


def _fp4(artifact: Artifact, entry: Entry, scheme: Scheme, put: Put) -> Packed:
    """MXFP4 and NVFP4, two codes a byte."""
    codes = put(artifact.stored_tensor(entry.stored[0]))
    scale = _tensor(artifact, entry, "weight_scale", put)
    shape, kind = (entry.shape[0], entry.shape[1]), _FP4_SCALES[scheme.scale_dtype]
    outer: dict[str, float] = {}
    if scheme.outer:
        key, last = _SECOND[scheme.outer]
        name = f"{entry.module}.{last}"
        outer[key] = one_number(name, artifact.stored_tensor(name))
    return Packed(shape, lambda out: float_tasks.fp4(codes, scale, kind, out=out, **outer))


def _bytes(artifact: Artifact, entry: Entry, put: Put) -> Packed | None:
    """A code in each byte: INT8 and FP8."""
    quant = artifact.read(entry.name)
    if not isinstance(quant, GroupQuant) or quant.g_idx is not None:
        return None
    scheme, shape = quant.scheme, quant.shape
    codes = put(quant.codes)
    scale = put(quant.scale.reshape(scheme.grid(shape)))
    zero = None if scheme.is_float else put(quant.zero.reshape(scheme.grid(shape)))
    block = (scheme.rows, scheme.group_size)

    def dense(out: Out) -> Task:
        kind = _KINDS[scheme.book]
        return float_tasks.bytes_(codes, kind, scale=scale, block=block, out=out, zero=zero)

    return Packed(shape, dense)
