"""The second scale of NVFP4 in GGUF: one number of a whole matrix, in a tensor of its own.

    blk.0.attn_q.weight         NVFP4 [out, in]             blk.0.attn_q.scale         F32 [1]
    blk.0.ffn_up_exps.weight    NVFP4 [experts, out, in]    blk.0.ffn_up_exps.scale    F32 [experts]

    w = (code * scale of 16 weights) * scale of the matrix

llama.cpp multiplies what a product gives by it. It loads these tensors for every architecture, and
forgets them in the products of most (0c1e57098): such a model writes nonsense, without a word.
`.input_scale` is what a checkpoint says of inputs; llama.cpp loads it and makes no use of it.

Source: llama.cpp 0c1e57098, load_tensors in src/llama-model.cpp, the calls of build_lora_mm,
build_attn, build_ffn and build_moe_ffn in src/models, conversion/base.py.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qtool.errors import FormatError
from qtool.formats.gguf_values import Kind, Value, array, strings
from qtool.gguf.source import GgufSource, SourceTensor, as_floats
from qtool.gguf_types import BY_NAME, F32

NVFP4 = BY_NAME["NVFP4"]
OF_TENSORS, FOUR_BITS = "general.tensor_extra.name", "general.tensor_extra.prec_a4"
SCALE, INPUT_SCALE, WEIGHT = ".scale", ".input_scale", ".weight"

_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output")
_FFN = ("ffn_gate", "ffn_up", "ffn_down")
_EXPERTS = tuple(f"{one}_exps" for one in _FFN)
_SHARED = tuple(f"{one}_shexp" for one in _FFN)
_STATES = ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_out")
_LLAMA = (*_ATTENTION, "output", *_FFN, *_EXPERTS)
_LATENT = ("attn_output", *_FFN, *_EXPERTS, *_SHARED)
# The matrices that are multiplied by theirs in every product, by architecture; in all others those
# of attention are,
_APPLIED: Mapping[str, tuple[str, ...]] = {
    "llama": _LLAMA,
    "mistral3": _LLAMA,
    "gemma4": _LLAMA,
    "qwen3": (*_ATTENTION, "output", *_FFN),
    "cohere2": (*_ATTENTION, "output", *_FFN),
    "qwen3moe": (*_ATTENTION, "output", *_EXPERTS),
    "mellum": (*_ATTENTION, "output", *_EXPERTS),
    "cohere2moe": (*_ATTENTION, *_FFN, *_EXPERTS, *_SHARED),
    "hy_v3": (*_LLAMA, *_SHARED),
    "nemotron_h": (*_LLAMA, *_SHARED),
    "nemotron_h_moe": (*_ATTENTION, *_EXPERTS, *_SHARED),
    "qwen35": (*_ATTENTION, "output", *_FFN, *_STATES),
    "qwen35moe": (*_ATTENTION, "output", *_EXPERTS, *_SHARED, *_STATES),
    "qwen4exp": (*_ATTENTION, "output", *_EXPERTS, *_SHARED, *_STATES),
    "qwen3next": ("attn_q", "attn_k", "attn_v", "attn_output", "output", *_EXPERTS, *_SHARED),
    "deepseek32": _LATENT,
    "glm-dsa": _LATENT,
    "dots3note": _LATENT,
}
# but not in these.
_NOWHERE = frozenset((
    "bailingmoe3", "deci", "deepseek2", "deepseek4", "gemma3n", "glm5-next", "hunyuan-dense",
    "hy_v4", "kimi-linear", "mamba", "mamba2", "mimo2", "minicpm3", "minimax-01", "mistral4",
))  # fmt: skip
_OWN = {"gemma4": "ffn_down_exps"}  # whose `.scale` is something else to its architecture
_FEED_FORWARD = frozenset((*_FFN, *_EXPERTS, *_SHARED))


def name_of(weight: str, end: str = SCALE) -> str:
    """What the tensor of a matrix's second scale is called."""
    return weight.removesuffix(WEIGHT) + end


def is_applied(architecture: str, weight: str) -> bool:
    """Whether llama.cpp multiplies by the second scale of a matrix; architecture: of the table."""
    elsewhere = () if architecture in _NOWHERE else _ATTENTION
    return _kind(weight) in _APPLIED.get(architecture, elsewhere)


def is_forgotten(architecture: str, weight: str) -> bool:
    """Whether it is sure that it does not; architecture: of the table."""
    return _kind(weight) in _FEED_FORWARD and not is_applied(architecture, weight)


def _kind(weight: str) -> str:
    """blk.0.ffn_up.weight: ffn_up"""
    return weight.removesuffix(WEIGHT).rpartition(".")[2]


@dataclass(frozen=True)
class _Multiplied:
    """Rows of blocks as float32, times the scale of the matrix that each is of."""

    tensor: SourceTensor
    factors: NDArray[np.float32]  # [1], or one for each matrix

    def read(self, first: int, last: int) -> NDArray[np.uint8]:
        """See SourceTensor."""
        values = as_floats(self.tensor, np.ascontiguousarray(self.tensor.read(first, last)), 1)
        each = self.tensor.rows // len(self.factors)
        values = values * self.factors[np.arange(first, last) // each, None]
        return np.ascontiguousarray(values).view(np.uint8)


def multiplied(tensor: SourceTensor, scale: SourceTensor, where: str) -> SourceTensor:
    """A matrix of blocks as float32 with its second scale; FormatError, of the file `where`, where
    that is none."""
    factors = as_floats(scale, np.ascontiguousarray(scale.read(0, scale.rows)), 1).reshape(-1)
    matrices = tensor.shape[0] if len(tensor.shape) > 2 else 1
    if scale.type != F32 or len(factors) not in (1, matrices):
        raise FormatError(
            f"{where}: {scale.name} is {scale.type.name} {list(scale.shape)}, expected F32 "
            f"[{matrices}], the scales of {tensor.name}"
        )
    if not np.isfinite(factors).all():
        raise FormatError(f"{where}: {scale.name} is not finite; the file is damaged")
    view = _Multiplied(tensor, factors)
    return replace(tensor, type=F32, read=view.read, fill=None, stored=tensor.type)


def scales_in(source: GgufSource) -> Iterator[tuple[SourceTensor, SourceTensor]]:
    """The matrices that have a second scale, and these."""
    tensors = {tensor.name: tensor for tensor in source.tensors}
    own = _OWN.get(source.architecture)
    for tensor in source.tensors:
        scale = tensors.get(name_of(tensor.name))
        if scale is None or tensor.type != NVFP4 or not tensor.name.endswith(WEIGHT):
            continue
        if _kind(tensor.name) != own:
            yield tensor, scale


def with_scales(source: GgufSource, kept: Container[str] = ()) -> GgufSource:
    """The source, matrices that have a second scale as float32 with it, and no tensors of these.

    kept: names of matrices that are left as they are, and their scales.
    """
    views, gone = {}, []
    for tensor, scale in scales_in(source):
        if tensor.name in kept:
            continue
        views[tensor.name] = multiplied(tensor, scale, str(source.path))
        gone.append((scale.name, f"{tensor.name} is multiplied by it"))
        gone.append((name_of(tensor.name, INPUT_SCALE), "it is of inputs, which are not rounded"))
    names = {tensor.name for tensor in source.tensors}
    gone = [(name, why) for name, why in gone if name in names]
    if not gone:
        return source
    left = names - {name for name, _ in gone}
    tensors = tuple(views.get(t.name, t) for t in source.tensors if t.name in left)
    return replace(
        source,
        metadata=_without(source.metadata, views),
        tensors=tensors,
        dropped=(*source.dropped, *gone),
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
