"""The rules that `verify --engine sglang` goes by are those of SGLang's own classes."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from oracle.test_vllm_rules import ACTIVATIONS, skips_gate
from oracle.test_vllm_rules import cases as others

from qtool.verification.engines.rules import engine_findings
from qtool.verification.engines.schemes import pair_of, refused
from support.formats.header_artifacts import (
    FLOATS,
    compressed,
    floats,
    group_config,
    packed,
    stored,
)

pytestmark = [pytest.mark.oracle, pytest.mark.slow]


def cases() -> list[tuple[dict[str, Any], Any]]:
    """Configs, each with tensors that go with it."""
    found = others()
    for bits, sym in product((4, 8), (True, False)):
        found.append((compressed(bits, symmetric=sym), packed(bits, sym)))
    for layout, weights, given, tensors, *_ in FLOATS:
        config = group_config("mixed-precision", weights, given)
        config["config_groups"]["group_0"]["format"] = layout
        found.append((config, tensors))
    for strategy in ("tensor", "channel"):
        found.append((group_config("naive-quantized", {"strategy": strategy}, None),
                      floats(strategy)))  # fmt: skip
    return found


def of_experts() -> list[tuple[dict[str, Any], str]]:
    """Groups for experts, with layouts."""
    found = []
    for bits, strategy, inputs in product((4, 8), ("channel", "group"), (None, *ACTIVATIONS)):
        weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy}
        size = {"group_size": 128} if strategy == "group" else {}
        for layout, sym in product(("pack-quantized", "int-quantized"), (True, False)):
            group = {"weights": weights | size | {"symmetric": sym}, "input_activations": inputs}
            found.append((group, layout))
    for layout, weights, given, *_ in FLOATS:
        if not layout.startswith("mxfp"):  # of which some of its models load experts
            group = group_config(layout, weights, given)["config_groups"]["group_0"]
            found.append((group, layout))
    return found


SCHEMES = [
    {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": sym, "dynamic": dynamic}
    for bits, kind in ((8, "float"), (8, "int"), (4, "int"))
    for strategy in ("tensor", "attn_head")
    for sym in (True, False)
    for dynamic in (True, False)
]


def test_sglang_says_the_same(sglang: Callable[..., Any], tmp_path: Path) -> None:
    configs, groups = cases(), of_experts()
    answers, experts, loaded = sglang(
        "sglang_configs.py", [[config for config, _ in configs], groups, SCHEMES]
    )
    assert len(answers) == len(configs) and len(experts) == len(groups)
    for number, ((config, tensors), (no, skipped)) in enumerate(zip(configs, answers, strict=True)):
        found = engine_findings(stored(tmp_path / str(number), tensors, config), "sglang", 1)
        errors = {f.check for f in found if f.severity == "error"}
        assert bool(errors & {"engine-scheme", "engine-format"}) == no, (config, found)
        assert skips_gate(found) == (skipped and not no), (config, found)
    for (group, layout), no in zip(groups, experts, strict=True):
        pair = pair_of(group, layout, expert=True)
        assert pair is not None and (refused(pair, "sglang") is not None) == no, (group, layout)
    for number, (scheme, yes) in enumerate(zip(SCHEMES, loaded, strict=True)):
        config = compressed() | {"kv_cache_scheme": scheme}
        artifact = stored(tmp_path / f"cache-{number}", packed(4), config)
        found = [f for f in engine_findings(artifact, "sglang", 1) if "passes over" in f.message]
        assert bool(found) != yes, scheme
    for seen in ([no for no, _ in answers], [hit for _, hit in answers], experts, loaded):
        assert {*seen} == {True, False}
