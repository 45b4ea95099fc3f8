"""Classes that also see, around a decoder of any class: text_config.model_type names that one.

Released checkpoints leave out of text_config what equals the default of the decoder's class, sizes
too; no checkpoint of a decoder alone does that.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qtool.gguf.architectures.dense import DENSE
from qtool.gguf.architectures.latent_attention import LATENT_ATTENTION
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.short_convolutions import SHORT_CONVOLUTIONS
from qtool.gguf.architectures.sparse import SPARSE
from qtool.gguf.hf_config import Config, text_settings

# The class around -> what may be inside, first what is where config.json does not say.
AROUND: Mapping[str, tuple[str, ...]] = {
    "LlavaForConditionalGeneration": ("llama", "mistral", "qwen2"),
    "Idefics3ForConditionalGeneration": ("llama",),
    "SmolVLMForConditionalGeneration": ("llama",),
    "JanusForConditionalGeneration": ("llama",),
    "InternVLForConditionalGeneration": ("qwen2", "llama", "qwen3", "qwen3_moe"),
    "InternVLChatModel": ("qwen2", "llama", "phi3", "qwen3", "qwen3_moe"),
    "Lfm2VlForConditionalGeneration": ("lfm2",),
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
    "lfm2": _of(SHORT_CONVOLUTIONS["Lfm2ForCausalLM"], **_sizes(2560, 12288, 32, 32)),
}


def _rows(name: str, kinds: tuple[str, ...]) -> dict[str, Architecture]:
    tied = {"tie_word_embeddings": True} if name in TIED else {}
    return {
        name if kind == kinds[0] else f"{name} of {kind}": _of(_DECODERS[kind], **tied)
        for kind in kinds
    }


INSIDE: dict[str, Architecture] = {
    name: row for around, kinds in AROUND.items() for name, row in _rows(around, kinds).items()
}


def with_decoder(name: str, config: Config) -> str:
    """The table's name of one of these classes."""
    kind = text_settings(config).get("model_type")
    return name if kind in (None, AROUND[name][0]) else f"{name} of {kind}"
