"""The second scale of a matrix in GGUF: one number, in a tensor of its own. NVFP4 has it.

    blk.0.attn_q.weight         NVFP4 [out, in]             blk.0.attn_q.scale         F32 [1]
    blk.0.ffn_up_exps.weight    NVFP4 [experts, out, in]    blk.0.ffn_up_exps.scale    F32 [experts]

    w = (code * scale of 16 weights) * scale of the matrix

llama.cpp multiplies what a product gives by it, whatever type the matrix has. It loads these
tensors for every architecture, and forgets some of them in the products of most (0c1e57098): such a
model writes nonsense, without a word. `.input_scale` is what a checkpoint says of inputs; llama.cpp
loads it and makes no use of it.

Source: llama.cpp 0c1e57098, load_tensors in src/llama-model.cpp, the calls of build_lora_mm,
build_attn, build_ffn and build_moe_ffn in src/llama-graph.cpp and src/models, conversion/base.py.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from qtool.errors import FormatError
from qtool.formats.gguf_values import Kind, Value, array, strings
from qtool.gguf.source import GgufSource, SourceTensor, as_floats
from qtool.gguf_types import BY_NAME, F32

NVFP4 = BY_NAME["NVFP4"]
OF_TENSORS, FOUR_BITS = "general.tensor_extra.name", "general.tensor_extra.prec_a4"
SCALE, INPUT_SCALE, WEIGHT = ".scale", ".input_scale", ".weight"
HEAD = "output"  # whose scale is loaded where it is NVFP4
MULTIPLIED = "a second scale, by which its matrix is multiplied"
OF_INPUTS = "a scale of inputs, which are not rounded"

_FFN = ("ffn_gate", "ffn_up", "ffn_down")
_EXPERTS = tuple(f"{one}_exps" for one in _FFN)
_SHARED = tuple(f"{one}_shexp" for one in _FFN)
_FEED_FORWARD = frozenset((*_FFN, *_EXPERTS, *_SHARED))
# The matrices whose second scales llama.cpp loads.
_LOADED = _FEED_FORWARD | frozenset((
    "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "attn_gate", HEAD, "ssm_in", "ssm_out",
    "ssm_alpha", "ssm_beta", "eh_proj", "shared_head_head",
))  # fmt: skip
# Whose graphs multiply by those of all the feed-forward part. All others do by none of it.
_WHOLE = frozenset((
    "cohere2", "cohere2moe", "deepseek32", "dots3note", "gemma4", "glm-dsa", "hy_v3", "llama",
    "mellum", "mistral3", "nemotron_h", "nemotron_h_moe", "qwen3", "qwen35", "qwen35moe",
    "qwen3moe", "qwen3next", "qwen4exp",
))  # fmt: skip
# What else is loaded and forgotten.
_FORGOTTEN: Mapping[str, tuple[str, ...]] = {
    "afmoe": ("attn_gate",),
    "bailingmoe3": ("attn_q", "attn_output", "attn_gate", "ssm_beta", HEAD),
    "cohere2moe": (HEAD,),
    "deci": ("attn_output",),
    "deepseek2": ("attn_q", HEAD),
    "deepseek32": (HEAD,),
    "deepseek4": (HEAD,),
    "dots3note": ("attn_gate", HEAD),
    "gemma3n": ("attn_q", "attn_qkv"),
    "glm-dsa": (HEAD,),
    "glm5-next": ("attn_output", "ssm_beta", HEAD),
    "hrm_text": ("attn_gate",),
    "hy_v3": ("eh_proj",),
    "hy_v4": ("attn_output", "attn_gate", HEAD),
    "kimi-linear": ("attn_q", "attn_qkv", "attn_output", "ssm_beta", HEAD),
    "laguna": ("attn_gate", HEAD),
    "mimo2": ("attn_q", "attn_k", "attn_v", "attn_qkv"),
    "minimax-01": ("attn_qkv", "attn_output"),
    "mistral4": ("attn_q", HEAD),
    "muse-glimmer": ("attn_gate",),
    "qwen3next": (*_FFN, "attn_qkv", "attn_gate", "ssm_in", "ssm_out"),
    "step35": ("attn_gate", "eh_proj"),
}
# What is something else to an architecture, though it is called like a second scale.
_OWN = {"gemma4": ("ffn_down_exps", "ffn_gate_inp")}


def name_of(weight: str) -> str:
    """What the tensor of a matrix's second scale is called."""
    return weight.removesuffix(WEIGHT) + SCALE


def is_own(architecture: str, name: str) -> bool:
    """Whether a tensor is something else to its architecture than it is called."""
    kind, dot, end = name.rpartition(".")
    return dot + end == SCALE and kind.rpartition(".")[2] in _OWN.get(architecture, ())


def is_loaded(weight: str) -> bool:
    """Whether llama.cpp has a place for a matrix's second scale."""
    return _kind(weight) in _LOADED


def is_forgotten(architecture: str, weight: str) -> bool:
    """Whether llama.cpp does not multiply by it; architecture: one of the table."""
    kind = _kind(weight)
    more = _FORGOTTEN.get(architecture, ())
    return kind in more or (kind in _FEED_FORWARD and architecture not in _WHOLE)


def ends_it(tensors: Container[str], weight: str) -> bool:
    """Whether llama.cpp ends at a matrix of NVFP4 with a second scale: one of the feed-forward part
    that has a bias."""
    return _kind(weight) in _FFN and weight.removesuffix(WEIGHT) + ".bias" in tensors


def _kind(weight: str) -> str:
    """blk.0.ffn_up.weight: ffn_up"""
    return weight.removesuffix(WEIGHT).rpartition(".")[2]


@dataclass(frozen=True)
class _Multiplied:
    """Rows of blocks as float32, times the scale of the matrix that each is of."""

    tensor: SourceTensor
    factors: NDArray[np.float32]  # one for each matrix

    def read(self, first: int, last: int) -> NDArray[np.uint8]:
        """See SourceTensor."""
        values = as_floats(self.tensor, np.ascontiguousarray(self.tensor.read(first, last)), 1)
        each = self.tensor.rows // len(self.factors)
        values = values * self.factors[np.arange(first, last) // each, None]
        return np.ascontiguousarray(values).view(np.uint8)


def factors_of(tensor: SourceTensor, scale: SourceTensor, where: str) -> NDArray[np.float32]:
    """The second scales of the matrices of a tensor, [matrices]; FormatError, of the file `where`,
    where they are none."""
    matrices = prod(tensor.shape[:-2])
    if scale.type != F32 or prod(scale.shape) != matrices:
        raise FormatError(
            f"{where}: {scale.name} is {scale.type.name} {list(scale.shape)}, expected F32 "
            f"[{matrices}], the scales of {tensor.name}"
        )
    factors = as_floats(scale, np.ascontiguousarray(scale.read(0, scale.rows)), 1).reshape(-1)
    if not np.isfinite(factors).all():
        raise FormatError(f"{where}: {scale.name} is not finite; the file is damaged")
    return factors


def multiplied(tensor: SourceTensor, scale: SourceTensor, where: str) -> SourceTensor:
    """A matrix as float32 with its second scale; FormatError as factors_of()."""
    view = _Multiplied(tensor, factors_of(tensor, scale, where))
    return replace(tensor, type=F32, read=view.read, fill=None, stored=tensor.type)


def scales_in(source: GgufSource) -> Iterator[tuple[SourceTensor, SourceTensor]]:
    """The matrices that have a second scale, and these."""
    tensors = {tensor.name: tensor for tensor in source.tensors}
    for tensor in source.tensors:
        scale = tensors.get(name_of(tensor.name))
        if scale is None or not tensor.name.endswith(WEIGHT) or not is_loaded(tensor.name):
            continue
        if is_own(source.architecture, scale.name):
            continue
        if _kind(tensor.name) != HEAD or tensor.type == NVFP4:
            yield tensor, scale


def with_scales(source: GgufSource, kept: Container[str] = ()) -> GgufSource:
    """The source, matrices that have a second scale as float32 with it, and no tensors of these.

    kept: names of matrices that are left as they are, and their scales.
    """
    views, gone = {}, {}
    for tensor, scale in scales_in(source):
        if tensor.name not in kept:
            views[tensor.name] = multiplied(tensor, scale, str(source.path))
            gone[scale.name] = MULTIPLIED
    for tensor in source.tensors:
        weight = tensor.name.removesuffix(INPUT_SCALE) + WEIGHT
        if tensor.name.endswith(INPUT_SCALE) and is_loaded(weight) and weight not in kept:
            gone[tensor.name] = OF_INPUTS
    if not gone:
        return source
    return replace(
        source,
        metadata=_without(source.metadata, views),
        tensors=tuple(views.get(t.name, t) for t in source.tensors if t.name not in gone),
        dropped=(*source.dropped, *gone.items()),
    )


def _without(metadata: Mapping[str, Value], names: Container[str]) -> Mapping[str, Value]:
    """What the keys say of inputs, less these tensors."""
    given, told = metadata.get(OF_TENSORS), metadata.get(FOUR_BITS)
    if given is None or told is None or {given.kind, told.kind} != {Kind.ARRAY}:
        return metadata
    left = [
        (name, one) for name, one in zip(given.value, told.value, strict=False) if name not in names
    ]
    others = {key: value for key, value in metadata.items() if key not in (OF_TENSORS, FOUR_BITS)}
    return others | inputs_of(dict(left))


def inputs_of(told: Mapping[str, bool]) -> dict[str, Value]:
    """The keys that say whether inputs of tensors of NVFP4 may have four bits: llama.cpp gives them
    these on Blackwell GPUs where it is not said that they may not."""
    if not told:
        return {}
    return {
        OF_TENSORS: strings(list(told)),
        FOUR_BITS: array(Kind.BOOL, list(told.values())),
    }
