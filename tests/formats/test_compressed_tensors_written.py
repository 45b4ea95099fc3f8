"""compressed-tensors as written: every scheme there and back, and configs that name modules."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qtool.errors import FormatError
from qtool.float_codes import pack_nibbles
from qtool.formats import Facts, compressed_tensors, detect
from qtool.formats.compressed_tensors_config import chosen_group, named
from qtool.inspecting.inspect import inspect
from qtool.scheme import Scheme
from support.formats.artifact_files import assert_same, random_quant
from support.formats.compressed_reading import MXFP4, M, read
from support.formats.compressed_schemes import SCHEMES, a_quant
from support.formats.packed_files import compressed_tensors as config_of
from support.formats.packed_files import write


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("layout", ["packed", "plain"])
def test_round_trip(tmp_path: Path, name: str, layout: str) -> None:
    """Through a file: codes, scales, zeros and scheme come back bit for bit."""
    scheme = SCHEMES[name]
    if layout == "plain" and (scheme.is_float or not scheme.symmetric):
        assert scheme.is_float or compressed_tensors.supports(
            scheme, (8, 256), compressed_tensors.choose([scheme], layout)
        )
        return
    quant = a_quant(scheme)
    options = compressed_tensors.choose([scheme], layout)
    stored = compressed_tensors.pack(M, quant, options)
    specs = compressed_tensors.specs(M, scheme, quant.shape, options)
    assert stored.keys() == {spec.name for spec in specs}
    tensors = {spec.name: (spec.dtype, stored[spec.name].reshape(spec.shape)) for spec in specs}
    assert all(stored[spec.name].nbytes == spec.nbytes for spec in specs)
    config = compressed_tensors.config(Facts({M: scheme}), options)
    write(tmp_path, tensors, config)
    found = read(tmp_path)
    assert_same(found, quant)
    assert found.outer == quant.outer
    assert inspect(tmp_path).json()["tensors"][0]["scheme"] == str(scheme)


def test_what_cannot_be_stored() -> None:
    options = compressed_tensors.choose([])
    for scheme, words_ in (
        (Scheme(4, 48, True), "not divisible"),
        (Scheme(4, 16, True, "e8m0", "e2m1"), "nvfp4 g16 or mxfp4 g32"),
        (Scheme(8, -1, True, "float32", "e5m2"), "FP8 as e4m3"),
        (Scheme(8, 64, True, "e8m0", "e4m3"), "groups of 32"),
        (Scheme(8, -1, True, "float32", outer="after"), "one float scale"),
    ):
        assert words_ in str(compressed_tensors.supports(scheme, (64, 256), options))
    ordered = random_quant(Scheme(4, 32, True), 8, 64, act_order=True)
    with pytest.raises(FormatError, match="out of group order"):
        compressed_tensors.pack("m", ordered, options)
    quant = a_quant(Scheme(4, 32, True, "bfloat16"))
    with pytest.raises(FormatError, match="a scale is no bfloat16 number"):
        compressed_tensors.pack("m", replace(quant, scale=quant.scale + np.float32(1e-6)), options)
    with pytest.raises(FormatError, match="no layout 'gemm'"):
        compressed_tensors.choose([], "gemm")


def test_the_config_names_every_module_once() -> None:
    four, eight = Scheme(4, 128, True), Scheme(8, -1, True)
    schemes = {f"model.layers.{i}.{n}": four for i in range(12) for n in ("q_proj", "o_proj")}
    schemes |= {f"model.layers.{i}.mlp.down_proj": eight for i in range(12)}
    facts = Facts(schemes, dense=["model.layers.0.mlp.gate"])
    options = compressed_tensors.choose(schemes.values())
    config = compressed_tensors.config(facts, options)
    found = detect(json.loads(json.dumps(config)))
    assert found.dense == ("model.layers.0.mlp.gate", "lm_head")
    assert [group.targets for group in found.groups] == [
        ("Linear",),
        (r"re:(?:.*\.)?layers\.\d+\.mlp\.down_proj$",),
    ]
    from qtool.formats.compressed_tensors_config import group_of

    for name, scheme in schemes.items():
        assert group_of(name, found).scheme == scheme
    head = Facts(schemes | {"lm_head": eight})
    assert compressed_tensors.config(head, options)["ignore"] == []


def test_layers_that_engines_fuse_are_named_too() -> None:
    """SGLang asks for these, and for their parts in few classes; of experts it asks for each."""
    four, eight = Scheme(4, 128, True), Scheme(8, -1, True)
    block = "model.layers.{}."
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    schemes = {block.format(i) + name: four for i in range(4) for name in gate_up}
    schemes |= {
        block.format(4) + f"self_attn.{name}": eight for name in ("q_a_proj", "kv_a_proj_with_mqa")
    }
    dense = [
        block.format(5) + name
        for name in (*gate_up, "mlp.experts.0.gate_proj", "mlp.experts.0.up_proj")
    ]
    facts = Facts(schemes, dense=[*dense, block.format(6) + "mlp.gate_proj"])
    config = compressed_tensors.config(facts, compressed_tensors.choose(schemes.values()))
    assert [name for name in config["ignore"] if "gate_up" in name] == [
        "model.layers.5.mlp.gate_up_proj"
    ]
    targets = [group["targets"] for group in config["config_groups"].values()]
    for last in ("q_a_proj", "fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa"):
        assert chosen_group(targets, block.format(4) + f"self_attn.{last}") == 1
    assert chosen_group(targets, block.format(3) + "mlp.gate_up_proj") == 0
    schemes |= {block.format(3) + name: eight for name in gate_up}
    config = compressed_tensors.config(Facts(schemes), compressed_tensors.choose(schemes.values()))
    targets = [group["targets"] for group in config["config_groups"].values()]
    for number in range(4):
        for last in ("gate_up_proj", "gate_proj"):
            found = chosen_group(targets, block.format(number) + f"mlp.{last}")
            assert found == (number == 3)


@pytest.mark.parametrize("tower", [False, True])
def test_groups_are_found_under_an_engines_prefix(tower: bool) -> None:
    """vLLM renames modules of wrapped models and rewrites targets that are names, as here; not
    those that are expressions."""
    four, eight = Scheme(4, 128, True), Scheme(8, -1, True)
    schemes = {}
    for i in range(12):
        inner = f"model.language_model.layers.{i}"
        schemes |= {f"{inner}.self_attn.q_proj": four, f"{inner}.self_attn.o_proj": four}
        schemes[f"{inner}.mlp.down_proj"] = eight
    dense = [f"model.vision_tower.encoder.layers.{i}.mlp.down_proj" for i in range(12)]
    facts = Facts(schemes, dense=dense if tower else [])
    config = compressed_tensors.config(facts, compressed_tensors.choose(schemes.values()))

    def renamed(name: str) -> str:
        return name.replace("model.language_model.", "language_model.model.")

    targets = [
        [t if t.startswith("re:") else renamed(t) for t in group["targets"]]
        for group in config["config_groups"].values()
    ]
    for name, scheme in schemes.items():
        assert chosen_group(targets, renamed(name)) == (scheme is eight), name
    assert sum(map(len, targets)) == 2
    # The expression means matrices of the tower, too, which engines ask `ignore` of first.
    for name in facts.dense:
        for called in (name, name.removeprefix("model.")):
            assert any(named(entry, called) for entry in config["ignore"])
    for name in schemes:
        assert not any(named(entry, renamed(name)) for entry in config["ignore"])


def test_no_warnings_from_numpy(tmp_path: Path) -> None:
    """Extreme scales are numbers like others."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stored = {
            f"{M}.weight_packed": ("U8", pack_nibbles(np.full((1, 32), 7, np.uint8))),
            f"{M}.weight_scale": ("U8", np.array([[255]], np.uint8)),
        }
        write(tmp_path, stored, config_of("mxfp4-pack-quantized", MXFP4))
        assert np.isnan(read(tmp_path).dequantize()).all()
