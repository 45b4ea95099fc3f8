"""Cohere's decoders with experts: one norm before attention and experts, rotations where there is a
window and in leading blocks without experts, and the mean of shared experts and chosen ones."""

from dataclasses import replace
from typing import Any

from qtool.checkpoints.hf_config import Config, count, layer_types
from qtool.formats.gguf_values import Value, string, u32
from qtool.gguf.architectures import keys, limits, sparse_keys
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import (
    BLOCK,
    MLP,
    OUTER,
    Module,
    attention,
    before,
    block,
    experts,
    in_blocks,
    since,
)
from qtool.gguf.architectures.row import OWN_HEADS, Architecture
from qtool.gguf.architectures.sparse_keys import SIGMOID, SOFTMAX, with_own
from qtool.messages.printable import in_json

_LEADING, _SHARED = "first_k_dense_replace", "num_shared_experts"
_WIDTH, _WIDE = "prefix_dense_intermediate_size", "inner of leading blocks"
SELECTIONS = {"softmax": SOFTMAX, "sigmoid": SIGMOID}


def _mlp(name: str) -> Module:
    shape = ("width", _WIDE) if name.endswith("down_proj") else (_WIDE, "width")
    return Module(BLOCK + name, shape=shape)


_MODULES = (
    *OUTER,
    *attention(),
    *block("input_layernorm"),
    *in_blocks(before(_LEADING), tuple(map(_mlp, MLP))),
    *in_blocks(since(_LEADING), (
        *block("mlp.gate"),
        *experts("mlp.experts", "gate_proj", "up_proj", "down_proj"),
        *(replace(module, asked=_SHARED)
          for module in block(*(name.replace("mlp.", "mlp.shared_experts.") for name in MLP))),
    )),
)  # fmt: skip


def settle(config: dict[str, Any]) -> dict[str, Any]:
    """The settings as the class of transformers makes them of what config.json says."""
    config[_SHARED] = config.get(_SHARED) or None
    config.setdefault("expert_selection_fn", "softmax")
    if config.get(_WIDTH) is None and config.get(_LEADING):
        config[_WIDTH] = config.get("intermediate_size")
    if config.get("layer_types") is None:
        blocks, first = count(config, "num_hidden_layers"), config.get(_LEADING) or 0
        leading = count(config, "prefix_dense_sliding_window_pattern")
        every = count(config, "sliding_window_pattern")
        full = [(b + 1) % leading == 0 if b < first else (b - first + 1) % every == 0
                for b in range(blocks)]  # fmt: skip
        config["layer_types"] = ["full_attention" if f else "sliding_attention" for f in full]
    return config


def _selection(config: Config) -> Value | None:
    function = SELECTIONS.get(str(config.get("expert_selection_fn")))
    return None if function is None else u32(function)


def _shared_width(config: Config) -> Value | None:
    if not config.get(_SHARED):
        return None
    return u32(count(config, _SHARED) * count(config, "intermediate_size"))


def _as_chosen(config: Config) -> str | None:
    given = config.get("expert_selection_fn")
    if given not in SELECTIONS:
        return f"expert_selection_fn is {in_json(given)}, and it knows softmax and sigmoid"
    if given == "softmax" and not config.get("norm_topk_prob"):
        return "norm_topk_prob is false, and softmax of the chosen adds up to one"
    return None


def _average(config: Config) -> str | None:
    given = config.get("shared_expert_combination_strategy") or "average"
    if not config.get(_SHARED) or given == "average":
        return None
    return f"shared_expert_combination_strategy is {in_json(given)}, and it takes the average"


def _rotated_first(config: Config) -> str | None:
    leading, every = config.get(_LEADING) or 0, config.get("prefix_dense_sliding_window_pattern")
    if every == 1 or "full_attention" not in layer_types(config)[:leading]:
        return None
    return (
        f"prefix_dense_sliding_window_pattern is {every}, and it rotates in all leading blocks "
        "without experts"
    )


def _plain_norms(config: Config) -> str | None:
    given = config.get("rms_norm_eps")
    return None if given is None else f"rms_norm_eps is {given}, and its norms subtract the mean"


# fmt: off
COHERE2_MOE: dict[str, Architecture] = {
    "Cohere2MoeForCausalLM": Architecture(
        "cohere2moe", _MODULES,
        with_own(
            (key for key in keys.USUAL if key is not keys.RMS),
            Key("feed_forward_length", _WIDTH),
            keys.EPS, keys.VOCABULARY, keys.WINDOW, keys.window_pattern(4, always=True),
            keys.ROTATED_OF_HEAD, sparse_keys.LEADING, sparse_keys.ADD_UP,
            Key("logit_scale", "logit_scale", real=True),
            Key("rope.scaling.type", "", lambda _: string("none")),
            Key("expert_feed_forward_length", "intermediate_size"),
            Key("expert_gating_func", "", _selection),
            Key("expert_shared_count", _SHARED),
            Key("expert_shared_feed_forward_length", "", _shared_width),
        ),
        {**OWN_HEADS, "head_dim": 128, "max_position_embeddings": 8192, "layer_norm_eps": 1e-5,
         "rope_theta": 1e4, "logit_scale": 0.0625, "vocab_size": 256000, "sliding_window": 4096,
         "sliding_window_pattern": 4, "num_experts": 8, "num_experts_per_tok": 2,
         "norm_topk_prob": True,
         "prefix_dense_sliding_window_pattern": 1, "tie_word_embeddings": True},
        rope=("default",), names="glm4moe", settle=settle,
        refuse=(limits.no_biases("attention_bias"), limits.dense_first, _as_chosen, _average,
                limits.whole_heads_rotated, _rotated_first, limits.some_windows, _plain_norms),
        warn=(),
    ),
}
# fmt: on
