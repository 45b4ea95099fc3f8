"""Decoders of vision models: llama.cpp reads the vision tower from a file of its own (mmproj).

Of a text alone all sections of a rotation count the same positions, and nothing is added to the
inputs of blocks; so each is one of the decoders of text, under a name and with keys of its own.
"""

from dataclasses import replace

from qtool.checkpoints.hf_config import WIDTH_BY_HEADS, Config, count
from qtool.errors import SourceError
from qtool.formats.gguf_values import Kind, Value, array, u32
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.dense import DENSE, LLAMA, QWEN
from qtool.gguf.architectures.keys import Key, rope_key
from qtool.gguf.architectures.modules import MLP, QK_NORMS, block
from qtool.gguf.architectures.row import LLAMA_ROPE, Architecture
from qtool.gguf.architectures.sections import sections
from qtool.gguf.architectures.sparse import QWEN_EXPERTS
from qtool.gguf.from_hf.cuts import Cut

_SPATIAL = [12, 15, 18, 21]  # blocks of Granite 4 Vision, where config.json does not say
_ROPE = ("default", "mrope", "linear", "yarn", "dynamic")


def _stacked_sights(config: Config) -> Value:
    """How many blocks get something of the image added to what they return."""
    vision = config.get("vision_config")
    given = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    return u32(len(given) if isinstance(given, list) else 3)


def _is_whole(number: object) -> bool:
    return type(number) is int


def _sights(config: Config) -> Value | None:
    """Which part of what is seen each block's input gets, -1 for none; the first is the input."""
    blocks = count(config, "num_hidden_layers")
    stacked = config.get("deepstack_layer_map") or []
    spatial = config.get("spatial_target_layers")
    targets = _SPATIAL if spatial is None else spatial
    pairs = stacked if isinstance(stacked, list) else [stacked]
    if isinstance(targets, list) and all(isinstance(p, list) and len(p) == 2 for p in pairs):
        targets = [*targets, *(to + blocks if _is_whole(to) and to < 0 else to for _, to in pairs)]
    else:
        targets = [None]
    if not all(_is_whole(to) and 0 <= to < blocks for to in targets):
        raise SourceError(
            "config.json: deepstack_layer_map and spatial_target_layers are not numbers of blocks"
        )
    found = [-1] * blocks
    for part, to in enumerate(sorted(targets)):
        if part:
            found[to] = part
    return array(Kind.INT32, found) if targets else None


# fmt: off
_QWEN2 = Architecture(
    "qwen2vl", (*QWEN, *block(*MLP)), (*keys.USUAL, sections([])),
    {"num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
     "rope_theta": 1e6, "use_sliding_window": False},
    rope=_ROPE, alone="Qwen2ForCausalLM",
    refuse=(limits.plain_heads,),
)
_MISTRAL = (
    *keys.LLAMA,
    rope_key("rope.scaling.yarn_log_multiplier", "mscale_all_dim"),
    rope_key("attention.temperature_scale", "llama_4_scaling_beta"),
)

# Where all experts are in two tensors, each is transposed.
_TRANSPOSED = tuple(replace(module, cut=Cut(transposed=True)) for module in QWEN_EXPERTS)
_GRANITE = DENSE["GraniteForCausalLM"]
# Experts one by one, as Qwen3-Omni has them.
_PLAIN = (*QWEN, *block(*QK_NORMS, "mlp.gate"), *QWEN_EXPERTS)
_STACKED_SIGHTS = Key("n_deepstack_layers", "vision_config", _stacked_sights)

_THINKER = Architecture(
    "qwen3vlmoe", _PLAIN,
    (*keys.MOE, sections([24, 20, 20]),
     Key("n_deepstack_layers", "vision_config", lambda _: u32(0))),
    {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
     "moe_intermediate_size": 768, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
     "rope_theta": 1e6, "decoder_sparse_step": 1, "norm_topk_prob": True},
    rope=_ROPE, alone="Qwen3MoeForCausalLM",
    refuse=(limits.experts_everywhere, limits.chosen_add_up(True),
            limits.no_biases("attention_bias")),
)
_HEARS = replace(
    _QWEN2, defaults={**_QWEN2.defaults, "num_key_value_heads": 4, "rms_norm_eps": 1e-6}
)

VISION: dict[str, Architecture] = {
    "Qwen2VLForConditionalGeneration": _QWEN2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2,
    "Qwen3VLForConditionalGeneration": Architecture(
        "qwen3vl", (*QWEN, *block(*QK_NORMS, *MLP)),
        (*keys.USUAL, sections([24, 20, 20]), _STACKED_SIGHTS),
        {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000,
         "rms_norm_eps": 1e-6, "rope_theta": 5e5},
        rope=_ROPE, alone="Qwen3ForCausalLM",
        refuse=(limits.no_biases("attention_bias"),),
    ),
    "Qwen3VLMoeForConditionalGeneration": Architecture(
        "qwen3vlmoe", (*QWEN, *block(*QK_NORMS, "mlp.gate"), *_TRANSPOSED),
        (*keys.MOE, sections([24, 20, 20]), _STACKED_SIGHTS),
        {"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
         "moe_intermediate_size": 1408, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6,
         "rope_theta": 5e5, "decoder_sparse_step": 1},
        rope=_ROPE, alone="Qwen3MoeForCausalLM",
        refuse=(limits.experts_everywhere, limits.no_biases("attention_bias")),
    ),
    # Those that speak, too: what they think is text.
    "Qwen2_5OmniModel": _HEARS,
    "Qwen2_5OmniForConditionalGeneration": _HEARS,
    "Qwen2_5OmniThinkerForConditionalGeneration": _HEARS,
    "Qwen3OmniMoeForConditionalGeneration": _THINKER,
    "Qwen3OmniMoeThinkerForConditionalGeneration": _THINKER,
    "Mistral3ForConditionalGeneration": Architecture(
        "mistral3", (*LLAMA, *block(*MLP)), keys.LLAMA,
        {"num_key_value_heads": 8, "head_dim": WIDTH_BY_HEADS, "max_position_embeddings": 131072,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4, "sliding_window": 4096,
         "tie_word_embeddings": True},
        rope=LLAMA_ROPE, yarn=True, alone="MistralForCausalLM",
    ),
    "Ministral3ForCausalLM": Architecture(
        "mistral3", (*LLAMA, *block(*MLP)), _MISTRAL,
        {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
         "rms_norm_eps": 1e-5, "sliding_window": None,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0,
                             "original_max_position_embeddings": 16384, "beta_fast": 32.0,
                             "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
                             "llama_4_scaling_beta": 0.1}},
        rope=("yarn",), yarn=True, refuse=(limits.mscale_of_one,),
    ),
    "PaddleOCRVLForConditionalGeneration": Architecture(
        "paddleocr", (*QWEN, *block(*MLP)), (*keys.USUAL, sections([16, 24, 24])),
        {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
         "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
        rope=_ROPE, alone="LlamaForCausalLM", refuse=(limits.no_biases("use_bias"),),
    ),
    "Granite4VisionForConditionalGeneration": replace(
        _GRANITE,
        keys=(*_GRANITE.keys, Key("deepstack_mapping", "vision_config", _sights, listed=True)),
        alone="GraniteForCausalLM",
    ),
    "Exaone4_5_ForConditionalGeneration": DENSE["Exaone4ForCausalLM"],
}
# fmt: on
