"""Decoders whose keys and values are made of one latent vector (DeepSeek V2 and V3, Kimi K2).

    checkpoint  kv_b_proj [heads * (keys + values), latents]
    gguf        attn_k_b [heads, latents, keys]: transposed, what queries are multiplied by
                attn_v_b [heads, values, latents]

llama.cpp attends to the latents themselves, as if they were one head of keys and values.
"""

from dataclasses import replace

from qtool.checkpoints.hf_config import Config, count, number
from qtool.formats.gguf_values import Value, f32, u32
from qtool.gguf.architectures import limits
from qtool.gguf.architectures.keys import Key, rope_key
from qtool.gguf.architectures.limits import Limit
from qtool.gguf.architectures.modules import (
    BLOCK,
    OUTER,
    TWO_NORMS,
    Module,
    block,
    in_blocks,
    since,
)
from qtool.gguf.architectures.row import OWN_HEADS, Architecture
from qtool.gguf.architectures.sparse import CHOICE_BIAS, LATER_EXPERTS
from qtool.gguf.architectures.sparse_keys import ROUTED, SCALED, SIGMOID, SOFTMAX, with_own
from qtool.gguf.from_hf.cuts import Cut

_WITHOUT_QUERY_LATENTS = (26, 27)  # blocks of the models that llama.cpp takes for such
_ITS_VOCABULARY = (48, 128256)  # or as many blocks with that many tokens
_FUNCTIONS = {"softmax": SOFTMAX, "sigmoid": SIGMOID}


def _has_query_latents(config: Config, block: int) -> bool:
    return config.get("q_lora_rank") is not None


def _has_none(config: Config, block: int) -> bool:
    return not _has_query_latents(config, block)


def _widths(config: Config) -> tuple[int, int]:
    return count(config, "qk_nope_head_dim"), count(config, "v_head_dim")


def _keys_of(module: Module, config: Config) -> Module:
    keys, values = _widths(config)
    heads = count(config, "num_attention_heads")
    return replace(module, cut=Cut(heads, keys + values, 0, keys, transposed=True))


def _values_of(module: Module, config: Config) -> Module:
    keys, values = _widths(config)
    heads = count(config, "num_attention_heads")
    return replace(module, cut=Cut(heads, keys + values, keys, keys + values))


_AT = BLOCK + "self_attn."
_BOTH = _AT + "kv_b_proj"
LATENT_HEADS = (
    Module(_AT + "q_proj", shape=("queries", "width"), blocks=_has_none),
    Module(_AT + "q_a_proj", shape=("query latents", "width"), blocks=_has_query_latents),
    Module(_AT + "q_a_layernorm", shape=("query latents",), blocks=_has_query_latents),
    Module(_AT + "q_b_proj", shape=("queries", "query latents"), blocks=_has_query_latents),
    Module(_AT + "kv_a_proj_with_mqa", shape=("latents and rotated keys", "width")),
    Module(_AT + "kv_a_layernorm", shape=("latents",)),
    Module(_AT + "k_b_proj", within=_BOTH, shape=("number of heads", "latents", "plain keys"),
           fit=_keys_of),
    Module(_AT + "v_b_proj", within=_BOTH, shape=("number of heads", "head of values", "latents"),
           fit=_values_of),
    Module(_AT + "o_proj", shape=("width", "heads of values")),
)  # fmt: skip
# Where there are no latents of queries.
LATENT_ATTENTION_OF_ONE = tuple(
    replace(module, blocks=None)
    for module in LATENT_HEADS
    if module.blocks is not _has_query_latents
)
LATENT_ATTENTION_OF_QUERIES = tuple(
    replace(module, blocks=None) for module in LATENT_HEADS if module.blocks is not _has_none
)
LATENT_MODULES = (*OUTER, *LATENT_HEADS, *block(*TWO_NORMS), *LATER_EXPERTS)


def _query_latents(config: Config) -> Value:
    """0 where there are none: llama.cpp asks for the key unless it knows the number of blocks."""
    given = config.get("q_lora_rank")
    return u32(0 if given is None else count(config, "q_lora_rank"))


def _asked_for(config: Config) -> bool:
    blocks = count(config, "num_hidden_layers")
    known = blocks in _WITHOUT_QUERY_LATENTS
    return not known and (blocks, config.get("vocab_size")) != _ITS_VOCABULARY


def scores(function: int) -> Key:
    """Said in any case: llama.cpp takes softmax for granted."""

    def make(config: Config) -> Value:
        return u32(_FUNCTIONS.get(str(config.get("scoring_func")), function))

    return Key("expert_gating_func", "", make)


def latents(config: Config) -> Value:
    return u32(count(config, "kv_lora_rank"))


def _latents_and_rotated(config: Config) -> Value:
    return u32(count(config, "kv_lora_rank") + count(config, "qk_rope_head_dim"))


def whole_head(config: Config) -> Value:
    return u32(count(config, "qk_nope_head_dim") + count(config, "qk_rope_head_dim"))


def _adding_up(config: Config) -> Value | None:
    return _ADD_UP.value(config) if config.get("norm_topk_prob") else None


def _slower(config: Config) -> Value | None:
    """By how much scores grow where texts are longer than at first."""
    rope = config["rope_parameters"]["full_attention"]
    given = rope.get("mscale_all_dim")
    return None if given is None else f32(0.1 * number(rope, "mscale_all_dim"))


_ADD_UP = Key("expert_weights_norm", "norm_topk_prob", flag=True)
KEYS = with_own(
    ROUTED,
    Key("attention.head_count_kv", "", lambda config: u32(1)),
    Key("vocab_size", "vocab_size"),
    Key("attention.q_lora_rank", "q_lora_rank", lambda config: (
        None if config.get("q_lora_rank") is None and not _asked_for(config)
        else _query_latents(config)
    )),
    Key("attention.kv_lora_rank", "kv_lora_rank"),
    Key("attention.key_length", "", _latents_and_rotated),
    Key("attention.value_length", "", latents),
    Key("attention.key_length_mla", "", whole_head),
    Key("attention.value_length_mla", "v_head_dim"),
    Key("rope.dimension_count", "qk_rope_head_dim"),
    Key("rope.scaling.yarn_log_multiplier", "rope_parameters", _slower),
    Key("expert_weights_norm", "norm_topk_prob", _adding_up, flag=True),
    SCALED,
)  # fmt: skip


def _known_rank(config: Config) -> str | None:
    if config.get("q_lora_rank") is None or _asked_for(config):
        return None
    blocks = count(config, "num_hidden_layers")
    return f"q_lora_rank is {config['q_lora_rank']}, and with {blocks} blocks it takes none"


def _known_yarn(config: Config) -> str | None:
    """It scales scores by mscale_all_dim, and takes mscale for the same."""
    rope = config["rope_parameters"]["full_attention"]
    if rope["rope_type"] != "yarn":
        return None
    given, own = (rope.get(name) or 0 for name in ("mscale", "mscale_all_dim"))
    if given != own or not own:
        return f"mscale is {given} and mscale_all_dim {own}, and it takes them to be the same"
    return limits.yarn_of_usual_ramp(config)


def _groups_known(config: Config) -> str | None:
    groups, used = config.get("n_group") or 1, config.get("topk_group") or 0
    if groups == 1 or 0 < used < groups < count(config, "n_routed_experts"):
        return None
    return f"a token's experts are of {used} of {groups} groups, and it takes fewer than there are"


def _neighbours(config: Config) -> str | None:
    if config.get("rope_interleave", True):
        return None
    return "rope_interleave is false, and it rotates neighbours"


def _every_block(config: Config) -> str | None:
    given = config.get("moe_layer_freq", 1)
    return None if given == 1 else f"moe_layer_freq is {given}, and it takes 1"


def _best_of_groups(config: Config) -> str | None:
    if (config.get("n_group") or 1) == 1:
        return None
    return (
        "groups of experts are chosen by the best of each, and llama.cpp chooses by the sum of "
        "the best two: some tokens visit other experts there"
    )


REFUSE: tuple[Limit, ...] = (
    limits.as_many_key_heads, limits.no_biases("attention_bias"), _known_rank, _known_yarn,
    _groups_known,
    _neighbours, _every_block,
)  # fmt: skip
DEFAULTS = {
    **OWN_HEADS, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
}  # fmt: skip

# Mistral 4 has gate and up of experts in one tensor, and llama.cpp too.
_BARE = ((".weight", ""),)
_EXPERTS = BLOCK + "mlp.experts."
_JOINED = (
    *(m for m in LATENT_MODULES if ".experts." not in m.name),
    *in_blocks(since("first_k_dense_replace"), (
        Module(_EXPERTS + "gate_up_proj", within=_EXPERTS + "gate_up_proj", ends=_BARE,
               each=(_EXPERTS + "{i}.{gate,up}_proj.weight", "n_routed_experts"),
               shape=("experts", "gate and up of experts", "width")),
        Module(_EXPERTS + "down_proj", within=_EXPERTS + "down_proj", ends=_BARE,
               each=(_EXPERTS + "{i}.down_proj.weight", "n_routed_experts")),
    )),
)  # fmt: skip


def _first_length(config: Config) -> Value | None:
    """From where on queries grow, where they do."""
    rope = config["rope_parameters"]["full_attention"]
    if not rope.get("llama_4_scaling_beta"):
        return None
    return u32(count(rope, "original_max_position_embeddings"))


# fmt: off
LATENT_ATTENTION: dict[str, Architecture] = {
    "DeepseekV2ForCausalLM": Architecture(
        "deepseek2", LATENT_MODULES, (*KEYS, scores(SOFTMAX)),
        {**DEFAULTS, "first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2,
         "moe_intermediate_size": 1407, "routed_scaling_factor": 1.0,
         "max_position_embeddings": 2048, "vocab_size": 102400},
        rope=("default", "yarn"), yarn=True,
        refuse=(*REFUSE, limits.chosen_add_up(False)), warn=(_best_of_groups,),
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek2", (*LATENT_MODULES, *CHOICE_BIAS), (*KEYS, scores(SIGMOID)),
        {**DEFAULTS, "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1,
         "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4,
         "routed_scaling_factor": 2.5, "norm_topk_prob": True, "max_position_embeddings": 4096,
         "vocab_size": 129280},
        rope=("default", "yarn"), yarn=True, refuse=REFUSE, warn=(),
    ),
    "Mistral4ForCausalLM": Architecture(
        "mistral4", _JOINED,
        (*KEYS, scores(SOFTMAX),
         rope_key("attention.temperature_scale", "llama_4_scaling_beta"),
         Key("attention.temperature_length", "rope_parameters", _first_length)),
        {**DEFAULTS, "num_key_value_heads": 32, "kv_lora_rank": 256, "q_lora_rank": 1024,
         "qk_nope_head_dim": 64, "first_k_dense_replace": 0, "n_routed_experts": 128,
         "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 2048,
         "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
         "max_position_embeddings": 1048576, "vocab_size": 131072,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0,
                             "original_max_position_embeddings": 8192, "beta_fast": 32.0,
                             "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
                             "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5}},
        rope=("default", "yarn"), yarn=True, refuse=REFUSE, warn=(),
    ),
}
# fmt: on
