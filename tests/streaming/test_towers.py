"""Models that also see, hear or speak: of these the part that writes text is run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoModelForMultimodalLM

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import UnsupportedError, UsageError
from qtool.generating.generate import generate
from qtool.messages.progress import Progress
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import load
from qtool.recipe.rotate import RotateOptions
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.towers import left_out_where_libraries_are_missing
from qtool.texts.calibration import _vocabulary
from qtool.transforms import rotate, rotated
from qtool.verification.run import verify_artifact
from support.gguf import gguf_models
from support.models import handed_models
from support.models.unusual_decoders import CAUSAL, SMALL, built, check_logits
from support.quality.generated_tokens import check
from support.runs import quantizing

_TEXT = {**SMALL, "num_hidden_layers": 2, "rope_parameters": {"rope_type": "default",
         "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}  # fmt: skip
_SPARSE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_HEARS = {
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "num_mel_bins": 16, "output_dim": 64,
}  # fmt: skip
_SEES = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48,
         "out_hidden_size": 64}  # fmt: skip
HEARING: dict[str, dict[str, Any]] = {
    "voxtral": {
        "text_config": {**SMALL, "head_dim": 16, "model_type": "llama"},
        "audio_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                         "intermediate_size": 128},
    },
    "qwen2_audio": {"text_config": {**SMALL, "model_type": "qwen2"}, "audio_config": _HEARS},
    "qwen3_asr": {
        "text_config": {**SMALL, "head_dim": 16, "model_type": "qwen3"}, "audio_config": _HEARS,
    },
    "granite_speech": {
        "text_config": {**SMALL, "model_type": "granite"},
        "encoder_config": {"hidden_dim": 32, "num_layers": 1, "num_heads": 2, "dim_head": 16},
        "projector_config": {"model_type": "blip_2_qformer", "hidden_size": 32,
                             "num_hidden_layers": 1, "num_attention_heads": 2,
                             "intermediate_size": 48, "encoder_hidden_size": 32},
    },
}  # fmt: skip
SPEAKING: dict[str, dict[str, Any]] = {
    "qwen2_5_omni": {"text_config": _TEXT, "audio_config": _HEARS, "vision_config": _SEES},
    "qwen3_omni_moe": {
        "text_config": {**_TEXT, **_SPARSE}, "audio_config": _HEARS, "vision_config": _SEES,
    },
}  # fmt: skip


def molmo(folder: Path) -> Any:
    text = {
        **SMALL, "vocab_size": 88, "additional_vocab_size": 8, "head_dim": 16, "qkv_bias": True,
    }  # fmt: skip
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    seeing = {**heads, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    adapter = {
        **heads, "vision_feature_layer": [1, 0], "hidden_size": 32, "intermediate_size": 48,
        "text_hidden_size": 64,
    }  # fmt: skip
    keys = {"text_config": text, "vision_config": seeing, "adapter_config": adapter}
    return built("molmo2", folder, AutoModelForImageTextToText, **keys)


def test_one_tensor_for_several_modules_and_one_table_in_two(tmp_path: Path) -> None:
    """Molmo 2: queries, keys and values, gate and up, and words above words added later."""
    folder = tmp_path / "model"
    check_logits(folder, molmo(folder))
    tensors = Checkpoint.open(folder).tensors
    assert tensors["model.transformer.blocks.0.self_attn.att_proj.bias"].shape == (128,)
    assert tensors["model.transformer.blocks.0.mlp.ff_proj.weight"].shape == (192, 64)
    assert tensors["model.transformer.wte.new_embedding"].shape == (48, 64)
    plan = make_plan(load("kv-fp8"), Checkpoint.open(folder))
    assert {kept.heads for kept in plan.cache.values()} == {2} and len(plan.cache) == 3


@pytest.mark.parametrize("name", ["molmo2", "qwen2_5_omni", "voxtral"])
def test_what_towers_write_into_is_not_rotated(name: str, tmp_path: Path) -> None:
    """What they make of an image would have to be rotated, too, and no text shows whether it is."""
    folder = tmp_path / "model"
    if name == "molmo2":
        molmo(folder)
    elif name == "voxtral":
        built(name, folder, AutoModelForMultimodalLM, **HEARING[name])
    else:
        speaking(name, folder)
    source = Checkpoint.open(folder)
    view = rotated.untied(source)
    found = rotate.prepare(view, RotateOptions(), lambda _: None)
    assert found.r1 is None and len(found.r2) == (3 if name != "qwen2_5_omni" else 2)
    assert "is of a vision or audio tower" in found.left_out[0]
    assert view.head is None and view.config == source.config


def test_nor_where_its_names_do_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotated, "_refused", lambda _: None)
    molmo(tmp_path / "model")
    view = rotated.untied(Checkpoint.open(tmp_path / "model"))
    found = rotate.prepare(view, RotateOptions(), lambda _: None)
    assert found.r1 is None and "outside of the blocks, reads" in found.left_out[0]


@pytest.mark.parametrize("name", HEARING)
def test_models_that_hear(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    check_logits(folder, built(name, folder, AutoModelForMultimodalLM, **HEARING[name]))


def speaking(name: str, folder: Path) -> Any:
    """The part that thinks of such a model, as a checkpoint that has a part that speaks, too."""
    model = built(f"{name}_thinker", folder, AutoModelForImageTextToText, **SPEAKING[name])
    tensors = load_file(folder / "model.safetensors")
    whole = {f"thinker.{key}": value for key, value in tensors.items()}
    whole["talker.model.layers.0.self_attn.q_proj.weight"] = torch.ones(64, 64)
    save_file(whole, folder / "model.safetensors")
    thinks = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {"model_type": name, "thinker_config": thinks}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return model


@pytest.mark.parametrize("name", SPEAKING)
def test_models_that_speak(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    check_logits(folder, speaking(name, folder))
    skeleton = Skeleton.open(Checkpoint.open(folder))
    assert skeleton.unknown == ("talker.model.layers.0.self_attn.q_proj.weight",)
    assert all(name.startswith("thinker.model.layers.0.") for name in skeleton.block_tensors(0))


def test_what_thinks_is_quantized_and_what_speaks_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    speaking("qwen2_5_omni", folder)
    quantizing.add_tokenizer(folder)
    text = quantizing.text_file(tmp_path / "text.txt")
    sets = ("calibration.samples=4", "calibration.length=32", f"calibration.source={text}")
    run = quantizing.quantize(folder, "w4g32-gptq", tmp_path / "out", *sets)
    assert len(run.quants) == 14 and all(name.startswith("thinker.model.") for name in run.quants)
    quantizing.assert_reads_back(run)
    assert all(layer.relative_error < 0.2 for layer in run.summary.layers)
    spoken = "talker.model.layers.0.self_attn.q_proj.weight"
    there = Checkpoint.open(tmp_path / "out")
    assert (there.float32(spoken) == 1).all()


def test_a_tower_that_hears_is_never_run(tmp_path: Path) -> None:
    """Gemma 4's has no attention by torch's function, which its decoder has."""
    text = {
        **SMALL, "head_dim": 16, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 96,
        "num_kv_shared_layers": 0, "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        "tie_word_embeddings": True,
    }  # fmt: skip
    hearing = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    folder = tmp_path / "model"
    keys = {"text_config": text, "audio_config": hearing, "vision_config": None}
    model = built("gemma4", folder, AutoModelForImageTextToText, **keys)
    check_logits(folder, model)
    skeleton = Skeleton.open(Checkpoint.open(folder))
    assert skeleton.model.config.get_text_config()._attn_implementation == "sdpa"
    assert skeleton.model.config.audio_config._attn_implementation == "eager"


def test_a_tower_whose_library_is_missing_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3n's, which sees by timm."""

    def missing(self: Any, *_: Any) -> None:
        raise ImportError(f"{type(self).__name__} requires the timm library")

    tower = "transformers.models.timm_wrapper.modeling_timm_wrapper.TimmWrapperModel"
    monkeypatch.setattr(f"{tower}.__init__", missing)
    _, text = handed_models.HANDED["gemma3n"]
    hearing = {"hidden_size": 32, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2}
    keys = {
        "text_config": text, "audio_config": hearing,
        "vision_config": {"model_type": "gemma3n_vision", "hidden_size": 32},
    }  # fmt: skip
    folder = tmp_path / "model"
    with left_out_where_libraries_are_missing(CONFIG_MAPPING["gemma3n"](**keys)):
        model = built("gemma3n", folder, AutoModelForImageTextToText, **keys)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.vision_tower.timm_model.conv_stem.conv.weight"] = torch.ones(8, 3, 3, 3)
    save_file(tensors, folder / "model.safetensors")
    check_logits(folder, model)
    skeleton = Skeleton.open(Checkpoint.open(folder))
    assert skeleton.unknown == ("model.vision_tower.timm_model.conv_stem.conv.weight",)
    with pytest.raises(ImportError, match="timm"):  # for whoever builds one afterwards
        AutoModelForImageTextToText.from_config(CONFIG_MAPPING["gemma3n"](**keys))


@pytest.mark.parametrize(
    ("name", "decoder"),
    [("bamba", "bamba.modeling_bamba.BambaModel"), ("voxtral", "llama.modeling_llama.LlamaModel")],
)
def test_a_decoder_whose_library_is_missing_is_told(
    name: str, decoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> None:
        raise ImportError("It requires the mamba library\n`pip install mamba`")

    if name == "bamba":
        built(name, tmp_path / "model", **CAUSAL[name])
    else:
        built(name, tmp_path / "model", AutoModelForMultimodalLM, **HEARING[name])
    monkeypatch.setattr(f"transformers.models.{decoder}.__init__", missing)
    with pytest.raises(
        UnsupportedError, match=f"'{name}' with a library that is not installed: It"
    ):
        Skeleton.open(Checkpoint.open(tmp_path / "model"))


def test_parts_may_be_built_from_configs_by_name(tmp_path: Path) -> None:
    """As Janus builds its own."""
    skeleton = Skeleton.open(Checkpoint.open(gguf_models.build("janus", tmp_path / "model")))
    assert skeleton.prefix == "model.language_model.layers." and not skeleton.unknown


def test_a_layout_that_transformers_does_not_read_is_told(tmp_path: Path) -> None:
    """Qwen3-ASR's own code has what thinks under that name, transformers' has not."""
    folder = tmp_path / "model"
    built("qwen3_asr", folder, AutoModelForMultimodalLM, **HEARING["qwen3_asr"])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    whole = {"model_type": "qwen3_asr", "thinker_config": config}
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    with pytest.raises(UnsupportedError, match=r"'qwen3_asr' in another layout.*\(-hf\)"):
        Skeleton.open(Checkpoint.open(folder))


def test_scales_of_the_cache_are_of_the_decoder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    built("voxtral", folder, AutoModelForMultimodalLM, **HEARING["voxtral"])
    quantizing.add_tokenizer(folder)
    text = quantizing.text_file(tmp_path / "text.txt")
    sets = ("calibration.samples=4", "calibration.length=32", f"calibration.source={text}")
    quantizing.quantize(folder, "kv-fp8", tmp_path / "out", *sets)
    assert verify_artifact(tmp_path / "out", against=folder).ok


def test_words_and_positions_are_counted_where_the_decoder_says_them(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    speaking("qwen2_5_omni", folder)
    quantizing.add_tokenizer(folder)
    with pytest.raises(UsageError, match="more than the 256 positions"):
        generate(folder, "Group", 400, None, Progress(quiet=True))
    assert _vocabulary(folder, 0) == 96


def test_a_tower_that_is_converted_does_not_matter(tmp_path: Path) -> None:
    """Step 3.7 keeps parts of its vision tower otherwise than by views; text needs none of them."""
    text = {
        **SMALL, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "share_expert_dim": 32, "sliding_window": 16,
        "num_sliding_attention_heads": 4, "layer_types": ["full_attention"] * 3,
        "mlp_layer_types": ["dense", "sparse", "dense"], "num_nextn_predict_layers": 0,
        "mtp_layer_types": None, "mtp_mlp_layer_types": None,
    }  # fmt: skip
    seeing = {"hidden_size": 32, "image_size": 28, "num_attention_heads": 2, "num_hidden_layers": 2}
    keys = {"text_config": text, "vision_config": seeing, "image_token_id": 95}
    folder = tmp_path / "model"
    model = built("step3p7", folder, AutoModelForImageTextToText, **keys)
    check_logits(folder, model)
    assert Skeleton.open(Checkpoint.open(folder)).names.refused
    quantizing.add_tokenizer(folder)
    check(folder, generate(folder, "Group", 4, None, Progress(quiet=True)), 1e-3)
