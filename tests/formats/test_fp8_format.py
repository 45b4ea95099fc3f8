"""FP8 of transformers, int8 of bitsandbytes, modelopt: bytes by hand, files that lie."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from qtool import float_codes as codes_of
from qtool.artifacts.artifact import Artifact
from qtool.dequantize import dequantize
from qtool.errors import FormatError, QtoolError, UnsupportedError
from qtool.formats import Facts, bitsandbytes, detect, fp8, modelopt
from qtool.inspecting.inspect import inspect
from qtool.scheme import GroupQuant, Scheme
from support.formats.artifact_files import assert_same, random_quant
from support.formats.compressed_schemes import SCHEMES, a_quant
from support.formats.packed_files import compressed_tensors as config_of
from support.formats.packed_files import write
from support.kernels import packed_definitions as definitions

M = "model.layers.0.mlp.up_proj"
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
ONE = {"quant_method": "fp8", "activation_scheme": "static"}


def read(folder: Path) -> GroupQuant:
    artifact = Artifact.open(folder)
    found = artifact.read(M)
    assert isinstance(found, GroupQuant)
    assert (artifact.entry(M).scheme, artifact.entry(M).shape) == (found.scheme, found.shape)
    return found


@pytest.mark.parametrize("book", ["e4m3", "e5m2", "e2m1"])
def test_tables(book: str) -> None:
    byte = np.arange(256, dtype=np.uint8)
    if book == "e2m1":
        expected = definitions.float4(byte[:, None])[:, :1].ravel()
    else:
        expected = definitions.float8(byte, {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[book])
    definitions.same(codes_of.TABLES[book], expected)
    definitions.same(codes_of.E8M0, definitions.e8m0(byte))


@pytest.mark.parametrize("book", ["e4m3", "e5m2", "e2m1"])
def test_the_nearest_code_ties_to_even(book: str) -> None:
    """Every number, every middle of two, and either side of it; too large becomes the largest."""
    table = codes_of.TABLES[book]
    count = 8 if book == "e2m1" else 128
    numbers = table[:count][np.isfinite(table[:count])].astype(np.float32)
    assert np.array_equal(codes_of.encode(numbers, book), np.arange(numbers.size))
    middle = ((numbers[:-1].astype(np.float64) + numbers[1:]) / 2).astype(np.float32)
    below = np.arange(numbers.size - 1)
    assert np.array_equal(codes_of.encode(middle, book), below + below % 2)
    assert np.array_equal(codes_of.encode(np.nextafter(middle, np.float32(-1)), book), below)
    assert np.array_equal(codes_of.encode(np.nextafter(middle, np.float32(1e9)), book), below + 1)
    large = np.array([1e30, numbers[-1] * 1.5, -1e30], np.float32)
    top, sign = numbers.size - 1, 8 if book == "e2m1" else 128
    assert codes_of.encode(large, book).tolist() == [top, top, top | sign]
    assert np.array_equal(codes_of.encode(-middle, book), (below + below % 2) | sign)


def test_exponents_and_nibbles() -> None:
    powers = np.exp2(np.arange(-127, 128, dtype=np.float64)).astype(np.float32)
    assert np.array_equal(codes_of.exponent(powers), np.arange(255))
    assert np.array_equal(codes_of.decode_scale(np.arange(255), "e8m0"), powers)
    byte = np.arange(256, dtype=np.uint8).reshape(4, 64)
    nibbles = codes_of.unpack_nibbles(byte)
    assert nibbles[0, :4].tolist() == [0, 0, 1, 0]
    assert np.array_equal(codes_of.pack_nibbles(nibbles), byte)
    as_e4m3 = codes_of.TABLES["e4m3"][codes_of.E2M1_AS_E4M3]
    definitions.same(as_e4m3, codes_of.TABLES["e2m1"][:16])


@pytest.mark.parametrize("name", [*SCHEMES, "bitsandbytes", "act order", "modelopt"])
def test_kernels_agree_with_the_definition(name: str) -> None:
    if name == "act order":
        quant = random_quant(Scheme(4, 32, True), 40, 256, act_order=True)
    elif name == "modelopt":
        quant = a_quant(Scheme(4, 16, True, "float8_e4m3", "e2m1", 1, "multiplies"), 40)
    elif name == "bitsandbytes":
        plain = a_quant(Scheme(8, -1, True, "float32"), 40)
        outer = float(np.float32(1 / 127))
        quant = GroupQuant(bitsandbytes.SCHEME, plain.codes, plain.scale, plain.zero, None, outer)
    else:
        quant = a_quant(SCHEMES[name])
    definitions.same(dequantize(quant), quant.dequantize())


def test_blocks(tmp_path: Path) -> None:
    """128 x 128, the last ones cut off; the scale multiplies, whatever it is called."""
    codes = (np.arange(200 * 160) % 126).astype(np.uint8).reshape(200, 160)
    scale = np.array([[1, 2], [3, 4]], np.float32)
    stored = {f"{M}.weight": ("F8_E4M3", codes), f"{M}.weight_scale_inv": ("F32", scale)}
    write(tmp_path, stored, BLOCKS)
    wide = np.kron(scale, np.ones((128, 128), np.float32))[:200, :160]
    assert np.array_equal(read(tmp_path).dequantize(), codes_of.TABLES["e4m3"][codes] * wide)
    found = inspect(tmp_path).json()
    assert (found["format"], found["tensors"][0]["scheme"]) == ("fp8", "fp8 e4m3 128x128")
    assert found["bits_per_weight"] == 8 * (200 * 160 + 16) / (200 * 160)


@pytest.mark.parametrize(
    ("config", "last", "shape", "said"),
    [
        (ONE, "weight_scale", (), "tensor"),
        (ONE, "weight_scale", (1,), "tensor"),
        (ONE, "weight_scale_inv", (1,), "tensor"),
        (ONE, "weight_scale", (3, 1), "channel"),
        (BLOCKS, "weight_scale", (), "tensor"),
        ({"quant_method": "fbgemm_fp8"}, "weight_scale", (3, 1), "channel"),
    ],
)
@pytest.mark.parametrize("book", ["e4m3", "e5m2"])
def test_other_scales(
    tmp_path: Path, config: dict[str, Any], last: str, shape: tuple[int, ...], said: str, book: str
) -> None:
    codes = np.arange(3 * 200, dtype=np.uint8).reshape(3, 200) % 120
    scale = (np.arange(int(np.prod(shape)), dtype=np.float32) + 2).reshape(shape)
    stored = {
        f"{M}.weight": (f"F8_{book.upper()}", codes),
        f"{M}.{last}": ("F32", scale),
        f"{M}.input_scale": ("F32", np.ones((), np.float32)),
    }
    write(tmp_path, stored, config)
    found = read(tmp_path)
    assert str(found.scheme) == f"fp8 {book} {said}"
    expected = codes_of.TABLES[book][codes] * scale.reshape(-1, 1)
    assert np.array_equal(found.dequantize(), expected)
    assert list(Artifact.open(tmp_path).entries) == [f"{M}.weight"]


def test_fp8_round_trip(tmp_path: Path) -> None:
    scheme = Scheme(8, 128, True, "float32", "e4m3", 128)
    quant = a_quant(scheme, 200, 160)
    options = fp8.choose([scheme])
    specs = fp8.specs(M, scheme, quant.shape, options)
    stored = fp8.pack(M, quant, options)
    config = fp8.config(Facts({M: scheme}, dense=["lm_head"]), options)
    assert config["modules_to_not_convert"] == ["lm_head"]
    write(tmp_path, {s.name: (s.dtype, stored[s.name].reshape(s.shape)) for s in specs}, config)
    assert_same(read(tmp_path), quant)
    assert detect(config).dense == ("lm_head",)
    for other in (Scheme(8, -1, True, "float32", "e4m3", -1), Scheme(8, -1, True)):
        assert fp8.supports(other, (8, 8), options)
    assert fp8.supports_together([scheme, Scheme(8, 64, True, "float32", "e4m3", 64)])


def test_bitsandbytes(tmp_path: Path) -> None:
    stored = {
        f"{M}.weight": ("I8", np.array([[-127, 1], [127, 3]], np.int8)),
        f"{M}.SCB": ("F32", np.array([2.54, 1], np.float32)),
        f"{M}.weight_format": ("U8", np.array(0, np.uint8)),
        "norm.weight": ("F16", np.ones(2, np.float16)),
    }
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    write(tmp_path, stored, config)
    third = np.float32(1 / 127)
    expected = stored[f"{M}.weight"][1].astype(np.float32)
    expected = expected * stored[f"{M}.SCB"][1][:, None] * third
    assert np.array_equal(read(tmp_path).dequantize(), expected)
    assert list(Artifact.open(tmp_path).entries) == [f"{M}.weight", "norm.weight"]
    assert inspect(tmp_path).json()["tensors"][0]["scheme"] == "w8 channel sym"
    del stored[f"{M}.weight_format"]
    assert np.array_equal(read(write(tmp_path, stored, config)).dequantize(), expected)
    stored[f"{M}.weight_format"] = ("U8", np.array(2, np.uint8))
    with pytest.raises(UnsupportedError, match="weight_format is 2"):
        read(write(tmp_path, stored, config))
    assert detect({"quant_method": "bitsandbytes", "load_in_4bit": True}).scheme is None


def test_experts_in_one_tensor_are_named(tmp_path: Path) -> None:
    """transformers 5 fuses them; they are counted with their scales, and not taken for dense."""
    stored = {
        "mlp.experts.gate_up_proj": ("F8_E4M3", np.zeros((2, 128, 128), np.uint8)),
        "mlp.experts.gate_up_proj_scale_inv": ("F32", np.ones((2, 1, 1), np.float32)),
        f"{M}.weight": ("F8_E4M3", np.zeros((128, 128), np.uint8)),
        f"{M}.weight_scale_inv": ("F32", np.ones((1, 1), np.float32)),
    }
    artifact = Artifact.open(write(tmp_path, stored, BLOCKS))
    entry = artifact.entry("mlp.experts.gate_up_proj")
    assert (entry.scheme, entry.nbytes, len(artifact.entries)) == ("fp8", 2 * 128 * 128 + 8, 2)
    with pytest.raises(UnsupportedError, match="fp8 is recognised, but not decoded"):
        artifact.read("mlp.experts.gate_up_proj")


PACKED = np.arange(32, dtype=np.uint8).reshape(2, 16) * 8
NVFP4 = {
    f"{M}.weight": ("U8", PACKED),
    f"{M}.weight_scale": ("F8_E4M3", np.array([[0x38, 0x39], [0x7E, 1]], np.uint8)),
    f"{M}.weight_scale_2": ("F32", np.array(0.3, np.float32)),
    f"{M}.input_scale": ("F32", np.array(0.1, np.float32)),
}


@pytest.mark.parametrize("beside", [True, False])
def test_modelopt(tmp_path: Path, beside: bool) -> None:
    """NVFP4 with the reciprocal of what compressed-tensors stores; FP8 in the same file."""
    name = "model.layers.0.self_attn.o_proj"
    codes = np.arange(64, dtype=np.uint8).reshape(2, 32)
    eight = {
        f"{name}.weight": ("F8_E4M3", codes),
        f"{name}.weight_scale": ("F32", np.array(2, np.float32)),
    }
    said = {"quant_algo": "MIXED_PRECISION", "exclude_modules": ["lm_head"]}
    write(tmp_path, NVFP4 | eight, {"quant_method": "modelopt", **said})
    if beside:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    artifact = Artifact.open(tmp_path)
    assert artifact.found.format == "modelopt" and artifact.found.dense == ("lm_head",)
    assert list(artifact.entries) == [f"{M}.weight", f"{name}.weight"]
    found = read(tmp_path)
    assert str(found.scheme) == "nvfp4 g16" and found.outer == np.float32(0.3)
    scale = codes_of.TABLES["e4m3"][NVFP4[f"{M}.weight_scale"][1]] * np.float32(0.3)
    expected = definitions.float4(PACKED) * np.repeat(scale, 16, 1)
    assert np.array_equal(found.dequantize(), expected)
    whole = artifact.read(name)
    assert isinstance(whole, GroupQuant) and str(whole.scheme) == "fp8 e4m3 tensor"
    assert np.array_equal(whole.dequantize(), codes_of.TABLES["e4m3"][codes] * 2)
    scaled = NVFP4 | {f"{M}.pre_quant_scale": ("BF16", np.ones(32, np.uint16))}
    with pytest.raises(UnsupportedError, match="scaled as the model runs"):
        read(write(tmp_path, scaled, {"quant_method": "modelopt", **said}))
    assert detect({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}).scheme is None


W = ("F8_E4M3", np.zeros((4, 32), np.uint8))
ONES = ("F32", np.ones((1, 1), np.float32))
BNB = {"quant_method": "bitsandbytes", "load_in_8bit": True}


@pytest.mark.parametrize(
    ("config", "tensors", "sentence"),
    [
        (BLOCKS | {"weight_block_size": 128}, {"weight": W}, "weight_block_size is 128"),
        (BLOCKS | {"weight_block_size": [0, 128]}, {"weight": W}, "weight_block_size is 0"),
        (BLOCKS, {"weight": W}, "weight_scale_inv: missing"),
        (BLOCKS, {"weight": W, "weight_scale_inv": ("F32", np.ones((2, 1), np.float32))},
         r"the shape is \[2, 1\]; expected \[1, 1\]"),
        (BLOCKS, {"weight": W, "weight_scale_inv": ("I32", np.ones((1, 1), np.int32))},
         "the dtype is I32; expected float16"),
        (BLOCKS, {"weight": ("I8", np.zeros((4, 32), np.int8)), "weight_scale_inv": ONES},
         "expected float8_e4m3"),
        (BLOCKS, {"weight": ("F8_E4M3", np.zeros((4, 0), np.uint8)), "weight_scale_inv": ONES},
         "it is empty"),
        (BLOCKS, {"weight": ("F8_E4M3", np.zeros(4, np.uint8)), "weight_scale_inv": ONES},
         "expected 2 axes"),
        (BNB, {"weight": ("I8", np.zeros((4, 32), np.int8))}, "SCB: missing"),
        (BNB, {"weight": ("I8", np.zeros((4, 32), np.int8)), "SCB": ("F32", np.ones(3, "f4"))},
         r"SCB: the shape is \[3\]; expected \[4, 1\]"),
    ],
)  # fmt: skip
def test_files_that_lie(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], sentence: str
) -> None:
    write(tmp_path, {f"{M}.{last}": value for last, value in tensors.items()}, config)
    with pytest.raises(QtoolError, match=sentence) as caught:
        artifact = Artifact.open(tmp_path)
        artifact.read(M)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("module", [modelopt])
def test_what_is_read_only(module: ModuleType) -> None:
    assert "not written" in str(module.supports(modelopt.NVFP4, (8, 16), module.choose([])))
    with pytest.raises(FormatError, match="not written"):
        module.config(Facts({}), module.choose([]))


def test_a_folder_of_several_formats_is_read_as_its_config_says(tmp_path: Path) -> None:
    """An int8 weight of a config of packed ones is named, not taken for something else."""
    stored = {
        f"{M}.weight": ("I8", np.zeros((4, 32), np.int8)),
        f"{M}.weight_scale": ("F32", np.ones((4, 1), np.float32)),
    }
    weights = {"num_bits": 8, "strategy": "channel"}
    write(tmp_path, stored, config_of("pack-quantized", weights))
    assert read(tmp_path).scheme == Scheme(8, -1, True, "float32")
