"""A checkpoint of a multimodal model, under the names that its decoder has alone.

    language_model.model.layers.0.*, model.language_model.layers.0.*  ->  model.layers.0.*
    model.text_model.layers.0.*, thinker.model.layers.0.*             ->  model.layers.0.*
    language_model.lm_head.weight                                     ->  lm_head.weight

What llama.cpp reads is the decoder, so what is made of a GGUF file has the names on the right.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.hf_config import TEXT_CONFIGS, text_settings

_INSIDE = re.compile(r"(?<![^.])(?:language_model|text_model|thinker)\.")
_TOWERS = (
    "vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "embed_vision.",
    "vision_embedder.", "audio_tower.", "embed_audio.", "connector.", "mlp1.", "vit.", "mlp_AR.",
    "vit_large_projector.", "patch_merge_mlp.",
    "projector.", "merger.", "aligner.", "vqmodel.", "generation_embeddings.",
    "generation_aligner.", "generation_head.", "layerwise_projectors.", "spatial_projectors.",
    "image_newline", "vision_adapter.", "vision_projection.", "vision_encoder.", "siglip2.",
    "sound_encoder.", "sound_projection.",
    "mm_projector.", "talker.", "token2wav.", "code2wav.",
)  # fmt: skip
_PARTS = (*TEXT_CONFIGS, "vision_config")  # of config.json
# What to do where a class without a head was saved, whose names lack their first part.
SAVE_WITH_HEAD = (
    "save it once with transformers, "
    "AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(OUT)"
)


def name_alone(name: str) -> str:
    """The name of a tensor where the decoder stands alone."""
    return _INSIDE.sub("", name)


def of_tower(name: str) -> bool:
    """Whether a tensor is of a vision or audio tower."""
    return name_alone(name).removeprefix("model.").startswith(_TOWERS)


def has_parts(config: Mapping[str, Any]) -> bool:
    """Whether a config.json tells apart a decoder and what is around it."""
    return any(key in config for key in _PARTS)


def is_alone(config: Mapping[str, Any], source: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a decoder alone, and the source's of one with other parts."""
    return not has_parts(config) and has_parts(source)


def alone_as(source: Checkpoint, config: Mapping[str, Any], names: Iterable[str]) -> Checkpoint:
    """The source with its decoder's tensors under the names that they have alone, where `config`
    and `names` are of a decoder alone."""
    if not is_alone(config, source.config) or any(name != name_alone(name) for name in names):
        return source
    alone = {name: name_alone(name) for name in source.tensors}
    if len(set(alone.values())) < len(alone):
        return source
    tensors = {new: replace(source.tensors[old], name=new) for old, new in alone.items()}
    files = {new: source.file_of(old) for old, new in alone.items()}
    return replace(source, tensors=tensors, _file_of=files)


def settings_alone(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the settings of the decoder in it outermost."""
    outer = {key: value for key, value in config.items() if key not in TEXT_CONFIGS}
    return {**text_settings(config), **outer}
