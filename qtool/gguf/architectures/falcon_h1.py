"""Falcon-H1: attention and a state space side by side in each block.

The model multiplies what goes in and out of its matrices by settings; llama.cpp has the matrices
multiplied:

    k_proj     key_multiplier, then attention_in_multiplier
    in_proj    ssm_in_multiplier, then one of ssm_multipliers for gates, states, inputs, outputs
               and steps

In a checkpoint made of a file the settings are one.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from qtool.checkpoints.hf_config import WIDTH_BY_HEADS, Config, number
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.modules import BLOCK, OUTER, Module, attention, block
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sizes import SIZES
from qtool.gguf.architectures.sparse_keys import with_own
from qtool.gguf.architectures.state_spaces import no_limit, sized, state_space
from qtool.gguf.from_hf.row_maps import Factor

_LISTS = {"mlp_multipliers": 2, "ssm_multipliers": 5}


def _factor(config: Config, name: str, index: int | None = None) -> float:
    """A setting, or a number of a list of them; one where it is silent."""
    given = config.get(name)
    if index is None:
        return 1.0 if given is None else number(config, name)
    if given is None:
        return 1.0
    limits.listed(config, name, _LISTS[name])
    return number({name: given[index]}, name)


def _times(*settings: str, index: int | None = None) -> Callable[[Module, Config], Module]:
    """The module with numbers that all of it is multiplied by, one after another."""

    def fit(module: Module, config: Config) -> Module:
        return replace(module, factors=tuple(_all(_factor(config, s, index)) for s in settings))

    return fit


def _all(factor: float) -> Factor:
    return np.array([factor], np.float32)


def _in_parts(module: Module, config: Config) -> Module:
    """Rows of in_proj: gates, states, inputs, outputs, steps."""
    states, both = SIZES["state"](config), SIZES["state and its keys"](config)
    keyed = (both - states) // 2
    rows = (states, states, keyed, keyed, SIZES["state's heads"](config))
    each = [np.full(n, _factor(config, "ssm_multipliers", i)) for i, n in enumerate(rows)]
    parts = np.concatenate(each).astype(np.float32)
    return replace(module, factors=(_all(_factor(config, "ssm_in_multiplier")), parts))


_FITS = {
    "feed_forward.gate_proj": _times("mlp_multipliers", index=0),
    "feed_forward.down_proj": _times("mlp_multipliers", index=1),
    "self_attn.q_proj": _times("attention_in_multiplier"),
    "self_attn.k_proj": _times("key_multiplier", "attention_in_multiplier"),
    "self_attn.v_proj": _times("attention_in_multiplier"),
    "self_attn.o_proj": _times("attention_out_multiplier"),
    "mamba.in_proj": _in_parts,
    "mamba.out_proj": _times("ssm_out_multiplier"),
    "lm_head": _times("lm_head_multiplier"),
    "model.embed_tokens": _times("embedding_multiplier"),
}


def _fitted(module: Module) -> Module:
    name = module.name.removeprefix(BLOCK)
    asked = "mamba_rms_norm" if name == "mamba.norm" else ""
    return replace(module, fit=_FITS.get(name), asked=asked)


_MODULES = tuple(map(_fitted, (
    OUTER[0],
    Module("model.final_layernorm", shape=("width",), called="output_norm"),
    OUTER[2],
    *block("input_layernorm"),
    Module(BLOCK + "pre_ff_layernorm", shape=("width",), ends=(("", ".weight"),),
           called="ffn_norm"),
    *attention(),
    *state_space(BLOCK + "mamba."),
    *(Module(f"{BLOCK}feed_forward.{part}_proj", called=f"ffn_{part}")
      for part in ("gate", "up", "down")),
)))  # fmt: skip


def _norm_behind_the_gate(config: Config) -> str | None:
    if not (config.get("mamba_rms_norm") and config.get("mamba_norm_before_gate")):
        return None
    return "mamba_norm_before_gate is true, and it norms behind the gate"


def _one_embedding(config: Config) -> str | None:
    one, other = (_factor(config, f"{name}_multiplier") for name in ("embedding", "lm_head"))
    if not config.get("tie_word_embeddings") or one == other:
        return None
    return (
        f"the head is the embedding, multiplied by lm_head_multiplier {other}, and it has one of "
        f"them, multiplied by embedding_multiplier {one}"
    )


# fmt: off
FALCON_H1: dict[str, Architecture] = {
    "FalconH1ForCausalLM": Architecture(
        "falcon-h1", _MODULES,
        with_own(
            (k for k in keys.USUAL if not k.name.startswith(("rope.", "expert_"))),
            keys.BASE, keys.VOCABULARY,
            *sized("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads"),
        ),
        {"num_key_value_heads": 8, "head_dim": WIDTH_BY_HEADS, "mamba_n_heads": 128,
         "mamba_n_groups": 1,
         "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
         "mamba_rms_norm": False, "mamba_norm_before_gate": True, "vocab_size": 128000,
         "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e4},
        rope=("default",), warn=(),
        refuse=(limits.no_biases("mamba_proj_bias", "projectors_bias", "attention_bias",
                                 "mlp_bias"),
                limits.needs("mamba_conv_bias"), no_limit, _norm_behind_the_gate, _one_embedding),
    ),
}
# fmt: on
