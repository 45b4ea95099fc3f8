"""compressed-tensors as written: every scheme there and back, and configs that name modules."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from artifact_files import assert_same, random_quant
from compressed_reading import MXFP4, M, read
from packed_files import compressed_tensors as config_of
from packed_files import write

from qtool.errors import FormatError
from qtool.formats import Facts, compressed_tensors, detect
from qtool.formats.compressed_tensors_config import chosen_group, named
from qtool.formats.float_codes import TABLES, encode, pack_nibbles
from qtool.inspect import inspect
from qtool.scheme import GroupQuant, Scheme


def small_floats(scheme: Scheme, rows: int, columns: int, seed: int = 0) -> GroupQuant:
    """Random codes without NaN, and scales that the scheme's dtype holds."""
    rng = np.random.default_rng(seed)
    top = 16 if scheme.bits == 4 else 256
    codes = rng.integers(0, top, (rows, columns), dtype=np.uint8)
    codes[np.isnan(TABLES[scheme.book][codes])] = 0
    scale = rng.uniform(0.01, 1, scheme.grid((rows, columns))).astype(np.float32)
    if scheme.scale_dtype == "e8m0":
        scale = np.exp2(np.floor(np.log2(scale)))
    elif scheme.scale_dtype == "float8_e4m3":
        scale = TABLES["e4m3"][encode(scale * 100, "e4m3")]
    elif scheme.scale_dtype == "bfloat16":
        scale = (scale.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    outer = 1234.5 if scheme.outer else None
    return GroupQuant(scheme, codes, scale, np.zeros(scale.shape, np.uint8), None, outer)


SCHEMES = {
    **{f"w{b} {s} {z}": Scheme(b, s, z == "sym") for b in range(2, 9) for s in (-1, 32)
       for z in ("sym", "asym")},
    "w8 channel float32": Scheme(8, -1, True, "float32"),
    "w4 bfloat16": Scheme(4, 32, True, "bfloat16"),
    "fp8 tensor": Scheme(8, -1, True, "float32", "e4m3", -1),
    "fp8 channel": Scheme(8, -1, True, "bfloat16", "e4m3"),
    "fp8 group": Scheme(8, 32, True, "float32", "e4m3"),
    "fp8 block": Scheme(8, 128, True, "float32", "e4m3", 128),
    "mxfp8": Scheme(8, 32, True, "e8m0", "e4m3"),
    "mxfp4": Scheme(4, 32, True, "e8m0", "e2m1"),
    "nvfp4": Scheme(4, 16, True, "float8_e4m3", "e2m1", 1, "divides"),
}  # fmt: skip


def a_quant(scheme: Scheme, rows: int = 200, columns: int = 256) -> GroupQuant:
    if scheme.is_float:
        return small_floats(scheme, rows, columns)
    quant = random_quant(scheme, rows, columns, seed=scheme.bits)
    scale = quant.scale.astype(np.float32)
    if scheme.scale_dtype == "bfloat16":
        scale = (scale.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return quant if scheme.scale_dtype == "float16" else replace(quant, scale=scale)


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
