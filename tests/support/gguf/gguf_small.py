"""The smallest whole models as GGUF headers, to be told lies about.

keys, tensors = model("llama")        keys: name -> (kind, value), or (kind, values, count)
content(keys, tensors)                the file; the numbers of all tensors are zeros
"""

import math
from collections.abc import Mapping
from typing import Any

from qtool.formats.gguf_values import Kind
from qtool.gguf_types import TENSOR_TYPES, BlockType
from support.gguf.gguf_bytes import Gguf, array, entry, info

WIDTH, INNER, HEADS, KEY_HEADS, VOCABULARY = 32, 64, 4, 2, 8
ARCHITECTURES = ("llama", "llama-experts", "gemma2", "phi3", "gptneox", "stablelm")
Keys = dict[str, tuple[Any, ...]]  # (kind, value), or (Kind.ARRAY, element, values)
Tensors = dict[str, tuple[int, ...]]  # numpy's order

_ATTENTION = {
    "attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH // 2, WIDTH), "attn_v": (WIDTH // 2, WIDTH),
    "attn_output": (WIDTH, WIDTH), "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,),
}  # fmt: skip
_FEED = {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
_FUSED = {"attn_qkv": (3 * WIDTH, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
_BLOCKS: dict[str, dict[str, tuple[int, ...]]] = {
    "llama": {**_ATTENTION, **_FEED},
    "llama-experts": {
        **_ATTENTION, "ffn_gate_inp": (4, WIDTH), "ffn_gate_exps": (4, INNER, WIDTH),
        "ffn_up_exps": (4, INNER, WIDTH), "ffn_down_exps": (4, WIDTH, INNER),
    },
    "gemma2": {**_ATTENTION, **_FEED, "post_attention_norm": (WIDTH,), "post_ffw_norm": (WIDTH,)},
    "phi3": {
        "attn_qkv": (2 * WIDTH, WIDTH), "attn_output": (WIDTH, WIDTH), "attn_norm": (WIDTH,),
        "ffn_norm": (WIDTH,), "ffn_up": (2 * INNER, WIDTH), "ffn_down": (WIDTH, INNER),
    },
    "gptneox": {**_FUSED, "attn_output": (WIDTH, WIDTH), "attn_norm": (WIDTH,),
                "ffn_norm": (WIDTH,)},
    "stablelm": {**_ATTENTION, **_FEED, "attn_q_norm": (HEADS, 8), "attn_k_norm": (KEY_HEADS, 8)},
}  # fmt: skip
_RMS = {"attention.layer_norm_rms_epsilon": (Kind.FLOAT32, 1e-6)}
_PARALLEL = {
    "attention.layer_norm_epsilon": (Kind.FLOAT32, 1e-5),
    "use_parallel_residual": (Kind.BOOL, True),
    "rope.dimension_count": (Kind.UINT32, 2),
}
_OWN: dict[str, Keys] = {
    "llama": {**_RMS, "rope.freq_base": (Kind.FLOAT32, 5e5), "vocab_size": (Kind.UINT32, 8),
              "rope.scaling.type": (Kind.STRING, "yarn"),
              "rope.scaling.factor": (Kind.FLOAT32, 4.0),
              "rope.scaling.original_context_length": (Kind.UINT32, 16)},
    "llama-experts": {**_RMS, "expert_count": (Kind.UINT32, 4),
                      "expert_used_count": (Kind.UINT32, 2)},
    "gemma2": {**_RMS, "attention.key_length": (Kind.UINT32, 8),
               "attention.value_length": (Kind.UINT32, 8),
               "attn_logit_softcapping": (Kind.FLOAT32, 50.0),
               "final_logit_softcapping": (Kind.FLOAT32, 30.0),
               "attention.sliding_window": (Kind.UINT32, 16),
               "attention.sliding_window_pattern": (Kind.ARRAY, Kind.BOOL, [False])},
    "phi3": {**_RMS, "rope.dimension_count": (Kind.UINT32, 8),
             "rope.freq_base": (Kind.FLOAT32, 1e4),
             "rope.scaling.original_context_length": (Kind.UINT32, 64),
             "attention.sliding_window": (Kind.UINT32, 16)},
    "gptneox": _PARALLEL,
    "stablelm": _PARALLEL,
}  # fmt: skip
TOKENIZERS: dict[str, Keys] = {
    "gpt2": {
        "model": (Kind.STRING, "gpt2"),
        "pre": (Kind.STRING, "gpt-2"),
        "tokens": (Kind.ARRAY, Kind.STRING, ["<|end|>", "a", "b", "ab", "Ġ", "Ġa", "c", "d"]),
        "token_type": (Kind.ARRAY, Kind.INT32, [3, 1, 1, 1, 1, 1, 1, 1]),
        "merges": (Kind.ARRAY, Kind.STRING, ["a b", "Ġ a"]),
    },
    "llama": {
        "model": (Kind.STRING, "llama"),
        "tokens": (Kind.ARRAY, Kind.STRING, ["<unk>", "<s>", "</s>", "a", "b", "ab", "▁", "c"]),
        "scores": (Kind.ARRAY, Kind.FLOAT32, [0, 0, 0, -1, -2, -3, -4, -5]),
        "token_type": (Kind.ARRAY, Kind.INT32, [2, 3, 3, 1, 1, 1, 1, 1]),
        "add_bos_token": (Kind.BOOL, True),
    },
    "none": {"model": (Kind.STRING, "none")},
}


def model(architecture: str, tokenizer: str = "none", blocks: int = 1) -> tuple[Keys, Tensors]:
    """A whole model, without a lie."""
    name = architecture.removesuffix("-experts")
    sizes = {
        "block_count": blocks, "context_length": 64, "embedding_length": WIDTH,
        "feed_forward_length": INNER, "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS if name == "gptneox" else KEY_HEADS,
    }  # fmt: skip
    own = {key: (Kind.UINT32, value) for key, value in sizes.items()} | _OWN[architecture]
    keys: Keys = {"general.architecture": (Kind.STRING, name)}
    keys |= {f"{name}.{key}": value for key, value in own.items()}
    keys |= {f"tokenizer.ggml.{key}": value for key, value in TOKENIZERS[tokenizer].items()}
    keys["tokenizer.ggml.bos_token_id"] = (Kind.UINT32, 1)
    tensors: Tensors = {"token_embd.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,)}
    if name != "gemma2":
        tensors["output.weight"] = (VOCABULARY, WIDTH)
    for block in range(blocks):
        for part, shape in _BLOCKS[architecture].items():
            tensors[f"blk.{block}.{part}.weight"] = shape
            if name == "gptneox" or (name == "stablelm" and part == "attn_norm"):
                tensors[f"blk.{block}.{part}.bias"] = shape[:1]
        if name == "stablelm":  # parallel: one norm for both
            del tensors[f"blk.{block}.ffn_norm.weight"]
    if name in ("gptneox", "stablelm"):
        tensors["output_norm.bias"] = (WIDTH,)
    return keys, tensors


def content(
    keys: Mapping[str, tuple[Any, ...]],
    tensors: Mapping[str, tuple[int, ...]],
    types: Mapping[str, BlockType] | None = None,
    alignment: int = 32,
) -> bytes:
    """The file; tensors are F32 but for those that `types` names."""
    float32 = next(kind for kind in TENSOR_TYPES.values() if kind.name == "F32")
    entries = [
        array(key, *stated[1:]) if stated[0] == Kind.ARRAY else entry(key, *stated)
        for key, stated in keys.items()
    ]
    infos, size = [], 0
    for name, shape in tensors.items():
        kind = (types or {}).get(name, float32)
        infos.append(info(name, shape, kind.number, size))
        size += math.prod(shape) // kind.weights * kind.nbytes
        size += -size % alignment
    return bytes(Gguf(entries, infos, bytes(size), alignment=alignment))
