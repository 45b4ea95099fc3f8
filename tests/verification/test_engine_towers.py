"""Towers that stay dense, and lists that do not name them: what vLLM and SGLang say of both."""

import json
from pathlib import Path
from typing import Any

import pytest

from qtool.artifacts.artifact import Artifact
from qtool.verification.engines.rules import engine_findings
from support.formats.header_artifacts import Tensors, awq, compressed, gptq, packed, stored
from support.gguf import gguf_models
from support.runs import quantizing

TOWER = "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"
BETWEEN = "multi_modal_projector.linear_1"
DENSE: Tensors = {f"{name}.weight": ("BF16", (64, 64)) for name in (TOWER, BETWEEN)} | {
    "vision_tower.vision_model.embeddings.position_embedding.weight": ("BF16", (16, 64)),
    "vision_tower.vision_model.embeddings.patch_embedding.weight": ("BF16", (64, 3, 4, 4)),
    "vision_tower.vision_model.post_layernorm.weight": ("BF16", (64,)),
    "mtp.fc.weight": ("BF16", (64, 64)),
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def said(
    folder: Path, tensors: Tensors, config: dict[str, Any], engine: str = "vllm"
) -> list[tuple[str, str]]:
    found = engine_findings(stored(folder, tensors, config), engine, 1)
    return [(f.severity, f.message) for f in found if f.check == "engine-skip-list"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_list_without_the_tower(engine: str, tmp_path: Path) -> None:
    ((severity, message),) = said(tmp_path, packed(4) | DENSE, compressed(), engine)
    who = {"vllm": "vLLM", "sglang": "SGLang"}[engine]
    assert severity == "warning" and message == (
        f"{TOWER}, {BETWEEN} are not quantized, and ignore does not name them: where {who} builds "
        "them with quantization, as many of its classes do, it looks for codes that are not there; "
        "add such names"
    )


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        ([TOWER], BETWEEN),
        ([f"model.{TOWER}", f"model.{BETWEEN}"], None),
        (["re:.*vision_tower.*", "re:multi_modal_projector.*"], None),
        (["re:vision_tower.*"], BETWEEN),
        (["vision_tower", BETWEEN], TOWER),
        (["re:(?i)vision.*"], None),  # which is not matched here
    ],
)
def test_lists_that_name_it(ignore: list[str], left: str | None, tmp_path: Path) -> None:
    found = said(tmp_path, packed(4) | DENSE, compressed() | {"ignore": ["lm_head", *ignore]})
    messages = [message for _, message in found]
    assert [m.startswith(f"{left} is not quantized, and ignore does") for m in messages] == (
        [] if left is None else [True]
    )
    assert all(message.endswith("; add that name") for message in messages)


def test_a_config_that_means_the_decoder_alone(tmp_path: Path) -> None:
    config = compressed()
    config["config_groups"]["group_0"]["targets"] = ["re:model[.]layers[.].*"]
    assert not said(tmp_path, packed(4) | DENSE, config)


@pytest.mark.parametrize(
    "table",
    [
        "audio_tower.audio_bos_eos_token",  # Qwen2.5-Omni
        "encoder.layers.0.attn.rel_pos_emb",  # Granite Speech
        "vision_tower.encoder.layers.0.attention.relative_attention_bias",  # as T5 has it
        "audio_embed.encoder.relative_attention_bias_layer.bias_values",  # Phi-4
        "talker.code_predictor.model.codec_embedding.3",  # Qwen3-Omni
        "vqmodel.quantize.codebook",
    ],
)
def test_tables_are_no_layers(table: str, tmp_path: Path) -> None:
    """What is looked up by rows is not asked for codes; what is multiplied with is."""
    linear = f"{table.rpartition('.')[0]}.pos_proj"
    tensors: Tensors = {f"{name}.weight": ("BF16", (64, 64)) for name in (table, TOWER, linear)}
    ((_, message),) = said(tmp_path, packed(4) | tensors, compressed())
    assert {*message.partition(" are not quantized")[0].split(", ")} == {TOWER, linear}


def test_a_model_that_does_not_see(tmp_path: Path) -> None:
    """What is beside its decoder is nobody's tower."""
    assert not said(tmp_path, packed(4) | {"score.dense.weight": ("BF16", (64, 64))}, compressed())


@pytest.mark.parametrize(
    ("listed", "warned"), [([], False), (["lm_head"], True), (["vision_tower", BETWEEN], False)]
)
def test_awq(listed: list[str], warned: bool, tmp_path: Path) -> None:
    """Without a list vLLM looks into the headers."""
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    config |= {"version": "gemm", "modules_to_not_convert": listed}
    found = said(tmp_path, awq() | DENSE, config)
    assert [severity for severity, _ in found] == ["warning"] * warned


@pytest.mark.parametrize(
    ("engine", "dynamic", "warned"),
    [
        ("vllm", {}, False),
        ("sglang", {}, True),
        ("sglang", {"-:.*vision_tower.*": {}, rf"-:^{BETWEEN}$": {}}, False),
    ],
)
def test_gptq(engine: str, dynamic: dict[str, Any], warned: bool, tmp_path: Path) -> None:
    """vLLM looks into the headers."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    found = said(tmp_path, gptq() | DENSE, config | {"dynamic": dynamic}, engine)
    assert [severity for severity, _ in found] == ["warning"] * warned


def test_fp8(tmp_path: Path) -> None:
    module = "model.layers.0.mlp.down_proj"
    tensors: Tensors = DENSE | {
        f"{module}.weight": ("F8_E4M3", (64, 64)), f"{module}.weight_scale": ("F32", ()),
    }  # fmt: skip
    ((severity, message),) = said(tmp_path / "a", tensors, FP8)
    assert severity == "warning" and "modules_to_not_convert does not name them" in message
    named = FP8 | {"modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector"]}
    assert not said(tmp_path / "b", tensors, named)


@pytest.mark.parametrize("recipe", ["w8a16-ct", "w4g64-rtn", "w8-rtn", "fp8-block-hf"])
def test_artifacts_of_our_own_name_it(recipe: str, tmp_path: Path) -> None:
    source = quantizing.add_tokenizer(gguf_models.build("llava", tmp_path / "m", dtype="bfloat16"))
    sets = {
        "w4g64-rtn": ["weights.group_size=32"],
        "fp8-block-hf": ["weights.group_size=32", "weights.rows=32"],
    }
    run = quantizing.quantize(source, recipe, tmp_path / "out", *sets.get(recipe, []))
    config = json.loads((run.out / "config.json").read_text())["quantization_config"]
    lists = [key for key in ("ignore", "modules_to_not_convert", "dynamic") if config.get(key)]
    assert len(lists) == 1
    for engine in ("vllm", "sglang"):
        found = engine_findings(Artifact.open(run.out), engine, 1)
        assert "engine-skip-list" not in {finding.check for finding in found}
