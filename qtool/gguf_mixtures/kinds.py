"""Of a model and its tensors, what llama.cpp's mixtures ask for.

Which tensors are quantized at all, what kind each is, and in which order a file holds them.
Source: llama.cpp 0c1e57098, what src/llama-quant.cpp and src/llama-model-loader.h do.
"""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeVar

from qtool.formats.gguf_values import Value
from qtool.gguf_types import BlockType


class Tensor(Protocol):
    """Of a tensor, what the rules look at."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...  # as numpy has it
    @property
    def type(self) -> BlockType: ...


AnyTensor = TypeVar("AnyTensor", bound=Tensor)


@dataclass(frozen=True)
class ModelFacts:
    """What the rules ask of a model."""

    architecture: str
    layers: int  # block_count, prediction layers included
    heads: int  # of layer 0
    heads_kv: int  # of layer 0
    experts: int = 0
    prediction_layers: int = 0
    experts_used: int = 0  # by a token

    @property
    def gqa(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.heads_kv if self.heads_kv else 0

    @property
    def active_share(self) -> float:
        """The share of the experts that a token visits."""
        return (
            min(1.0, self.experts_used / self.experts)
            if self.experts and self.experts_used
            else 1.0
        )

    @property
    def falcon(self) -> bool:
        return self.architecture == "falcon"

    @property
    def is_70b(self) -> bool:
        """Whether llama.cpp calls the model 70B, which it tells by the number of layers."""
        if _LAYERS_OF_70B.get(self.architecture) != self.layers - self.prediction_layers:
            return False
        llama = self.architecture in ("llama", "llama-embed")
        return not llama or (self.experts != 8 and self.heads != self.heads_kv)


_LAYERS_OF_70B = {"llama": 80, "llama-embed": 80, "qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}


def model_facts(metadata: Mapping[str, Value]) -> ModelFacts:
    """The facts as a GGUF header states them; of a list by layer, what it says of layer 0."""
    architecture = str(metadata["general.architecture"].value)

    def count(key: str, default: int = 0) -> int:
        found = metadata.get(f"{architecture}.{key}")
        value = default if found is None else found.value
        if not isinstance(value, str) and isinstance(value, Sequence) and len(value):
            value = value[0]
        return int(value) if isinstance(value, int) else default

    heads = count("attention.head_count")
    return ModelFacts(
        architecture,
        layers=count("block_count"),
        heads=heads,
        heads_kv=count("attention.head_count_kv", heads),
        experts=count("expert_count"),
        prediction_layers=count("nextn_predict_layers"),
        experts_used=count("expert_used_count"),
    )


# Small, or not the operand of a matrix product; found anywhere in the name.
_NEVER = {
    "norm": ("_norm.weight",),
    "expert router": ("ffn_gate_inp.weight", "ffn_gate_tid2eid.weight"),
    "small": (
        "altup", "laurel", "per_layer_model_proj", "ssm_conv1d", "shortconv.conv.weight",
        "indexer.k_proj.weight", "indexer.q_proj.weight", "attn_rel_b.weight",
        "time_mix_first.weight", "time_mix_w0.weight", "time_mix_w1.weight", "time_mix_w2.weight",
        "time_mix_v0.weight", "time_mix_v1.weight", "time_mix_v2.weight", "time_mix_a0.weight",
        "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight", "time_mix_g2.weight",
        "time_mix_decay_w1.weight", "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight",
    ),
    "image or sound encoder": (
        ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd",
        ".patch_merger", "a.rvq.codebook", "mm.a.code_embd",
    ),
}  # fmt: skip
_NEVER_IN = {
    "glm5-next": (
        "hc_", "indexer.attn_q_b", "indexer.attn_k", "indexer.proj", "indexer_compressor_gate",
        "indexer_compressor_ape", "ssm_f_a.weight", "ssm_f_b.weight", "ssm_g_a.weight",
        "ssm_g_b.weight", "ssm_beta.weight", "attn_kv_a_mqa.weight", "attn_k_b.weight",
        "attn_v_b.weight",
    ),
}  # fmt: skip

# What a converter treats otherwise than llama-quantize: these are in the type of the file,
CONVERTED = (
    "per_layer_model_proj.weight", "altup_proj.weight", "altup_unembd_proj.weight",
    "altup_router.weight", "laurel_l.weight", "laurel_r.weight", "indexer.q_proj.weight",
    "indexer.k_proj.weight", "indexer.attn_q_b.weight", "indexer.attn_k.weight",
    "ssm_f_a.weight", "ssm_f_b.weight", "ssm_g_a.weight", "ssm_g_b.weight", "ssm_beta.weight",
    "attn_kv_a_mqa.weight", "attn_k_b.weight", "attn_v_b.weight",
)  # fmt: skip
# and these in float32.
FLOAT32_WHERE_CONVERTED = (
    ".indexer.proj.weight", "hc_attn_fn.weight", "hc_ffn_fn.weight", "output_hc_fn.weight",
    ".indexer_compressor_gate.weight", ".indexer_compressor_ape.weight",
    ".attn_compressor_ape.weight",
)  # fmt: skip
FLOAT32_IN = {"minimax-m3": ("indexer.q_proj.weight", "indexer.k_proj.weight")}


def kept_reason(tensor: Tensor, architecture: str) -> str | None:
    """Why a tensor is never quantized but copied as it is; None when it may be quantized."""
    name = tensor.name
    if len(stored_shape(tensor.shape)) < 2:
        return "one-dimensional"
    if not name.endswith("weight"):
        return "no weight matrix"
    never = _never(name)
    if never is not None:
        return never
    if architecture == "gpt-oss" and tensor.type.name == "MXFP4":
        return "MXFP4, as it was trained"
    if name in ("position_embd.weight", "token_types.weight"):
        return "positions or token types"
    return "small" if any(part in name for part in _NEVER_IN.get(architecture, ())) else None


@lru_cache(1 << 16)  # one command asks for the same names again and again
def _never(name: str) -> str | None:
    """Why a matrix of this name is quantized in no architecture."""
    found = (reason for reason, parts in _NEVER.items() if any(part in name for part in parts))
    return next(found, None)


def stored_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape as a file states it: leading axes of one do not count."""
    first = next((k for k, size in enumerate(shape) if size != 1), len(shape) - 1)
    return shape[max(first, 0) :] or (1,)


OUTPUT, EMBEDDING, VALUE, KEY, QUERY, ATTENTION_OUTPUT, UP, GATE, DOWN, OTHER = (
    "output", "embedding", "value", "key", "query", "attention output", "up", "gate", "down",
    "other",
)  # fmt: skip
HEAD, EMBEDDING_OF_TOKENS = "output.weight", "token_embd.weight"
EMBEDDINGS = (EMBEDDING_OF_TOKENS, "per_layer_token_embd.weight")
_KINDS = (
    ("attn_qkv.weight", VALUE), ("attn_kv_b.weight", VALUE), ("attn_v.weight", VALUE),
    ("attn_k.weight", KEY), ("attn_q.weight", QUERY), ("attn_output.weight", ATTENTION_OUTPUT),
    ("ffn_up", UP), ("ffn_gate", GATE), ("ffn_down", DOWN),
)  # fmt: skip


def kind_of(name: str) -> str:
    """What the rules know a tensor as: by the first of the parts that is found in its name."""
    if name == HEAD:
        return OUTPUT
    if name in EMBEDDINGS:
        return EMBEDDING
    return next((kind for part, kind in _KINDS if part in name), OTHER)


_LAYER = re.compile(r"blk\.(\d{1,6})\.")


def layer_of(name: str) -> int:
    """N of blk.N., or -1 outside the layers."""
    found = _LAYER.match(name)
    return int(found[1]) if found else -1


def head_of(names: Container[str]) -> str:
    """The tensor that is the head, among those of a file: of its own, or the embedding."""
    return HEAD if HEAD in names else EMBEDDING_OF_TOKENS


def output_order(tensors: Iterable[AnyTensor]) -> list[AnyTensor]:
    """In the order of writing: what belongs to no layer, then by layer; each by name's bytes."""
    return sorted(tensors, key=lambda tensor: (layer_of(tensor.name), tensor.name.encode()))
