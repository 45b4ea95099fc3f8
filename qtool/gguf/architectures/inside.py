"""Classes that also see, around a decoder of any class: text_config.model_type names that one.

Released checkpoints leave out of text_config what equals the default of the decoder's class, sizes
too; no checkpoint of a decoder alone does that.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qtool.gguf.architectures.dense import DENSE
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.short_convolutions import SHORT_CONVOLUTIONS
from qtool.gguf.architectures.sparse import SPARSE
from qtool.gguf.hf_config import Config, text_settings

# The class around -> what is inside where config.json does not say.
AROUND = {
    "LlavaForConditionalGeneration": "llama",
    "Idefics3ForConditionalGeneration": "llama",
    "SmolVLMForConditionalGeneration": "llama",
    "InternVLForConditionalGeneration": "qwen2",
    "InternVLChatModel": "qwen2",
    "Lfm2VlForConditionalGeneration": "lfm2",
}
# Of these transformers ties the head unless config.json says no, outside of text_config.
_TIED = ("InternVLForConditionalGeneration", "Lfm2VlForConditionalGeneration")


def _sizes(hidden: int, inner: int, blocks: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": blocks,
        "num_attention_heads": heads,
    }  # fmt: skip


def _of(row: Architecture, **defaults: Any) -> Architecture:
    return replace(row, defaults={**row.defaults, **defaults})


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
    "lfm2": _of(SHORT_CONVOLUTIONS["Lfm2ForCausalLM"], **_sizes(2560, 12288, 32, 32)),
}
INSIDE: dict[str, Architecture] = {
    name if kind == usual else f"{name} of {kind}": (
        _of(row, tie_word_embeddings=True) if name in _TIED else row
    )
    for name, usual in AROUND.items()
    for kind, row in _DECODERS.items()
}


def with_decoder(name: str, config: Config) -> str:
    """The table's name of one of these classes."""
    kind = text_settings(config).get("model_type")
    return name if kind in (None, AROUND[name]) else f"{name} of {kind}"
