"""Muse Glimmer: queries and keys are divided by their root mean square, and queries multiplied by
one number, which llama.cpp has as the weights of two norms that no checkpoint has."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints.hf_config import Config, count, head_width, layer_types, number
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import (
    BLOCK,
    FOUR_NORMS,
    MLP,
    OUTER,
    Module,
    attention,
    block,
)
from qtool.gguf.architectures.row import Architecture

_POST_EPS = 1e-8
_MOST_BLOCKS = 1 << 16


def _kinds(config: dict[str, Any]) -> dict[str, Any]:
    """Each fourth block from the last on has no window, where config.json does not say which."""
    blocks = count(config, "num_hidden_layers")
    if config.get("layer_types") is None and blocks < _MOST_BLOCKS:  # others are refused later
        config["layer_types"] = [
            f"{'sliding' if (blocks - 1 - b) % 4 else 'full'}_attention" for b in range(blocks)
        ]
    return config


def _norms(config: Config) -> dict[str, NDArray[np.float32]]:
    """Of queries and keys in each block."""
    width, factor = head_width(config), number(config, "qk_scale_factor")
    return {
        f"blk.{b}.attn_{which}_norm.weight": np.full(width, value, np.float32)
        for b in range(count(config, "num_hidden_layers"))
        for which, value in (("q", factor), ("k", 1.0))
    }


def _rotated_where_windows(config: Config) -> str | None:
    kinds = layer_types(config)
    given = config.get("layer_rope_theta")
    rotated = [(len(kinds) - 1 - b) % 4 != 0 for b in range(len(kinds))]
    if isinstance(given, list):
        rotated = [bool(one) for one in given]
    if rotated == [kind == "sliding_attention" for kind in kinds]:
        return None
    return "layer_rope_theta is not 0 just in blocks without a window, and it rotates the others"


def _small_epsilon(config: Config) -> str | None:
    given = config.get("post_norm_eps")
    return None if given == _POST_EPS else f"post_norm_eps is {given}, and it takes {_POST_EPS}"


def _some_window(config: Config) -> str | None:
    given = config.get("sliding_window")
    return None if given else "sliding_window is not said, and it asks for one"


# fmt: off
MUSE_GLIMMER: dict[str, Architecture] = {
    "MuseGlimmerForConditionalGeneration": Architecture(
        "muse-glimmer",
        (*OUTER, *attention(pairs=True),
         Module(BLOCK + "self_attn.gate_proj", shape=("heads", "width")),
         *(replace(norm, add=1) for norm in block(*FOUR_NORMS)), *block(*MLP)),
        (*keys.USUAL, keys.WINDOW, keys.window_pattern(4, always=True),
         Key("logit_scale", "output_multiplier", real=True),
         Key("final_logit_softcapping", "final_logit_softcapping", real=True)),
        {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
         "rms_norm_eps": 1e-5, "sliding_window": 2048, "final_logit_softcapping": 20.0,
         "qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404,
         "post_norm_eps": _POST_EPS, "rope_theta": 1e4},
        rope=("default",), names="afmoe", needs_head=True, settle=_kinds, computed=_norms,
        refuse=(_rotated_where_windows, _small_epsilon, _some_window,
                limits.no_biases("attention_bias")),
        warn=(),
    ),
}
# fmt: on
