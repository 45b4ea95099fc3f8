"""Decoders that are Llama, or GLM, in other words, whose classes come with their checkpoints:
InternLM 2, Baichuan and ChatGLM.

    wqkv    [groups * (queries + 2) * head, width]   of each group its queries, a key and a value
    W_pack  [3 * width, width]                       all queries, all keys, all values
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from qtool.checkpoints.hf_config import (
    Config,
    count,
    head_width,
    number,
)
from qtool.formats.gguf_values import Value, f32, string, u32
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import (
    BLOCK,
    MLP,
    OUTER,
    TWO_NORMS,
    Module,
    block,
)
from qtool.gguf.architectures.row import OWN_HEADS, Architecture
from qtool.gguf.architectures.sparse_keys import with_own
from qtool.gguf.from_hf.row_maps import Rows, listed

_Fit = Callable[[Module, Config], Module]


def in_pairs(rows: Rows, width: int) -> Rows:
    """Where the neighbours of a rotation lie, which are halves of a head in the checkpoint."""
    k = rows % width
    found: Rows = rows - k + k % 2 * (width // 2) + k // 2
    return found


def _of_groups(which: str) -> _Fit:
    def fit(module: Module, config: Config) -> Module:
        width, groups = head_width(config), count(config, "num_key_value_heads")
        each = count(config, "num_attention_heads") // groups
        heads = range(each) if which == "q" else [each + (which == "v")]
        own = np.array([g * (each + 2) + head for g in range(groups) for head in heads])
        rows = (own[:, None] * width + np.arange(width)).reshape(-1)
        rows = rows if which == "v" else in_pairs(rows, width)
        whole = groups * (each + 2) * width
        return replace(module, rows=listed(rows, whole, "num_attention_heads"))

    return fit


def _of_three(which: str) -> _Fit:
    def fit(module: Module, config: Config) -> Module:
        width, whole = head_width(config), count(config, "hidden_size")
        rows = "qkv".index(which) * whole + np.arange(whole)
        rows = rows if which == "v" else in_pairs(rows, width)
        return replace(module, rows=listed(rows, 3 * whole, "num_attention_heads"))

    return fit


def _parts(name: str, fit: Callable[[str], _Fit]) -> tuple[Module, ...]:
    return tuple(
        Module(f"{BLOCK}{name}.{which}", within=BLOCK + name, fit=fit(which),
               shape=("heads" if which == "q" else "key heads", "width"), called=f"attn_{which}")
        for which in "qkv"
    )  # fmt: skip


_INTERNLM = (
    Module("model.tok_embeddings", shape=("vocabulary", "width"), called="token_embd"),
    OUTER[1],
    Module("output", shape=("vocabulary", "width"), called="output", needed=False),
    *_parts("attention.wqkv", _of_groups),
    Module(BLOCK + "attention.wo", shape=("width", "heads"), called="attn_output"),
    Module(BLOCK + "attention_norm", shape=("width",), called="attn_norm"),
    Module(BLOCK + "ffn_norm", shape=("width",), called="ffn_norm"),
    Module(BLOCK + "feed_forward.w1", shape=("inner", "width"), called="ffn_gate"),
    Module(BLOCK + "feed_forward.w3", shape=("inner", "width"), called="ffn_up"),
    Module(BLOCK + "feed_forward.w2", shape=("width", "inner"), called="ffn_down"),
)
_BAICHUAN = (
    *OUTER, *_parts("self_attn.W_pack", _of_three),
    *block("self_attn.o_proj", *TWO_NORMS, *MLP),
)  # fmt: skip
_ROTATING, _LINEAR_BIAS = 32, 40  # blocks of the 7B and of the 13B, by which it tells them


def _settle_baichuan(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("max_position_embeddings") is None:
        config["max_position_embeddings"] = config.get("model_max_length", 4096)
    return config


def _known_baichuan(config: Config) -> str | None:
    blocks = count(config, "num_hidden_layers")
    if blocks in (_ROTATING, _LINEAR_BIAS):
        return None
    return f"there are {blocks} blocks, and it knows {_ROTATING} of 7B and {_LINEAR_BIAS} of 13B"


def _plain_head(config: Config) -> str | None:
    """Baichuan 2, which is told from the first by its vocabulary alone."""
    if config.get("vocab_size") != 125696:
        return None
    return "the head's rows are scaled to length one while it runs, and it takes them as they are"


def _glm(name: str, called: str, *shape: str) -> Module:
    return Module("transformer.encoder.layers.{b}." + name, called=called, shape=shape)


_CHATGLM = (
    Module("transformer.embedding.word_embeddings", called="token_embd",
           shape=("vocabulary", "width")),
    Module("transformer.encoder.final_layernorm", called="output_norm", shape=("width",)),
    Module("transformer.output_layer", called="output", shape=("vocabulary", "width"),
           needed=False),
    _glm("input_layernorm", "attn_norm", "width"),
    _glm("self_attention.query_key_value", "attn_qkv", "queries, keys, values", "width"),
    _glm("self_attention.dense", "attn_output", "width", "heads"),
    _glm("post_attention_layernorm", "ffn_norm", "width"),
    _glm("mlp.dense_h_to_4h", "ffn_up", "gate and up", "width"),
    _glm("mlp.dense_4h_to_h", "ffn_down", "width", "inner"),
)  # fmt: skip
_HALF = 0.5  # of a head that is rotated


def _settle_chatglm(config: dict[str, Any]) -> dict[str, Any]:
    heads = count(config, "num_attention_heads")
    grouped = config.get("multi_query_attention", True)
    config["num_key_value_heads"] = config.get("multi_query_group_num", heads) if grouped else heads
    config["max_position_embeddings"] = config.get("seq_length")
    config["vocab_size"] = config.get("padded_vocab_size", config.get("vocab_size"))
    return config


def _half_rotated(config: Config) -> Value:
    return u32(int(head_width(config) * _HALF))


def _base(config: Config) -> Value:
    given = config.get("rope_ratio")
    return f32(1e4 * (1 if given is None else number(config, "rope_ratio")))


def _as_wide_channels(config: Config) -> str | None:
    given = config.get("kv_channels")
    if given in (None, head_width(config)):
        return None
    return f"kv_channels is {given}, and it takes width / heads"


_NO_BIASES = limits.no_biases("attention_bias", "mlp_bias", "bias", "add_bias_linear")
_ROPE_WIDTH = Key("rope.dimension_count", "", lambda config: u32(head_width(config)))
_PTH = Key("tensor_data_layout", "", lambda _: string("Meta AI original pth"))
# fmt: off
_BAICHUAN_ROW = Architecture(
    "baichuan", _BAICHUAN, (*keys.USUAL, _ROPE_WIDTH, _PTH),
    {**OWN_HEADS, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
    rope=("default",), needs_head=True, settle=_settle_baichuan,
    refuse=(limits.plain_heads, limits.as_many_key_heads, _known_baichuan, _plain_head,
            _NO_BIASES),
)
_CHATGLM_ROW = Architecture(
    "chatglm", _CHATGLM,
    with_own((*keys.SIZES, keys.RMS), Key("rope.dimension_count", "", _half_rotated),
             Key("rope.freq_base", "", _base)),
    {"layernorm_epsilon": 1e-5, "rms_norm_eps": 1e-5, "rope_theta": 1e4}, rope=("default",),
    settle=_settle_chatglm,
    refuse=(limits.plain_heads, _as_wide_channels, _NO_BIASES,
            limits.taken(("rmsnorm", True), ("post_layer_norm", True), ("interleaved_qkv", False),
                         ("apply_residual_connection_post_layernorm", False))),
)
_ROWS: dict[str, Architecture] = {
    "InternLM2ForCausalLM": Architecture(
        "internlm2", _INTERNLM, keys.USUAL,
        {**OWN_HEADS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
        needs_head=True, refuse=(limits.plain_heads, _NO_BIASES), warn=(limits.no_dynamic_rope,),
    ),
    "BaichuanForCausalLM": _BAICHUAN_ROW,
    "BaiChuanForCausalLM": _BAICHUAN_ROW,
    "ChatGLMModel": _CHATGLM_ROW,
    "ChatGLMForConditionalGeneration": _CHATGLM_ROW,
}
# fmt: on
REMOTE_LLAMAS = {name: replace(row, remote=True) for name, row in _ROWS.items()}
