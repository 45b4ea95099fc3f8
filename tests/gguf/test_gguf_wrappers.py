"""Decoders inside classes that also see: one GGUF file, whatever is around them, and what of these
classes llama.cpp would compute otherwise."""

from pathlib import Path
from typing import Any

import pytest

from qtool.errors import SourceError, UnsupportedError
from qtool.formats.gguf_values import u32
from qtool.gguf.architectures import TABLE, class_named
from qtool.gguf.from_hf.source import hf_source
from qtool.gguf.source import GgufSource
from support.gguf.gguf_from_hf import without_tokenizers
from support.models import small_tokenizers as small
from support.models.hf_arrays import LLAMA, llama, numbers, write
from support.models.small_tokenizers import SIZE, keys_of

__all__ = ["without_tokenizers"]

_INNER = {name: value for name, value in LLAMA.items() if name != "architectures"}
_LLAMA = {**_INNER, "model_type": "llama"}
_SECTIONS = {"rope_scaling": {"mrope_section": [1, 1, 0]}, "num_key_value_heads": 2}


def _content(source: GgufSource) -> tuple[dict[str, bytes], dict[str, Any]]:
    told = {k: v for k, v in source.metadata.items() if not k.startswith("general.")}
    return {t.name: t.read(0, t.rows).tobytes() for t in source.tensors}, told


# (class, settings around those of the text, what names of the decoder begin with, other tensors)
_WRAPPED: list[tuple[str, dict[str, Any], tuple[str, str], tuple[str, ...]]] = [
    ("LlavaForConditionalGeneration", {"text_config": _LLAMA},
     ("language_model.model.", "language_model."),
     ("vision_tower.x.weight", "multi_modal_projector.linear_1.weight")),
    ("VoxtralForConditionalGeneration",
     {"text_config": {**_LLAMA, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "head_dim": 4}},
     ("language_model.model.", "language_model."),
     ("audio_tower.x.weight", "multi_modal_projector.linear_1.weight")),
    ("SmolVLMForConditionalGeneration", {"text_config": _LLAMA}, ("model.text_model.", ""),
     ("model.vision_model.x.weight", "model.connector.modality_projection.proj.weight")),
    ("InternVLChatModel", {"llm_config": _LLAMA}, ("language_model.model.", "language_model."),
     ("vision_model.encoder.layers.0.mlp.fc1.weight", "mlp1.0.weight")),
    ("JanusForConditionalGeneration", {"text_config": _LLAMA, "tie_word_embeddings": False},
     ("model.language_model.", ""),
     ("model.aligner.fc1.weight", "model.vqmodel.x.weight", "model.generation_head.x.weight")),
]  # fmt: skip


def _renamed(begins: tuple[str, str], others: tuple[str, ...]) -> dict[str, Any]:
    inside, head = begins
    return {
        **{
            inside + name.removeprefix("model.") if name.startswith("model.") else head + name: one
            for name, one in llama().items()
        },
        **{name: numbers(4, 4) for name in others},
    }


@pytest.mark.parametrize(("name", "around", "begins", "others"), _WRAPPED)
def test_the_same_file_whatever_is_around(
    name: str,
    around: dict[str, Any],
    begins: tuple[str, str],
    others: tuple[str, ...],
    tmp_path: Path,
) -> None:
    plain = hf_source(write(tmp_path / "plain", LLAMA, llama()))
    config = {"architectures": [name], "vision_config": {"hidden_size": 4}, **around}
    wrapped = hf_source(write(tmp_path / "sees", config, _renamed(begins, others)))
    assert _content(wrapped) == _content(plain)
    assert [one for one, _ in wrapped.dropped] == [*others]


def test_what_thinks_inside_of_what_speaks(tmp_path: Path) -> None:
    tensors = {f"thinker.{name}": one for name, one in llama().items()}
    others = ("thinker.visual.x.weight", "thinker.audio_tower.x.weight", "talker.model.norm.weight",
              "token2wav.x.weight")  # fmt: skip
    inner = {**_INNER, **_SECTIONS}
    plain = {"architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"], "text_config": inner}
    whole = {"architectures": ["Qwen2_5OmniModel"], "thinker_config": {"text_config": inner},
             "talker_config": {"hidden_size": 4}}  # fmt: skip
    alone = hf_source(write(tmp_path / "alone", plain, llama()))
    tensors |= {name: numbers(16) for name in others}
    inside = hf_source(write(tmp_path / "inside", whole, tensors))
    assert _content(inside) == _content(alone)
    assert [one for one, _ in inside.dropped] == [*others]


@pytest.mark.parametrize(
    ("around", "kind", "named"),
    [
        ("LlavaForConditionalGeneration", None, "LlavaForConditionalGeneration"),
        ("LlavaForConditionalGeneration", "mistral", "LlavaForConditionalGeneration of mistral"),
        ("KimiVLForConditionalGeneration", "deepseek_v3", "KimiVLForConditionalGeneration"),
        (
            "KimiK25ForConditionalGeneration",
            "kimi_k2",
            "KimiK25ForConditionalGeneration of kimi_k2",
        ),
    ],
)
def test_rows_are_told_by_the_decoder(around: str, kind: str | None, named: str) -> None:
    text = {} if kind is None else {"model_type": kind}
    found = class_named({"architectures": [around], "text_config": text})
    assert found == named and named in TABLE


def test_a_decoder_that_is_not_known(tmp_path: Path) -> None:
    text = {**_LLAMA, "model_type": "internlm2"}
    config = {"architectures": ["InternVLChatModel"], "llm_config": text}
    with pytest.raises(UnsupportedError, match="InternVLChatModel of internlm2, which is not in"):
        hf_source(write(tmp_path / "model", config, llama()))


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("ChameleonForConditionalGeneration", {"swin_norm": True}, "swin_norm is true"),
        ("ChameleonForConditionalGeneration", {"vocabulary_map": {"IMGIMGA": 5}},
         "images are not the tokens 4 to 8195"),
        ("MuseGlimmerForConditionalGeneration", {"layer_rope_theta": [1e4, 1e4]},
         "layer_rope_theta is not 0 just in blocks without"),
        ("MuseGlimmerForConditionalGeneration", {"post_norm_eps": 1e-5}, "post_norm_eps is 1e-05"),
        ("MuseGlimmerForConditionalGeneration", {"sliding_window": None}, "sliding_window is not"),
        ("PaddleOCRVLForConditionalGeneration", {"use_bias": True}, "use_bias is true"),
        ("Qwen3OmniMoeForConditionalGeneration", {"norm_topk_prob": False}, "norm_topk_prob is"),
        ("HunYuanVLForConditionalGeneration", {"rope_scaling": {"type": "xdrope"}}, "no alpha"),
    ],
)  # fmt: skip
def test_refused(name: str, settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = {**LLAMA, "architectures": [name], **settings}
    with pytest.raises(UnsupportedError, match=said):
        hf_source(write(tmp_path / "model", config, llama()))


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("MuseGlimmerForConditionalGeneration", {"num_hidden_layers": 1 << 30}, "only 21 tensors"),
        ("ChameleonForConditionalGeneration",
         {"num_attention_heads": 16, "num_key_value_heads": 16,
          "vocabulary_map": {f"IMGIMG{i}": i for i in range(4, 8196)}}, "heads of 1 elements"),
        ("Glm4vForConditionalGeneration",
         {"rope_scaling": {"mrope_section": [1, 1]}, "partial_rotary_factor": 1.5},
         "partial_rotary_factor is 1.5"),
        ("Glm4vForConditionalGeneration",
         {"rope_scaling": {"mrope_section": [1, 1]}, "partial_rotary_factor": 0.1},
         "partial_rotary_factor is 0.1"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(
    name: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = {**LLAMA, "architectures": [name], **settings}
    with pytest.raises(SourceError, match=said):
        hf_source(write(tmp_path / "model", config, llama()))


def test_a_section_that_texts_do_not_rotate() -> None:
    row = TABLE["HunYuanVLForConditionalGeneration"]
    rope = {"type": "xdrope", "alpha": 50.0, "xdrope_section": [1, 1, 1, 1]}
    config = row.completed({**LLAMA, "rope_scaling": rope, "num_experts": 1})
    assert "num_experts" not in config
    assert "does not rotate the fourth" in str(row.warn[0](config))
    rope["xdrope_section"] = [1, 1, 1, 0]
    assert row.warn[0](row.completed({**LLAMA, "rope_scaling": rope})) is None


@pytest.mark.parametrize("pairs", [[[0]], [[0, "a"]], [1], 5, "a", [[0, 9]]])
def test_what_is_seen_goes_to_blocks(pairs: list[Any]) -> None:
    """A layer of the vision tower for each block that it is added to, the last one being -1."""
    row = TABLE["Granite4VisionForConditionalGeneration"]
    key = next(one for one in row.keys if one.name == "deepstack_mapping")
    config = row.completed({**LLAMA, "num_hidden_layers": 4, "spatial_target_layers": [2]})
    value = key.value({**config, "deepstack_layer_map": [[-2, -1], [-8, 0]]})
    assert value is not None and value.value == [-1, -1, 1, 2]
    assert key.value({**config, "spatial_target_layers": []}) is None
    many = {**config, "num_hidden_layers": 24, "spatial_target_layers": None}
    value = key.value(many)
    assert value is not None and value.value[15] == 1
    for spatial in (5, ["a"], [4], "a"):
        with pytest.raises(SourceError, match="deepstack_layer_map"):
            key.value({**config, "spatial_target_layers": spatial})
    with pytest.raises(SourceError, match="deepstack_layer_map"):
        key.value({**config, "deepstack_layer_map": pairs})


def test_tokens_whatever_the_files_say(tmp_path: Path) -> None:
    """Muse Glimmer's end of a turn, and the one token that Qwen3-Omni begins and ends with."""
    names = ("<|eot|>", "<|im_start|>", "<|im_end|>")
    extra = [small.added(SIZE + number, text) for number, text in enumerate(names)]
    files = {
        "tokenizer.json": small.bpe(extra=extra),
        "tokenizer_config.json": {"bos_token": "<|im_start|>", "eos_token": "<|im_start|>"},
    }
    muse = keys_of(tmp_path, files, "muse-glimmer", SIZE + 3)
    assert muse["tokenizer.ggml.eot_token_id"] == u32(SIZE)
    omni = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"]}
    for config, number in (({}, SIZE + 1), (omni, SIZE + 2)):
        keys = keys_of(tmp_path, files, "qwen3vlmoe", SIZE + 3, **config)
        ids = [keys[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos")]
        assert ids == [u32(number)] * 2
