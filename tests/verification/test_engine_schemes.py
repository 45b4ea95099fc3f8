"""Which numbers of compressed-tensors vLLM and SGLang multiply, and how they round inputs."""

from pathlib import Path
from typing import Any

import pytest

from qtool.verification.engines.rules import engine_findings
from qtool.verification.engines.schemes import otherwise, pair_of, refused
from support.formats.header_artifacts import (
    FLOATS,
    compressed,
    floats,
    group_config,
    packed,
    plain,
    stored,
)

TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
ONE = TOKEN | {"strategy": "tensor", "dynamic": False}
FLOAT = TOKEN | {"type": "float"}
SKEWED = {"symmetric": False}
NV = {
    "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
}  # fmt: skip


@pytest.mark.parametrize("case", FLOATS, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_floats(case: Any, tmp_path: Path) -> None:
    layout, weights, inputs, tensors, *answers = case
    artifact = stored(tmp_path / "a", tensors, group_config(layout, weights, inputs))
    for engine, answer in zip(("vllm", "sglang"), answers, strict=True):
        found = engine_findings(artifact, engine, 1)
        assert any(f.check == "engine-scheme" for f in found) == answer, (engine, found)
        for finding in found:
            assert finding.severity == ("error" if finding.check == "engine-scheme" else "warning")
        if answer:
            assert "have no kernel; " in found[0].message


def weights_of(bits: int, strategy: str, kind: str = "int") -> dict[str, Any]:
    size = {"group_size": 128} if strategy == "group" else {}
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy} | size


@pytest.mark.parametrize(
    ("weights", "inputs", "layout", "vllm", "sglang"),
    [
        (weights_of(8, "channel"), TOKEN, "int-quantized", False, True),
        (weights_of(8, "channel"), ONE, "int-quantized", True, True),
        (weights_of(4, "group"), TOKEN, "int-quantized", False, True),
        (weights_of(8, "group"), TOKEN, "pack-quantized", True, True),
        (weights_of(4, "group"), TOKEN, "pack-quantized", False, False),
        (weights_of(4, "group"), FLOAT, "pack-quantized", False, False),
        (weights_of(4, "group") | SKEWED, TOKEN, "pack-quantized", True, True),
        (weights_of(4, "group"), None, "pack-quantized", False, False),
        (weights_of(4, "group") | SKEWED, None, "pack-quantized", False, True),
        (weights_of(8, "group"), None, "mixed-precision", True, True),
        (NV, None, "nvfp4-pack-quantized", False, False),
        (weights_of(8, "channel", "float"), FLOAT, "float-quantized", False, False),
        (weights_of(8, "channel", "float"), None, "float-quantized", True, True),
    ],
)
def test_experts_have_kernels_of_their_own(
    weights: dict[str, Any], inputs: Any, layout: str, vllm: bool, sglang: bool
) -> None:
    group = {"weights": weights, "input_activations": inputs}
    pair = pair_of(group, layout, expert=True)
    assert pair is not None
    assert [refused(pair, engine) is not None for engine in ("vllm", "sglang")] == [vllm, sglang]


@pytest.mark.parametrize(
    ("config", "tensors", "vllm", "sglang"),
    [
        # The kernel of blocks rounds inputs in groups as long as a block, whatever is declared.
        (
            group_config(*FLOATS[6][:3]), FLOATS[6][3],
            "inputs are rounded in groups of 128, though the config says per token",
            "inputs are rounded in groups of 128, though the config says per token",
        ),
        (
            group_config(*FLOATS[3][:3]), FLOATS[3][3],
            "inputs are rounded token by token, though the config says per group of 128",
            "inputs are rounded token by token, though the config says per group of 128",
        ),
        (group_config(*FLOATS[5][:3]), FLOATS[5][3], None, None),
        (
            group_config(*FLOATS[14][:3]), FLOATS[14][3],
            "inputs are rounded to MXFP4 too where the GPU multiplies it (Blackwell)", "no kernel",
        ),
    ],
)  # fmt: skip
def test_inputs_that_are_rounded_otherwise(
    config: Any, tensors: Any, vllm: str | None, sglang: str | None, tmp_path: Path
) -> None:
    artifact = stored(tmp_path / "a", tensors, config)
    for engine, phrase in (("vllm", vllm), ("sglang", sglang)):
        found = [f.message for f in engine_findings(artifact, engine, 1)]
        assert (phrase is None and not found) or (phrase is not None and phrase in found[0])


def test_packed_weights_with_rounded_inputs(tmp_path: Path) -> None:
    """vLLM has a package for them; SGLang a kernel for experts of 4 bits alone."""
    config = compressed(8)
    config["config_groups"]["group_0"]["input_activations"] = TOKEN
    artifact = stored(tmp_path / "a", packed(8), config)
    (one,) = engine_findings(artifact, "vllm", 1)
    assert one.severity == "warning" and "humming" in one.message
    (one,) = engine_findings(artifact, "sglang", 1)
    assert one.severity == "error" and "packed weights go with inputs as they are" in one.message
    group = {"weights": weights_of(4, "group"), "input_activations": TOKEN}
    pair = pair_of(group, "pack-quantized", expert=True)
    assert pair is not None and "rounded to FP8, by a kernel for Hopper" in str(
        otherwise(pair, "sglang")
    )


@pytest.mark.parametrize(
    ("weights", "phrase"),
    [
        (weights_of(4, "group") | SKEWED, None),
        (weights_of(8, "group") | SKEWED, "with zero points int4 has"),
        (weights_of(4, "channel"), None),
        (weights_of(4, "group") | {"group_size": 16}, "groups of 32, 64 or 128"),
        (weights_of(8, "tensor"), "a scale a row"),
        (weights_of(3, "group"), "int4 and int8 in pack-quantized do"),
    ],
)
def test_integers_that_sglang_multiplies_alone(weights: dict[str, Any], phrase: str | None) -> None:
    """By inputs as they are, with Marlin, which has zeros of 4 bits."""
    pair = pair_of({"weights": weights, "input_activations": None}, "pack-quantized")
    assert pair is not None
    why = refused(pair, "sglang")
    assert why is None if phrase is None else phrase in str(why)


def test_a_group_has_a_format_of_its_own(tmp_path: Path) -> None:
    """Where groups differ the config says mixed-precision, which counts for SGLang's experts."""
    config = compressed(4) | {"format": "mixed-precision"}
    config["config_groups"]["group_0"]["format"] = "pack-quantized"
    for engine in ("vllm", "sglang"):
        assert not engine_findings(stored(tmp_path / engine, packed(4), config), engine, 1)
    experts = {
        name.replace(".mlp.", f".mlp.experts.{expert}."): info
        for name, info in packed(4).items()
        for expert in range(2)
    }
    artifact = stored(tmp_path / "experts", experts, config)
    assert not [f for f in engine_findings(artifact, "vllm", 1) if f.severity == "error"]
    (one,) = [f for f in engine_findings(artifact, "sglang", 1) if f.severity == "error"]
    assert "in pack-quantized do" in one.message


def plain_mlp() -> dict[str, Any]:
    """An MLP of which gate and up are dense."""
    kept = {
        name: info for name, info in packed(4).items() if "gate" not in name and "up" not in name
    }
    dense = {f"model.layers.0.mlp.{n}_proj.weight": ("BF16", (512, 256)) for n in ("gate", "up")}
    return {**kept, **dense}


GATE_UP = "model.layers.0.mlp.gate_up_proj"
PARTS = ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]


def test_sglang_asks_ignore_by_the_name_of_the_fused_layer(tmp_path: Path) -> None:
    cases = (PARTS, True), ([*PARTS, GATE_UP], False), ([*PARTS, "mlp.gate_up_proj"], False)
    for names, said in cases:
        config = compressed() | {"ignore": ["lm_head", *names]}
        artifact = stored(tmp_path / str(len(names[-1])), plain_mlp(), config)
        found = [f for f in engine_findings(artifact, "sglang", 1) if f.name == GATE_UP]
        assert [(f.severity, f.check) for f in found] == [("warning", "engine-skip-list")] * said
        assert not [f for f in engine_findings(artifact, "vllm", 1) if f.name == GATE_UP]


@pytest.mark.parametrize(
    ("classes", "more", "expected"),
    [
        (["Linear"], [], "error"),  # their class is asked for before their parts are
        (["Linear"], [GATE_UP], None),
        (["Linear"], [r"re:.*gate_up_proj$"], None),
        (["re:.*down_proj"], [], "warning"),  # refused where no list has the parts
    ],
)
def test_sglang_asks_targets_by_the_name_of_the_fused_layer(
    classes: list[str], more: list[str], expected: str | None, tmp_path: Path
) -> None:
    config = compressed(8)
    groups = config["config_groups"]
    four = compressed()["config_groups"]["group_0"] | {"targets": [*PARTS, *more]}
    groups["group_0"]["targets"] = classes
    groups["group_1"] = four
    down = {name: info for name, info in packed(8).items() if "down" in name}
    artifact = stored(tmp_path / "a", {**packed(4), **down}, config)
    found = [f for f in engine_findings(artifact, "sglang", 1) if f.check == "engine-targets"]
    assert [(f.severity, f.name) for f in found] == [(expected, GATE_UP)] * (expected is not None)
    assert not engine_findings(artifact, "vllm", 1)


def test_sglang_takes_parts_of_names_in_lists_of_fp8(tmp_path: Path) -> None:
    """From dot to dot, of the names of parts."""
    tensors = {
        name.replace("weight_scale", "weight_scale_inv"): info
        for name, info in floats("block", scales="F32").items()
    }
    for number, (entry, hit) in enumerate(
        (("mlp", True), ("mlp.gate", False), ("mlp.gate_proj", True), (GATE_UP, False))
    ):
        config = {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", entry],
        }  # fmt: skip
        artifact = stored(tmp_path / str(number), tensors, config)
        found = [f.check for f in engine_findings(artifact, "sglang", 1)]
        assert found == ["engine-skip-list"] * hit, entry


def test_integers_in_a_byte_need_rounded_inputs(tmp_path: Path) -> None:
    config = compressed(8, strategy="channel", group_size=None) | {"format": "int-quantized"}
    artifact = stored(tmp_path / "a", plain(), config)
    for engine in ("vllm", "sglang"):
        (one,) = engine_findings(artifact, engine, 1)
        assert one.check == "engine-scheme" and "with inputs as they are" in one.message


def test_other_widths_have_no_kernel() -> None:
    pair = pair_of({"weights": weights_of(5, "channel"), "input_activations": TOKEN},
                   "int-quantized")  # fmt: skip
    assert pair is not None and otherwise(pair, "vllm") is None
    for engine in ("vllm", "sglang"):
        assert "have no kernel" in str(refused(pair, engine))
    assert pair_of({}, "int-quantized") is None
