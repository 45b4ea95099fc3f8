"""Nemotron 3 Puzzle: Nemotron-H whose blocks with experts have each their own number of experts to
a token, and experts as wide as each needs. Its class comes with the checkpoint.

Checkpoints call the model `backbone`, or `model`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qtool.checkpoints.hf_config import BY_BLOCK, Config, count, of_block
from qtool.errors import SettingError
from qtool.formats.gguf_values import Kind, Value, array
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import Module
from qtool.gguf.architectures.nemotron_h import NEMOTRON_H
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sparse_keys import with_own
from qtool.gguf.architectures.state_spaces import EXPERTS, kinds_of

_OF_EXPERTS = ("moe_intermediate_size", "num_experts_per_tok")


def _settle(config: dict[str, Any]) -> dict[str, Any]:
    given = config.get("block_configs")
    if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
        raise SettingError("block_configs", "is no list of objects")
    config = {key: value for key, value in config.items() if key != "hybrid_override_pattern"}
    config |= {
        "num_hidden_layers": len(given),
        "layers_block_type": [one.get("block_type") for one in given],
    }
    config[BY_BLOCK] = [
        {name: count(one, name) for name in _OF_EXPERTS} if kind == EXPERTS else {}
        for one, kind in zip(given, kinds_of(config), strict=True)
    ]
    return config


def _in_blocks(name: str, setting: str) -> Key:
    """A number of each block with experts, zero in the others."""

    def make(config: Config) -> Value:
        kinds = kinds_of(config)
        each = [of_block(config, b)[setting] if k == EXPERTS else 0 for b, k in enumerate(kinds)]
        return array(Kind.INT32, each)

    return Key(name, "", make, listed=True, lacking=True)


def _bare(module: Module) -> Module:
    each = module.each and (module.each[0].replace("backbone.", ""), module.each[1])
    fused = module.fused and (module.fused[0].replace("backbone.", ""), module.fused[1])
    name = module.name.replace("backbone.", "")
    # With the names of the other rows, which the gguf package knows.
    called = module.called or _CALLED.get(name.rpartition("mixer.")[2].rpartition("{b}.")[2], "")
    return replace(module, name=name, each=each, fused=fused, called=called)


_CALLED = {
    "embeddings": "token_embd", "norm_f": "output_norm", "lm_head": "output", "norm": "attn_norm",
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate": "ffn_gate_inp", "gate.e_score_correction": "exp_probs_b",
    "shared_experts.up_proj": "ffn_up_shexp", "shared_experts.down_proj": "ffn_down_shexp",
    "fc1_latent_proj": "ffn_latent_down", "fc2_latent_proj": "ffn_latent_up",
}  # fmt: skip
_ALIKE = NEMOTRON_H["NemotronHForCausalLM with experts"]


NEMOTRON_PUZZLE: dict[str, Architecture] = {
    "NemotronHPuzzleForCausalLM": replace(
        _ALIKE,
        modules=tuple(_bare(module) for module in _ALIKE.modules),
        keys=with_own(
            _ALIKE.keys,
            _in_blocks("feed_forward_length", "moe_intermediate_size"),
            _in_blocks("expert_feed_forward_length", "moe_intermediate_size"),
            _in_blocks("expert_used_count", "num_experts_per_tok"),
        ),
        bare=True, remote=True, settle=_settle,
    ),
}  # fmt: skip
