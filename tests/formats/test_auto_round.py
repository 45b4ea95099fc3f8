"""AutoRound's own config around codes that lie as GPTQ's or AWQ's do, packed here by hand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool.artifacts.artifact import Artifact
from qtool.errors import QtoolError, UnsupportedError
from qtool.formats.auto_round import left_dense
from qtool.formats.known import detect
from qtool.inspecting.inspect import inspect
from qtool.scheme import GroupQuant
from support.converting.converting import converted
from support.formats import other_tools as other
from support.formats.auto_round_files import AWQ, V1, V2, config, folder, random_quant, stored
from support.formats.packed_files import write


def same(found: object, quant: GroupQuant) -> None:
    assert isinstance(found, GroupQuant) and found.scheme == quant.scheme
    for what in ("codes", "scale", "zero"):
        np.testing.assert_array_equal(getattr(found, what), getattr(quant, what), err_msg=what)


CASES = [
    *((V1, bits, 64, True) for bits in (2, 3, 4, 8)),
    *((V2, bits, 64, False) for bits in (2, 3, 4, 8)),
    (V1, 4, 128, False), (V1, 8, -1, True), ("auto_round:gptqmodel", 4, 128, False),
    (AWQ, 4, 128, False), (AWQ, 4, 64, True), (AWQ, 4, -1, False),
]  # fmt: skip


@pytest.mark.parametrize(("packing", "bits", "size", "symmetric"), CASES)
def test_codes_zeros_and_scales(
    packing: str, bits: int, size: int, symmetric: bool, tmp_path: Path
) -> None:
    quant = random_quant(bits, size, symmetric, least=0 if packing == V2 else 1)
    tensors = stored(packing, "model.layers.0.m", quant)
    artifact = Artifact.open(write(tmp_path, tensors, config(packing, bits, size, sym=symmetric)))
    assert artifact.found.label.startswith("auto-round, stored as ")
    same(artifact.read("model.layers.0.m.weight"), quant)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_ones_taken_from_a_word_at_once_are_given_back(bits: int, tmp_path: Path) -> None:
    """Up to version 0.15 a zero of 0 borrows from its neighbour."""
    quant = random_quant(bits, 64, False, least=0)
    quant.zero[::3] = 0
    tensors = stored(V1, "model.layers.0.m", quant)
    artifact = Artifact.open(write(tmp_path, tensors, config(V1, bits, 64, sym=False)))
    same(artifact.read("model.layers.0.m.weight"), quant)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, ("gptq", "v1")),
        ({"packing_format": "auto"}, ("gptq", "v1")),
        ({"packing_format": "auto_gptq"}, ("gptq", "v1")),
        ({"packing_format": "auto_round:gptq"}, ("gptq", "v1")),
        ({"packing_format": "auto_round:gptq:exllamav2"}, ("gptq", "v1")),
        ({"packing_format": "auto_round:exllamav2"}, ("gptq", "v2")),
        ({"packing_format": "auto_round:gptqmodel"}, ("gptq", "v2")),
        ({"packing_format": "auto_round:awq"}, ("awq", "gemm")),
        ({"packing_format": V2, "backend": "gptq:marlin"}, ("gptq", "v2")),
        ({"backend": "marlin"}, ("gptq", "v1")),
        ({"quant_method": "intel/auto-round", "backend": "auto_round:exllamav2"}, ("gptq", "v2")),
        ({"quant_method": "intel/auto-round", "backend": "gptq:exllamav2"}, ("gptq", "v1")),
        ({"packing_format": "auto_round:llm_compressor"}, ("auto-round", None)),
        ({"packing_format": "auto_round:fp8"}, ("auto-round", None)),
        ({"packing_format": "mlx"}, ("auto-round", None)),
        ({"data_type": "mx_fp"}, ("auto-round", None)),
        ({"act_bits": 8}, ("auto-round", None)),
        ({"bits": 5}, ("auto-round", None)),
        ({"rotation_config": {"hadamard_type": "hadamard"}}, ("auto-round", None)),
        ({"extra_config": {"lm_head": {"bits": 6}}}, ("auto-round", None)),
        ({"extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}}, ("gptq", "v1")),
    ],
)
def test_what_a_config_means(said: Mapping[str, Any], expected: tuple[str, str | None]) -> None:
    found = detect({**config(None), **said})
    assert (found.format, found.layout if found.scheme else None) == expected
    assert found.quant_method == "auto-round"


EXTRA = {
    "model.layers.0.mlp.up_proj": {"bits": 16},
    r".*up_proj.*": {"bits": 8, "group_size": 64},
    r"layers\.1\.self_attn\.(q|k|v)_proj$": {"bits": 2, "sym": False},
    "lm_head": {"bits": 8, "group_size": None, "act_bits": 16, "rotation_config": None},
    r"layers\.1\.mlp\.down_proj": {"bits": 16},
}


def test_layers_that_differ(tmp_path: Path) -> None:
    """By name, by expressions of which the first counts, and the head."""
    schemes = {
        "model.layers.1.mlp.up_proj": random_quant(8, 64, True),
        "model.layers.1.self_attn.q_proj": random_quant(2, 128, False),
        "model.layers.1.self_attn.o_proj": random_quant(4, 128, True),
        "lm_head": random_quant(8, 128, True),
    }
    tensors: other.Tensors = {}
    for module, quant in schemes.items():
        tensors |= stored(V1, module, quant)
    artifact = Artifact.open(write(tmp_path, tensors, config(extra_config=EXTRA)))
    for module, quant in schemes.items():
        same(artifact.read(f"{module}.weight"), quant)
    dense = {
        module: left_dense(config(extra_config=EXTRA), module)
        for module in (*schemes, "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj",
                       "model.layers.11.mlp.down_proj", "visual.blocks.0.mlp.up")
    }  # fmt: skip
    assert [module for module, left in dense.items() if left] == [
        "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj", "visual.blocks.0.mlp.up",
    ]  # fmt: skip


def test_names_without_their_beginning() -> None:
    said = config(extra_config={"mlp.up_proj": {"bits": 16}, "lm_head": {"bits": 4}})
    for module, short, entire in (
        ("model.layers.0.mlp.up_proj", True, False), ("model.layers.0.smlp.up_proj", False, False),
        ("model.lm_head", False, True), ("lm_head", False, False),
    ):  # fmt: skip
        assert left_dense(said, module) is short
        assert left_dense(said, module, entire=True) is entire


def test_blocks_that_are_quantized() -> None:
    for said in ("model.a.0, model.b", ["model.a.0", "model.b"], [["model.a.0"], ["model.b.1"]]):
        old = {**config(block_name_to_quantize=None), "to_quant_block_names": said}
        assert left_dense(old, "model.b.1.up") is False and left_dense(old, "model.c.1.up") is True
    unsaid = config(block_name_to_quantize=None)
    assert left_dense(unsaid, "lm_head") is True and left_dense(unsaid, "a.b") is False
    hard = config(extra_config={r"(\w+)\.\1": {"bits": 16}})
    assert left_dense(hard, "model.layers.0.mlp.up_proj") is None


def test_groups_of_their_own_in_awqs_layout(tmp_path: Path) -> None:
    quant, fine = random_quant(4, 128, False), random_quant(4, 32, False)
    tensors = stored(AWQ, "model.layers.0.a", quant) | stored(AWQ, "model.layers.0.b", fine)
    extra = {r".*layers\.\d+\.b": {"group_size": 32}}
    said = config(AWQ, sym=False, extra_config=extra)
    artifact = Artifact.open(write(tmp_path, tensors, said))
    same(artifact.read("model.layers.0.a.weight"), quant)
    same(artifact.read("model.layers.0.b.weight"), fine)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path, _ = folder(tmp_path / "in", V2, 2, False)
    with pytest.raises(QtoolError, match="awq holds 4 bits only, not 2"):
        converted(path, "awq", tmp_path / "out")


def test_what_is_recognised_only(tmp_path: Path) -> None:
    path, _ = folder(tmp_path / "in", V1, 4, True, act_bits=8)
    seen = inspect(path)
    assert seen.summary()[0] == ("format", "auto-round auto_round:auto_gptq with inputs of 8 bits")
    shapes = {entry.name: entry.shape for entry in seen.entries}
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (other.HIDDEN, other.INNER)
    said = "auto-round auto_round:auto_gptq with inputs of 8 bits, which is recognised, but not"
    with pytest.raises(UnsupportedError, match=said):
        converted(path, "gptq", tmp_path / "out")
