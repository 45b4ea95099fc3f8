"""Multimodal classes, around a decoder of any class: text_config.model_type names that one.

Released checkpoints leave out of text_config what equals the default of the decoder's class, sizes
too; no checkpoint of a decoder alone does that.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qtool.checkpoints.hf_config import Config, text_settings
from qtool.formats.gguf_values import u32
from qtool.gguf.architectures.dense import DENSE
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.latent_attention import LATENT_ATTENTION
from qtool.gguf.architectures.latent_mlp import LATENT_MLP
from qtool.gguf.architectures.nemotron_h import NEMOTRON_H, has_experts
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.short_convolutions import SHORT_CONVOLUTIONS
from qtool.gguf.architectures.sparse import SPARSE
from qtool.gguf.architectures.sparse_keys import with_own
from qtool.gguf.architectures.vision import VISION

# The class around -> what may be inside, first what is where config.json does not say.
AROUND: Mapping[str, tuple[str, ...]] = {
    "LlavaForConditionalGeneration": ("llama", "mistral", "qwen2"),
    "Idefics3ForConditionalGeneration": ("llama",),
    "SmolVLMForConditionalGeneration": ("llama",),
    "JanusForConditionalGeneration": ("llama",),
    "InternVLForConditionalGeneration": ("qwen2", "llama", "qwen3", "qwen3_moe"),
    "InternVLChatModel": ("qwen2", "llama", "phi3", "qwen3", "qwen3_moe"),
    "Lfm2VlForConditionalGeneration": ("lfm2",),
    "VoxtralForConditionalGeneration": ("llama",),
    "Qwen2AudioForConditionalGeneration": ("qwen2",),
    "Qwen3ASRForConditionalGeneration": ("qwen3",),
    "LightOnOCRForConditionalGeneration": ("qwen3",),
    "LightOnOcrForConditionalGeneration": ("qwen3",),
    "NemotronH_Nano_VL_V2": ("nemotron_h",),
    "KimiVLForConditionalGeneration": ("deepseek_v3",),
    "KimiK25ForConditionalGeneration": ("deepseek_v3", "kimi_k2"),
    "Kimi_K25ForConditionalGeneration": ("deepseek_v3", "kimi_k2"),
}
# Of these transformers ties the head unless config.json says no, outside of text_config.
TIED = (
    "InternVLForConditionalGeneration",
    "JanusForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "LightOnOCRForConditionalGeneration",
    "LightOnOcrForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
)


def _sizes(hidden: int, inner: int, blocks: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": blocks,
        "num_attention_heads": heads,
    }  # fmt: skip


def _of(row: Architecture, **defaults: Any) -> Architecture:
    """Sizes stand first, since others are derived from them."""
    sizes = {name: size for name, size in defaults.items() if name not in row.defaults}
    return replace(row, defaults={**sizes, **row.defaults, **defaults})


_DEEPSEEK = _of(LATENT_ATTENTION["DeepseekV3ForCausalLM"], **_sizes(7168, 18432, 61, 128))
_QWEN = {**_sizes(4096, 22016, 32, 32), "vocab_size": 151936}
_DECODERS: Mapping[str, Architecture] = {
    "llama": _of(DENSE["LlamaForCausalLM"], **_sizes(4096, 11008, 32, 32)),
    "mistral": _of(DENSE["MistralForCausalLM"], **_sizes(4096, 14336, 32, 32)),
    "qwen2": _of(DENSE["Qwen2ForCausalLM"], **_QWEN),
    "qwen3": _of(DENSE["Qwen3ForCausalLM"], **_QWEN),
    "qwen3_moe": _of(
        SPARSE["Qwen3MoeForCausalLM"], **_sizes(2048, 6144, 24, 32), vocab_size=151936
    ),
    "phi3": _of(DENSE["Phi3ForCausalLM"], **_sizes(3072, 8192, 32, 32), vocab_size=32064),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "nemotron_h": NEMOTRON_H["NemotronHForCausalLM"],
    "lfm2": _of(SHORT_CONVOLUTIONS["Lfm2ForCausalLM"], **_sizes(2560, 12288, 32, 32)),
}

_LIGHT_ON = {
    **_sizes(1024, 3072, 28, 16), "num_key_value_heads": 8, "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}  # fmt: skip
# What these take for granted of the decoder in place of its own class.
OTHERWISE: Mapping[str, dict[str, Any]] = {
    "VoxtralForConditionalGeneration": {
        **_sizes(3072, 8192, 30, 32), "vocab_size": 131072, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 1e8,
    },
    "LightOnOCRForConditionalGeneration": _LIGHT_ON,
    "LightOnOcrForConditionalGeneration": _LIGHT_ON,
    "Qwen3ASRForConditionalGeneration": {
        **_sizes(2048, 6144, 28, 16), "num_key_value_heads": 8, "max_position_embeddings": 65536,
    },
}  # fmt: skip


def _rows(name: str, kinds: tuple[str, ...]) -> dict[str, Architecture]:
    tied: dict[str, Any] = {"tie_word_embeddings": True} if name in TIED else {}
    tied |= OTHERWISE.get(name, {})
    return {
        name if kind == kinds[0] else f"{name} of {kind}": _of(_DECODERS[kind], **tied)
        for kind in kinds
    }


INSIDE: dict[str, Architecture] = {
    name: row for around, kinds in AROUND.items() for name, row in _rows(around, kinds).items()
}
_EXPERTS = "NemotronH_Nano_VL_V2 with experts"
INSIDE[_EXPERTS] = NEMOTRON_H["NemotronHForCausalLM with experts"]
# llama.cpp takes it for a Qwen-VL, of whose images none goes into blocks.
_OF_QWEN = VISION["Qwen3VLForConditionalGeneration"]
INSIDE["Qwen3ASRForConditionalGeneration"] = replace(
    _OF_QWEN,
    keys=with_own(_OF_QWEN.keys, Key("n_deepstack_layers", "", lambda _: u32(0))),
    defaults={**_OF_QWEN.defaults, **INSIDE["Qwen3ASRForConditionalGeneration"].defaults},
)
# Settings and tensors of the decoder lie outermost.
INSIDE["DotsOCRForCausalLM"] = DENSE["Qwen2ForCausalLM"]
INSIDE["YoutuVLForConditionalGeneration"] = LATENT_MLP["YoutuForCausalLM"]


def with_decoder(name: str, config: Config) -> str:
    """The table's name of one of these classes."""
    kind = text_settings(config).get("model_type")
    if kind == "nemotron_h" and has_experts(INSIDE[_EXPERTS].completed(config)):
        return _EXPERTS
    return name if kind in (None, AROUND[name][0]) else f"{name} of {kind}"
