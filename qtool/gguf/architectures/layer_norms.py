"""Decoders whose norms subtract the mean."""

from qtool.checkpoints.hf_config import WIDTH_BY_HEADS, Config, count
from qtool.formats.gguf_values import Value, f32, u32
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import (
    BLOCK,
    MLP,
    OUTER,
    QK_NORMS,
    TWO_NORMS,
    Module,
    attention,
    block,
    head_norms,
    neox,
    norms_plus_one,
)
from qtool.gguf.architectures.row import GELU, OWN_HEADS, Architecture
from qtool.gguf.from_hf.row_maps import QKV_BY_KIND

_BARE = (*OUTER[:2], *attention(), *block("input_layernorm", *MLP))
_LOGIT_SCALE = Key("logit_scale", "logit_scale", real=True)


def _longest(config: Config) -> Value:
    """What it was trained for in the end, which the first of the family say beside."""
    named = "model_max_length" if config.get("model_max_length") else "max_position_embeddings"
    return u32(count(config, named))


_LONGEST = Key("context_length", "max_position_embeddings", _longest)

# fmt: off
LAYER_NORMS: dict[str, Architecture] = {
    "CohereForCausalLM": Architecture(
        "command-r",
        (*_BARE, Module(BLOCK + QK_NORMS[0], needed=False, shape=("number of heads", "head")),
         Module(BLOCK + QK_NORMS[1], needed=False, shape=("number of key heads", "head"))),
        (*keys.SIZES, _LONGEST, keys.BASE, keys.EPS, _LOGIT_SCALE, keys.SCALING_OR_NONE),
        {**OWN_HEADS, "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "rope_theta": 5e5,
         "logit_scale": 0.0625, "tie_word_embeddings": True},
        rope=("default",),
        refuse=(limits.plain_heads, limits.tied, limits.no_biases("attention_bias"),
                limits.head_norms_of_64_blocks),
        warn=(),
    ),
    "Cohere2ForCausalLM": Architecture(
        "cohere2", _BARE,
        (*keys.SIZES, keys.BASE, keys.EPS, *keys.HEAD, _LOGIT_SCALE, keys.SCALING_OR_NONE,
         keys.ROTATED, keys.VOCABULARY, keys.WINDOW, keys.window_pattern(4)),
        {**OWN_HEADS, "head_dim": WIDTH_BY_HEADS, "max_position_embeddings": 8192,
         "layer_norm_eps": 1e-5, "rope_theta": 1e4, "logit_scale": 0.0625, "vocab_size": 256000,
         "sliding_window": 4096, "tie_word_embeddings": True},
        rope=("default",),
        refuse=(limits.plain_heads, limits.tied, limits.no_biases("attention_bias"),
                limits.whole_heads_rotated),
        warn=(),
    ),
    "OlmoForCausalLM": Architecture(
        "olmo",
        (OUTER[0], OUTER[2], *attention(pairs=True), *block(*MLP)),
        (*keys.SIZES, *keys.SCALING, keys.BASE,
         Key("attention.layer_norm_epsilon", "", lambda _: f32(1e-5)),
         Key("attention.clamp_kqv", "clip_qkv", real=True)),
        {**OWN_HEADS, "max_position_embeddings": 2048, "rope_theta": 1e4},
        refuse=(limits.plain_heads, limits.no_biases("attention_bias")),
        warn=(limits.no_dynamic_rope,),
    ),
    "NemotronForCausalLM": Architecture(
        "nemotron",
        norms_plus_one((*OUTER, *attention(),
                        *block(*TWO_NORMS, "mlp.up_proj", "mlp.down_proj"))),
        (*keys.SIZES, *keys.SCALING, keys.SCALING_OR_NONE, keys.BASE, *keys.HEAD, keys.ROTATED,
         keys.VOCABULARY, Key("attention.layer_norm_epsilon", "norm_eps", real=True),
         Key("attention.layer_norm_rms_epsilon", "norm_eps", real=True)),
        {"head_dim": WIDTH_BY_HEADS, "max_position_embeddings": 4096,
         "norm_eps": 1e-5, "rope_theta": 1e4, "rope_partial_rotary_factor": 0.5,
         "vocab_size": 256000},
        activations=("relu2",), rope=("default", "linear"), needs_head=True,
        refuse=(limits.plain_heads,), warn=(),
    ),
    "Jais2ForCausalLM": Architecture(
        "jais2", (*OUTER, *attention(), *block(*TWO_NORMS, "mlp.up_proj", "mlp.down_proj")),
        (*keys.SIZES, *keys.SCALING, keys.BASE, *keys.HEAD, keys.EPS, keys.ROTATED_OF_HEAD),
        {**OWN_HEADS, "head_dim": WIDTH_BY_HEADS, "max_position_embeddings": 8192,
         "layer_norm_eps": 1e-5, "rope_theta": 1e4, "attention_bias": True, "mlp_bias": True},
        activations=("relu2",), rope=("default",),
        refuse=(limits.needs("attention_bias"), limits.needs("mlp_bias"),
                limits.whole_heads_rotated),
        warn=(),
    ),
    "Starcoder2ForCausalLM": Architecture(
        "starcoder2",
        (*OUTER, *attention(), *block(*TWO_NORMS, "mlp.c_fc", "mlp.c_proj")),
        (*keys.SIZES, *keys.SCALING, keys.BASE,
         Key("attention.layer_norm_epsilon", "norm_epsilon", real=True)),
        {"num_key_value_heads": 2, "max_position_embeddings": 4096, "norm_epsilon": 1e-5,
         "rope_theta": 1e4, "sliding_window": None, "use_bias": True,
         "tie_word_embeddings": True},
        activations=GELU, refuse=(limits.plain_heads, limits.needs("use_bias")),
    ),
    "PhiForCausalLM": Architecture(
        "phi2",
        (OUTER[0], Module("model.final_layernorm"), OUTER[2], *attention()[:3],
         *block("input_layernorm", "self_attn.dense", "mlp.fc1", "mlp.fc2")),
        (*keys.SIZES, keys.ROTATED, keys.EPS, keys.BASE_UNLESS_USUAL),
        {**OWN_HEADS, "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "rope_theta": 1e4,
         "rope_partial_rotary_factor": 0.5, "tie_word_embeddings": False},
        activations=GELU, rope=("default",),
        refuse=(limits.plain_heads, limits.not_tied, limits.no_head_norms), warn=(),
    ),
    "StableLmForCausalLM": Architecture(
        "stablelm",
        (*OUTER, *attention(), *head_norms(), *block("input_layernorm", *MLP),
         Module(BLOCK + "post_attention_layernorm", needed=False)),
        keys.PARALLEL,
        {"num_key_value_heads": 32, "max_position_embeddings": 4096, "layer_norm_eps": 1e-5,
         "rope_theta": 1e4, "rope_partial_rotary_factor": 0.25, "use_parallel_residual": False},
        rope=("default",), needs_head=True,
        refuse=(limits.plain_heads,), warn=(),
    ),
    "GPTNeoXForCausalLM": Architecture(
        "gptneox",
        (Module("gpt_neox.embed_in"), Module("gpt_neox.final_layer_norm"),
         Module("embed_out", needed=False),
         *neox(*TWO_NORMS, "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
         Module("gpt_neox.layers.{b}.attention.query_key_value", QKV_BY_KIND)),
        keys.PARALLEL,
        {"max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "rope_theta": 1e4,
         "rope_partial_rotary_factor": 0.25, "use_parallel_residual": True},
        activations=GELU, rope=("default",), needs_head=True, warn=(),
    ),
}
# fmt: on
