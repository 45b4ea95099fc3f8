"""compressed-tensors: bytes by hand, older packings, targets, files that lie, and round trips."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.artifacts.artifact import Artifact
from qtool.errors import FormatError, QtoolError
from qtool.formats import compressed_tensors, detect
from qtool.inspecting.inspect import inspect
from qtool.scheme import Scheme
from support.formats.artifact_files import assert_same, random_quant
from support.formats.compressed_reading import MXFP4, M, read
from support.formats.packed_files import compressed_tensors as config_of
from support.formats.packed_files import write
from support.kernels import packed_definitions as definitions

CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}


FP8 = {"num_bits": 8, "type": "float", "symmetric": True}


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def group(bits: int, size: int = 32, symmetric: bool = True) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": "group", "group_size": size,
            "symmetric": symmetric}  # fmt: skip


def words(*hexadecimal: str) -> NDArray[np.int32]:
    return np.array([[int(h, 16) for h in hexadecimal]], np.uint32).view(np.int32)


def test_four_bits_by_hand(tmp_path: Path) -> None:
    # Nibbles from the lowest: codes -8, -7, ... 7, stored with 8 added.
    stored = {
        f"{M}.weight_packed": ("I32", words("76543210", "fedcba98")),
        f"{M}.weight_scale": ("BF16", np.array([[0x3F00]], np.uint16)),  # 0.5
        f"{M}.weight_shape": ("I64", np.array([1, 16])),
        "norm.weight": ("F32", np.ones(4, np.float32)),
    }
    write(tmp_path, stored, config_of("pack-quantized", group(4, 16)))
    found = read(tmp_path)
    assert found.scheme == Scheme(4, 16, True, "bfloat16")
    assert found.dequantize().tolist() == [[(q - 8) / 2 for q in range(16)]]
    seen = inspect(tmp_path).json()
    assert (seen["format"], seen["quant_method"]) == ("compressed-tensors",) * 2
    row = next(row for row in seen["tensors"] if row["name"] == f"{M}.weight")
    assert row["scheme"] == "w4 g16 sym" and row["bits_per_weight"] == 8 * (8 + 2 + 16) / 16
    assert seen["unquantized_share"] == 4 / 20


def test_three_bits_asymmetric_by_hand(tmp_path: Path) -> None:
    # 32 codes 0 1 2 .. 7 0 1 .. as one little-endian stream, zeros of 2 rows along out: 5 and 2.
    stream = sum((k % 8) << (3 * k) for k in range(32))
    row = [f"{stream >> (32 * w) & 0xFFFFFFFF:08x}" for w in range(3)]
    stored = {
        f"{M}.weight_packed": ("I32", np.concatenate([words(*row), words(*row)])),
        f"{M}.weight_scale": ("F16", np.array([[1], [2]], np.float16)),
        f"{M}.weight_zero_point": ("I32", np.array([[5 | 2 << 3]], np.int32)),
        f"{M}.weight_shape": ("I64", np.array([2, 32])),
    }
    write(tmp_path, stored, config_of("pack-quantized", group(3, 32, False)))
    found = read(tmp_path)
    assert found.zero.tolist() == [[5], [2]]
    assert found.dequantize().tolist() == [
        [k % 8 - 5 for k in range(32)],
        [2 * (k % 8 - 2) for k in range(32)],
    ]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("layout", ["rows", "padded"])
@pytest.mark.parametrize("strategy", ["group", "channel"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_both_packings(
    tmp_path: Path, bits: int, layout: str, strategy: str, symmetric: bool
) -> None:
    """Random words: codes and zeros as the definition takes them out, bit by bit."""
    rows, columns, groups = 24, 96, 3 if strategy == "group" else 1
    each = 32 // bits

    def count(n: int) -> int:
        return -(-n // each) if layout == "padded" else -(-n * bits // 32)

    packed = definitions.random_bits(bits, (rows, count(columns)), np.int32)
    zeros = definitions.random_bits(bits + 9, (groups, count(rows)), np.int32)
    scale = definitions.random_bits(bits, (rows, groups), np.uint16) % 0x7C00
    scale = scale.astype(np.uint16).view(np.float16)
    stored = {
        f"{M}.weight_packed": ("I32", packed),
        f"{M}.weight_scale": ("F16", scale),
        f"{M}.weight_shape": ("I64", np.array([rows, columns])),
    }
    if not symmetric:
        stored[f"{M}.weight_zero_point"] = ("I32", np.ascontiguousarray(zeros.T))
    table = group(bits, 32, symmetric) | {"strategy": strategy}
    if strategy == "channel":
        table["group_size"] = None
    write(tmp_path, stored, config_of("pack-quantized", table))
    found = read(tmp_path)
    codes = definitions.codes(packed, (rows, columns), bits, layout)
    assert np.array_equal(found.codes, codes)
    expected = np.full((rows, groups), 1 << (bits - 1), np.uint8)
    if not symmetric:
        expected = definitions.codes(zeros, (groups, rows), bits, layout).T
    assert np.array_equal(found.zero, expected)
    wide = np.repeat(scale.astype(np.float32), columns // groups, 1)
    shift = np.repeat(expected.astype(np.float32), columns // groups, 1)
    assert np.array_equal(found.dequantize(), (codes - shift) * wide)


def test_columns_out_of_group_order(tmp_path: Path) -> None:
    index = np.random.default_rng(0).permutation(64).astype(np.int32) // 32
    stored = {
        f"{M}.weight_packed": ("I32", definitions.random_bits(1, (4, 8), np.int32)),
        f"{M}.weight_scale": ("F16", np.array([[1, 2]] * 4, np.float16)),
        f"{M}.weight_shape": ("I64", np.array([4, 64])),
        f"{M}.weight_g_idx": ("I32", index),
    }
    config = config_of("pack-quantized", group(4) | {"actorder": "group"})
    write(tmp_path, stored, config)
    found = read(tmp_path)
    assert found.g_idx is not None
    assert np.array_equal(
        found.dequantize(), (found.codes.astype(np.float32) - 8) * (1 + index)[None]
    )
    for idle in (np.arange(64) // 32, np.full(64, -1)):
        stored[f"{M}.weight_g_idx"] = ("I32", idle.astype(np.int32))
        assert read(write(tmp_path, stored, config)).g_idx is None
    stored[f"{M}.weight_g_idx"] = ("I32", np.full(64, 2, np.int32))
    with pytest.raises(FormatError, match=r"names a group outside of 0 \.\. 1"):
        read(write(tmp_path, stored, config))


INT8 = np.array([[-128, -1, 0, 127], [1, 2, 3, 4]], np.int8)


@pytest.mark.parametrize("layout", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize(
    ("strategy", "shape"),
    [("channel", (2, 1)), ("channel", (2,)), ("tensor", (1,)), ("tensor", ())],
)
def test_int8_by_hand(tmp_path: Path, layout: str, strategy: str, shape: tuple[int, ...]) -> None:
    scale = np.array([2, 3] if strategy == "channel" else [2], np.float32).reshape(shape)
    stored = {
        f"{M}.weight": ("I8", INT8),
        f"{M}.weight_scale": ("F32", scale),
        f"{M}.input_scale": ("F32", np.ones(1, np.float32)),
        f"{M}.bias": ("F32", np.zeros(2, np.float32)),
    }
    write(tmp_path, stored, config_of(layout, CHANNEL | {"strategy": strategy}))
    found = read(tmp_path)
    rows = np.broadcast_to(scale.reshape(-1, 1), (2, 1))
    assert found.dequantize().tolist() == (INT8 * rows).tolist()
    assert found.codes.tolist() == (INT8.astype(int) + 128).tolist() and found.zero.max() == 128
    assert Artifact.open(tmp_path).entries.keys() == {f"{M}.weight", f"{M}.bias"}
    assert str(found.scheme) == f"w8 {strategy} sym"


def test_int8_with_zeros_and_four_bits_in_a_byte(tmp_path: Path) -> None:
    stored = {
        f"{M}.weight": ("I8", INT8),
        f"{M}.weight_scale": ("F16", np.array([[1], [2]], np.float16)),
        f"{M}.weight_zero_point": ("I8", np.array([[-128], [5]], np.int8)),
    }
    write(tmp_path, stored, config_of("int-quantized", CHANNEL | {"symmetric": False}))
    assert read(tmp_path).dequantize().tolist() == [[0, 127, 128, 255], [-8, -6, -4, -2]]
    four = {"num_bits": 4, "strategy": "channel"}
    small = np.array([[-8, 7], [0, 1]], np.int8)
    stored = {f"{M}.weight": ("I8", small), f"{M}.weight_scale": stored[f"{M}.weight_scale"]}
    write(tmp_path, stored, config_of("int-quantized", four))
    found = read(tmp_path)
    assert found.codes.tolist() == [[0, 15], [8, 9]] and found.scheme.bits == 4
    assert found.dequantize().tolist() == [[-8, 7], [0, 2]]
    stored[f"{M}.weight"] = ("I8", small + np.int8(1))
    with pytest.raises(FormatError, match="the code 8, which does not fit 4 bits"):
        read(write(tmp_path, stored, config_of("int-quantized", four)))


@pytest.mark.parametrize(
    ("weights", "grid", "said"),
    [
        ({"strategy": "tensor"}, (1,), "fp8 e4m3 tensor"),
        ({"strategy": "channel"}, (96, 1), "fp8 e4m3 channel"),
        ({"strategy": "group", "group_size": 32}, (96, 5), "fp8 e4m3 g32"),
        ({"strategy": "block", "block_structure": [64, 128]}, (2, 2), "fp8 e4m3 64x128"),
        ({"strategy": "block", "block_structure": "64x128"}, (2, 2), "fp8 e4m3 64x128"),
    ],
)
def test_fp8(tmp_path: Path, weights: dict[str, Any], grid: tuple[int, ...], said: str) -> None:
    """All codes but NaN, and a matrix of which the last blocks are cut off."""
    codes = (np.arange(96 * 160) % 126).astype(np.uint8).reshape(96, 160)
    codes[::3] |= 128
    scale = np.random.default_rng(1).uniform(0.01, 1, grid).astype(np.float32)
    stored = {f"{M}.weight": ("F8_E4M3", codes), f"{M}.weight_scale": ("F32", scale)}
    write(tmp_path, stored, config_of("float-quantized", FP8 | weights))
    found = read(tmp_path)
    assert str(found.scheme) == said and found.scheme.scale_dtype == "float32"
    rows, columns = {"tensor": (96, 160), "channel": (1, 160), "group": (1, 32)}.get(
        weights["strategy"], (64, 128)
    )
    wide = np.kron(scale.reshape((1, 1) if grid == (1,) else grid), np.ones((rows, columns)))
    expected = definitions.float8(codes, "float8_e4m3fn") * wide[:96, :160].astype(np.float32)
    assert np.array_equal(found.dequantize(), expected)


def test_nvfp4_by_hand(tmp_path: Path) -> None:
    packed = np.arange(16, dtype=np.uint8).reshape(2, 8) * 16 + 15 - np.arange(16).reshape(2, 8)
    stored = {
        f"{M}.weight_packed": ("U8", packed.astype(np.uint8)),
        f"{M}.weight_scale": ("F8_E4M3", np.array([[0x38], [0x7E]], np.uint8)),  # 1, 448
        f"{M}.weight_global_scale": ("F32", np.array([3], np.float32)),
    }
    write(tmp_path, stored, config_of("nvfp4-pack-quantized", NVFP4))
    found = read(tmp_path)
    assert str(found.scheme) == "nvfp4 g16" and found.outer == 3
    assert found.scale.tolist() == [[1], [448]]
    scale = np.array([[1], [448]], np.float32) / np.float32(3)
    assert np.array_equal(found.dequantize(), definitions.float4(packed.astype(np.uint8)) * scale)


def test_mxfp4_and_mxfp8_by_hand(tmp_path: Path) -> None:
    packed = np.arange(32, dtype=np.uint8).reshape(2, 16)
    scale = np.array([[127], [120]], np.uint8)
    stored = {f"{M}.weight_packed": ("U8", packed), f"{M}.weight_scale": ("U8", scale)}
    write(tmp_path, stored, config_of("mxfp4-pack-quantized", MXFP4))
    found = read(tmp_path)
    assert str(found.scheme) == "mxfp4 g32" and found.scale.tolist() == [[1], [2**-7]]
    assert np.array_equal(found.dequantize(), definitions.float4(packed) * found.scale)
    codes = np.arange(64, dtype=np.uint8).reshape(2, 32)
    stored = {f"{M}.weight": ("F8_E4M3", codes), f"{M}.weight_scale": ("U8", scale)}
    table = FP8 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    write(tmp_path, stored, config_of("mxfp8-quantized", table))
    found = read(tmp_path)
    assert str(found.scheme) == "mxfp8 e4m3 g32"
    expected = definitions.float8(codes, "float8_e4m3fn") * found.scale
    assert np.array_equal(found.dequantize(), expected)


def test_mixed_groups_and_their_targets(tmp_path: Path) -> None:
    """A name goes before an expression, and that before a class; configs are read in order."""
    names = [f"model.layers.{i}.{n}" for i in range(2) for n in ("q_proj", "k_proj", "down_proj")]
    schemes = {}
    stored: dict[str, Any] = {}
    for name in names:
        eight, three = "down" in name, name == "model.layers.1.k_proj"
        bits = 8 if eight else 3 if three else 4
        size = -1 if eight else 32
        quant = random_quant(Scheme(bits, size, True), 32, 64, seed=len(name))
        options = compressed_tensors.choose([quant.scheme])
        for spec in compressed_tensors.specs(name, quant.scheme, quant.shape, options):
            array = compressed_tensors.pack(name, quant, options)[spec.name]
            stored[spec.name] = (spec.dtype, array)
        schemes[name] = quant
    config = config_of(
        "pack-quantized",
        group(4),
        CHANNEL | {"targets": ["re:.*down_proj"]},
        group(3) | {"targets": ["model.layers.1.k_proj"]},
    )
    write(tmp_path, stored, config)
    for name, quant in schemes.items():
        assert_same(read(tmp_path, name), quant)


SPARSE = {"sparsity_config": {"format": "sparse-24-bitmask"}}


@pytest.mark.parametrize(
    "config",
    [
        config_of("marlin-24", group(4)),
        config_of("pack-quantized", group(4), **SPARSE),
        config_of("pack-quantized", group(1)),
        config_of("something-new", group(4)),
        config_of("float-quantized", {"num_bits": 6, "type": "float"}),
        {"quant_method": "compressed-tensors"},
    ],
)
def test_what_is_not_decoded_is_still_named(config: dict[str, Any]) -> None:
    found = detect(config)
    assert (found.format, found.scheme) == ("compressed-tensors", None)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (config_of("pack-quantized") | {"config_groups": [1]}, "config_groups is no object"),
        (config_of("pack-quantized") | {"config_groups": {"W4A16": ["Linear"]}},
         r'config_groups.W4A16 is \["Linear"\]; expected an object'),
        (config_of("pack-quantized", group(4) | {"num_bits": "4"}), 'num_bits is "4"'),
        (config_of("pack-quantized", group(4) | {"group_size": 0}), "group_size is 0"),
        (config_of("pack-quantized", group(4) | {"strategy": "rows"}), 'strategy is "rows"'),
        (config_of("float-quantized", FP8 | {"strategy": "block"}), "block_structure is null"),
        (config_of("float-quantized", FP8 | {"strategy": "block", "block_structure": "9xa"}),
         'block_structure is "a"'),
    ],
)  # fmt: skip
def test_configs_that_make_no_sense(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FormatError, match=sentence) as caught:
        detect(config)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("quantization_config: ") == 1


PACKED = {
    "weight_packed": ("I32", np.zeros((32, 8), np.int32)),
    "weight_scale": ("F16", np.ones((32, 2), np.float16)),
    "weight_shape": ("I64", np.array([32, 64])),
    "weight_zero_point": ("I32", np.zeros((4, 2), np.int32)),
}


NV = {
    "weight_packed": ("U8", np.zeros((4, 16), np.uint8)),
    "weight_scale": ("F8_E4M3", np.full((4, 2), 56, np.uint8)),
    "weight_global_scale": ("F32", np.ones(1, np.float32)),
}


BYTES = {
    "weight": ("F8_E4M3", np.zeros((4, 32), np.uint8)),
    "weight_scale": ("F32", np.ones((4, 1), np.float32)),
}


ASYM = config_of("pack-quantized", group(4, 32, False))


LIES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "no scales": (ASYM, PACKED, {"weight_scale": None}, "weight_scale: missing"),
    "no zeros": (ASYM, PACKED, {"weight_zero_point": None}, "weight_zero_point: missing"),
    "other words": (ASYM, PACKED, {"weight_packed": ("I64", np.zeros((32, 8), np.int64))},
                    "weight_packed: the dtype is I64; expected int32 words"),
    "a word more": (ASYM, PACKED, {"weight_packed": ("I32", np.zeros((32, 9), np.int32))},
                    "9 words a row for 64 codes of 4 bits; expected 8"),
    "three axes": (ASYM, PACKED, {"weight_packed": ("I32", np.zeros((32, 8, 1), np.int32))},
                   "expected 2 axes"),
    "nothing": (ASYM, PACKED, {"weight_packed": ("I32", np.zeros((0, 8), np.int32))}, "is empty"),
    "whole scales": (ASYM, PACKED, {"weight_scale": ("I32", np.ones((32, 2), np.int32))},
                     "weight_scale: the dtype is I32; expected float16"),
    "scales too few": (ASYM, PACKED, {"weight_scale": ("F16", np.ones((16, 2), np.float16))},
                       r"weight_scale: the shape is \[16, 2\]; expected \[32, 2\]"),
    "zeros unpacked": (ASYM, PACKED, {"weight_zero_point": ("I32", np.zeros((32, 2), np.int32))},
                       r"weight_zero_point: the shape is \[32, 2\]; expected \[4, 2\]"),
    "another shape": (ASYM, PACKED, {"weight_shape": ("I64", np.array([32, 63]))},
                      r"weight_shape: it says \[32, 63\]"),
    "a shape of one": (ASYM, PACKED, {"weight_shape": ("I64", np.array([32]))}, "out and in"),
    "g_idx too short": (ASYM, PACKED, {"weight_g_idx": ("I32", np.zeros(63, np.int32))},
                        r"weight_g_idx: the shape is \[63\]; expected \[64\]"),
    "nvfp4 as words": (config_of("nvfp4-pack-quantized", NVFP4), NV,
                       {"weight_packed": ("I32", np.zeros((4, 16), np.int32))}, "expected uint8"),
    "nvfp4 e8m0": (config_of("nvfp4-pack-quantized", NVFP4), NV,
                   {"weight_scale": ("U8", np.ones((4, 2), np.uint8))}, "expected float8_e4m3"),
    "nvfp4 in part": (config_of("nvfp4-pack-quantized", NVFP4), NV,
                      {"weight_packed": ("U8", np.zeros((4, 12), np.uint8))}, "no groups of 16"),
    "no global scale": (config_of("nvfp4-pack-quantized", NVFP4), NV,
                        {"weight_global_scale": None}, "weight_global_scale: missing"),
    "two global scales": (config_of("nvfp4-pack-quantized", NVFP4), NV,
                          {"weight_global_scale": ("F32", np.ones(2, np.float32))}, "one number"),
    "fp8 as int8": (config_of("float-quantized", FP8 | {"strategy": "channel"}), BYTES,
                    {"weight": ("I8", np.zeros((4, 32), np.int8))}, "expected float8_e4m3"),
    "int8 as fp8": (config_of("int-quantized", CHANNEL), BYTES, {}, "expected int8"),
    "fp8 packed": (config_of("float-quantized", FP8 | {"strategy": "channel"}), PACKED, {},
                   "weight_packed: packed, which its config's fp8 e4m3 channel is not"),
    "fp4 whole": (config_of("nvfp4-pack-quantized", NVFP4), BYTES, {}, "stored whole"),
    "no target": (config_of("pack-quantized", group(4) | {"targets": ["a"]},
                            group(8) | {"targets": ["re:(b+)+c"]}), PACKED, {}, "no target"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_files_that_lie(tmp_path: Path, lie: str) -> None:
    config, tensors, changes, sentence = LIES[lie]
    kept = {k: v for k, v in (tensors | changes).items() if v is not None}
    write(tmp_path, {f"{M}.{last}": value for last, value in kept.items()}, config)
    with pytest.raises(QtoolError, match=sentence) as caught:
        artifact = Artifact.open(tmp_path)
        _ = artifact.entries
        artifact.read(M)
    assert "\n" not in str(caught.value)
