"""Nemotron-H: each block has one part, a state space, attention, an MLP or experts."""

from qtool.checkpoints.hf_config import Config, count
from qtool.formats.gguf_values import boolean, u32
from qtool.gguf.architectures import keys, limits, sparse_keys
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import OUTER, Module, in_blocks
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sparse_keys import with_own
from qtool.gguf.architectures.state_spaces import (
    ATTENTION,
    EXPERTS,
    LONGEST,
    MLP,
    STATE,
    by_block,
    is_a,
    kinds_of,
    no_limit,
    sized,
    state_space,
)
from qtool.gguf.from_hf.row_maps import KEY_PAIRS, QUERY_PAIRS


def has_experts(config: Config) -> bool:
    """Whether Nemotron-H has, which llama.cpp calls another architecture then."""
    return EXPERTS in kinds_of(config)


_AT = "backbone.layers.{b}."
_MIXER = _AT + "mixer."
_NEMOTRON = (
    Module("backbone.embeddings", shape=("vocabulary", "width")),
    Module("backbone.norm_f", shape=("width",)),
    OUTER[2],
    Module(_AT + "norm"),
    *in_blocks(is_a(STATE), state_space(_MIXER)),
    *in_blocks(
        is_a(ATTENTION),
        (
            # In pairs, though nothing is rotated: products of queries and keys are the same.
            Module(_MIXER + "q_proj", QUERY_PAIRS),
            Module(_MIXER + "k_proj", KEY_PAIRS),
            Module(_MIXER + "v_proj"),
            Module(_MIXER + "o_proj"),
        ),
    ),
)


def _expert(part: str) -> Module:
    shape = ("moe's width", "inner of experts")
    return Module(
        f"{_MIXER}experts.{part}_proj",
        each=(f"{_MIXER}experts.{{i}}.{part}_proj", "n_routed_experts"),
        fused=(f"{_MIXER}experts.{part}_proj", None),
        shape=("experts", *(shape if part == "down" else reversed(shape))),
        called=f"ffn_{part}_exps",
    )


_SHARED = "inner of the shared expert"
_MLP = in_blocks(is_a(MLP), tuple(Module(f"{_MIXER}{part}_proj") for part in ("up", "down")))
_NEMOTRON_EXPERTS = in_blocks(
    is_a(EXPERTS),
    (
        Module(_MIXER + "gate", shape=("experts", "width")),
        Module(_MIXER + "gate.e_score_correction", ends=((".bias", "_bias"),), shape=("experts",)),
        _expert("up"),
        _expert("down"),
        Module(_MIXER + "shared_experts.up_proj", shape=(_SHARED, "width")),
        Module(_MIXER + "shared_experts.down_proj", shape=("width", _SHARED)),
        Module(_MIXER + "fc1_latent_proj", shape=("moe's width", "width"), asked="moe_latent_size"),
        Module(_MIXER + "fc2_latent_proj", shape=("width", "moe's width"), asked="moe_latent_size"),
    ),
)


def _no_mlp_beside(config: Config) -> str | None:
    if not {MLP, EXPERTS} <= {*kinds_of(config)}:
        return None
    return "some blocks have an MLP and some have experts, and it knows one of the two"


_NEMOTRON_KEYS = with_own(
    (k for k in keys.USUAL if not k.name.startswith(("rope.", "expert_")) and k is not keys.RMS),
    Key("context_length", "", lambda _: u32(LONGEST)),
    Key("rope.dimension_count", "", lambda config: u32(
        count(config, "hidden_size") // count(config, "num_attention_heads"))),
    Key("rope.scaling.finetuned", "", lambda _: boolean(False)),
    Key("attention.layer_norm_epsilon", "layer_norm_epsilon", real=True),
    keys.VOCABULARY,
    by_block("num_key_value_heads", ATTENTION),
    *sized("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads"),
)  # fmt: skip
_NEMOTRON_DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 128, "layer_norm_epsilon": 1e-5, "vocab_size": 131072,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    "conv_kernel": 4,
}  # fmt: skip
_NEMOTRON_REFUSE = (
    no_limit, _no_mlp_beside, limits.no_biases("mamba_proj_bias", "use_bias"),
)  # fmt: skip

# fmt: off
NEMOTRON_H: dict[str, Architecture] = {
    "NemotronHForCausalLM": Architecture(
        "nemotron_h", (*_NEMOTRON, *_MLP),
        with_own(_NEMOTRON_KEYS, by_block("intermediate_size", MLP)),
        _NEMOTRON_DEFAULTS, activations=("relu2",), rope=("default",), refuse=_NEMOTRON_REFUSE,
        warn=(),
    ),
    "NemotronHForCausalLM with experts": Architecture(
        "nemotron_h_moe", (*_NEMOTRON, *_NEMOTRON_EXPERTS),
        with_own(
            _NEMOTRON_KEYS,
            by_block("moe_intermediate_size", EXPERTS),
            Key("expert_count", "n_routed_experts"),
            Key("expert_used_count", "num_experts_per_tok"),
            Key("expert_feed_forward_length", "moe_intermediate_size"),
            Key("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size"),
            sparse_keys.SHARED_COUNT, sparse_keys.ADD_UP, sparse_keys.SCALED,
            *sparse_keys.GROUPS,
            Key("moe_latent_size", "moe_latent_size"),
        ),
        {**_NEMOTRON_DEFAULTS, "n_routed_experts": 8, "n_shared_experts": 1,
         "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
         "num_experts_per_tok": 2, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
         "norm_topk_prob": True},
        activations=("relu2",), rope=("default",),
        refuse=(*_NEMOTRON_REFUSE, limits.one_group), warn=(),
    ),
}
# fmt: on
