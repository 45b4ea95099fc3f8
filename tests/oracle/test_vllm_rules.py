"""The rules that `verify --engine vllm` goes by are those of vLLM's own classes."""

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from qtool.verification.engines.rules import engine_findings
from qtool.verification.finding import Finding
from support.formats.header_artifacts import (
    FLOATS,
    awq,
    compressed,
    gptq,
    group_config,
    packed,
    plain,
    stored,
)

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
    "checkpoint_format": "gptq",
}  # fmt: skip
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
}  # fmt: skip
AUTO_ROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
    "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers",
}  # fmt: skip
ACTIVATIONS = [
    {"num_bits": bits, "type": "int", "symmetric": True} | how
    for bits in (4, 8)
    for how in (
        {"strategy": "tensor", "dynamic": False},
        {"strategy": "tensor", "dynamic": True},
        {"strategy": "token", "dynamic": True},
        {"strategy": "group", "group_size": 128, "dynamic": True},
    )
]
NAMED = "model.layers.0.mlp."


def cases() -> list[tuple[dict[str, Any], Any]]:
    """Configs, each with tensors that go with it."""
    found: list[tuple[dict[str, Any], Any]] = []
    for bits in (2, 4, 8):
        for sym in (True, False):
            label = {} if sym else {"checkpoint_format": "gptq_v2"}
            found.append((GPTQ | {"bits": bits, "sym": sym} | label, gptq(bits)))
    found += [
        (GPTQ | {"desc_act": True}, gptq()),
        (GPTQ | {"dynamic": {r"-:^model\.layers\.0\.mlp\.gate_up_proj$": {}}}, gptq()),
        (GPTQ | {"dynamic": {r"-:.*\.down_proj": {}}}, gptq()),
    ]
    for names in (None, ["lm_head"], ["mlp.gate"], [NAMED + "gate_proj", NAMED + "up_proj"]):
        found.append((AWQ | {"modules_to_not_convert": names}, awq()))
    for order in (None, "weight", "group"):
        found.append((compressed(actorder=order), packed(4)))
    for bits, strategy in product((4, 8), ("channel", "tensor", "group")):
        size = {"group_size": 128 if strategy == "group" else None}
        for inputs in ACTIVATIONS:
            config = compressed(bits, strategy=strategy, **size)
            config["config_groups"]["group_0"]["input_activations"] = inputs
            found.append((config | {"format": "int-quantized"}, plain(strategy)))
            if strategy == "group":
                found.append((config, packed(bits)))
    for bits in (4, 8):  # of which no inputs are rounded, and that are not packed
        config = compressed(bits, strategy="channel", group_size=None)
        found.append((config | {"format": "int-quantized"}, plain()))
    for layout, weights, given, tensors, *_ in FLOATS:
        found.append((group_config(layout, weights, given), tensors))
    for bits, sym in product((2, 3, 4, 8), (True, False)):
        found.append((AUTO_ROUND | {"bits": bits, "sym": sym}, gptq(bits)))
    awq_packed = {"packing_format": "auto_round:auto_awq"}
    found += [(AUTO_ROUND | awq_packed | {"sym": sym}, awq()) for sym in (True, False)]
    for packing in ("auto_round", "auto_round:gptqmodel", "auto_round:gptq", "auto"):
        found.append((AUTO_ROUND | {"packing_format": packing}, gptq()))
    gate_up = r".*layers\.0\.mlp\.(gate|up)_proj"
    for key in ("layers.0.mlp.gate", "mlp.down_proj", gate_up, NAMED + "down_proj"):
        found.append((AUTO_ROUND | {"extra_config": {key: {"bits": 16}}}, gptq()))
    for backend in ("auto_round:exllamav2", "gptq:marlin"):
        found.append((AUTO_ROUND | {"backend": backend}, gptq()))
    found.append((AUTO_ROUND | {"block_name_to_quantize": "model.visual"}, gptq()))
    for ignore in (["lm_head"], [r"re:.*mlp\.gate"], [r"re:.*mlp\.gate$"], [r"re:.*gate_up_proj"]):
        found.append((compressed() | {"ignore": ["lm_head", *ignore]}, packed(4)))
    return found


def skips_gate(found: Iterable[Finding]) -> bool:
    """Whether a list of what stays dense is said to leave out gate and up."""
    return any(
        f.check == "engine-skip-list" and ("gate_proj" in f.message or "up_proj" in f.message)
        for f in found
    )


def test_vllm_says_the_same(vllm: Callable[..., list[list[bool]]], tmp_path: Path) -> None:
    configs = cases()
    answers = vllm("vllm_configs.py", [config for config, _ in configs])
    assert len(answers) == len(configs)
    for number, ((config, tensors), (refused, skipped)) in enumerate(
        zip(configs, answers, strict=True)
    ):
        found = engine_findings(stored(tmp_path / str(number), tensors, config), "vllm", 1)
        errors = {f.check for f in found if f.severity == "error"}
        assert bool(errors & {"engine-scheme", "engine-format"}) == refused, (config, found)
        assert skips_gate(found) == skipped, (config, found)
    assert {refused for refused, _ in answers} == {True, False} == {s for _, s in answers}
