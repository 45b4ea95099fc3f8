"""MLX's affine codes: groups that mlx made, words bit by bit, biases that no zero gives, and files
that lie."""

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.converting import survey
from qtool.dequantize import dequantize
from qtool.errors import FormatError
from qtool.formats import Facts, detect, mlx
from qtool.methods import rtn
from qtool.scheme import GroupQuant, Scheme
from support.formats.artifact_files import assert_same, random_quant
from support.formats.mlx_schemes import WEIGHTS

M = "model.layers.0.self_attn.q_proj"
PLAIN = mlx.choose([])
# 32 weights of a row, times 1024, as bfloat16: mx.quantize(w, group_size=32, bits=bits) of mlx
# 0.32.4 gives these words, this scale and this bias (bfloat16's bits), and mx.dequantize of the
# three in float32 what has this CRC-32.
MADE: dict[int, tuple[list[int], int, int, int]] = {
    2: ([3131292333, 3063588506], 48554, 15914, 0x7DDC9DAA),
    3: ([94001978, 1222874825, 2512952493], 48426, 15914, 0x5E414AC),
    4: ([2644088803, 2611582730, 2538112663, 2590610296], 48298, 15914, 0x8A6E9F44),
    5: ([1732953063, 977541023, 3060770349, 4088124713, 2782607777], 48151, 15914, 0x7EAE8DB8),
    6: ([2846494670, 271425449, 2734352290, 3835275743, 4154894820, 2665899932], 48023, 15914,
        0xBEBED197),
    8: ([2843672376, 2598869411, 2676359349, 2713628060, 2556861051, 2792902031, 2621208728,
         2645976474], 47767, 15914, 0x61052A25),
}  # fmt: skip


def scheme(bits: int = 4, group: int = 32, symmetric: bool = False, dtype: str = "float16") -> Any:
    return Scheme(bits, group, symmetric, dtype, outer="offset")


def found_for(one: Scheme) -> Any:
    return detect(mlx.config(Facts({M: one}), PLAIN))


def bfloat16(bits: int) -> NDArray[np.float32]:
    return np.array([[bits << 16]], np.uint32).view(np.float32)


@pytest.mark.parametrize("bits", MADE)
def test_a_group_that_mlx_made(bits: int) -> None:
    """Its scale is below zero, and its bias the largest weight."""
    words, scale, bias, digest = MADE[bits]
    stored = {
        f"{M}.weight": np.array([words], np.uint32),
        f"{M}.scales": bfloat16(scale), f"{M}.biases": bfloat16(bias),
    }  # fmt: skip
    quant = mlx.unpack(M, stored.__getitem__, found_for(scheme(bits, dtype="bfloat16")))
    made = quant.dequantize()
    assert zlib.crc32(made.tobytes()) == digest
    assert np.abs(made[0] - np.array(WEIGHTS) / 1024).max() <= abs(quant.scale[0, 0])
    assert np.array_equal(dequantize(quant), made)
    assert quant.offset is not None and quant.scale[0, 0] < 0
    assert int(quant.zero[0, 0]) == round(float(-quant.offset[0, 0] / quant.scale[0, 0]))
    kept = mlx.pack(M, replace(quant, scheme=scheme(bits, dtype="bfloat16")), PLAIN)
    assert kept[f"{M}.weight"].tolist() == [words]
    assert [int(kept[f"{M}.{n}"][0, 0]) for n in ("scales", "biases")] == [scale, bias]
    whole = quant.with_nearest_zeros()  # half a step of the last digit of a bias is lost, no more
    assert np.abs(whole.dequantize() - made).max() <= abs(quant.scale[0, 0]) / 2
    assert (whole.scale > 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bits", mlx.WIDTHS)
def test_bit_by_bit(bits: int, dtype: str) -> None:
    quant = quant_of(scheme(bits, 64, dtype=dtype), 5, 192)
    stored = mlx.pack(M, quant, PLAIN)
    words, bias = stored[f"{M}.weight"], quant.row_offset()
    assert words.dtype == np.uint32 and words.shape == (5, 192 * bits // 32)
    for row in range(5):
        number = sum(int(word) << 32 * place for place, word in enumerate(words[row]))
        codes = [number >> (bits * k) & ((1 << bits) - 1) for k in range(192)]
        assert codes == quant.codes[row].tolist()
        product = np.array(codes, np.float32) * quant.scale[row].astype(np.float32).repeat(64)
        assert quant.dequantize()[row].tolist() == (product + bias[row].repeat(64)).tolist()
    back = mlx.unpack(M, as_read(stored).__getitem__, found_for(quant.scheme))
    if bits == 8 and dtype == "bfloat16":  # several zeros may give one bias of 8 digits
        assert np.array_equal(back.row_offset(), bias) and back.offset is None
        back = replace(back, zero=quant.zero)
    # An array does not tell bfloat16 from float32; headers do.
    assert_same(replace(back, scheme=replace(back.scheme, scale_dtype=dtype)), quant)
    assert np.array_equal(dequantize(quant), quant.dequantize())
    names = {s.name: (s.dtype, s.shape) for s in mlx.specs(M, quant.scheme, quant.shape, PLAIN)}
    kind = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}[dtype]
    assert names == {
        f"{M}.weight": ("U32", (5, 6 * bits)), f"{M}.scales": (kind, (5, 3)),
        f"{M}.biases": (kind, (5, 3)),
    }  # fmt: skip


def quant_of(one: Scheme, rows: int, columns: int) -> GroupQuant:
    """Random codes; scales that the dtype holds."""
    quant = random_quant(replace(one, outer="", scale_dtype="float16"), rows, columns)
    scale = quant.scale.astype(np.float32)
    if one.scale_dtype == "bfloat16":
        scale = (scale.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    if one.scale_dtype == "float16":
        return replace(quant, scheme=one)
    return replace(quant, scheme=one, scale=scale)


def as_read(stored: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """bfloat16 is read as float32."""
    return {
        name: (a.astype(np.uint32) << np.uint32(16)).view(np.float32) if a.dtype == "<u2" else a
        for name, a in stored.items()
    }


def test_offsets_are_rounded_as_they_are_stored() -> None:
    """13 * 1.0009765625 needs 14 digits, float16 has 11."""
    one = GroupQuant(
        scheme(), np.zeros((1, 32), np.uint8), np.array([[1 + 2**-10]], np.float16),
        np.array([[13]], np.uint8),
    )  # fmt: skip
    assert one.row_offset().tolist() == [[-13.015625]] and not one.has_whole_zeros()
    assert replace(one, zero=np.array([[8]], np.uint8)).has_whole_zeros()
    assert one.dequantize()[0, 0] == np.float32(-13.015625)


def damaged(stored: dict[str, NDArray[Any]], name: str, value: Any) -> dict[str, NDArray[Any]]:
    out = dict(stored)
    if value is None:
        del out[f"{M}.{name}"]
    else:
        out[f"{M}.{name}"] = value
    return out


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("biases", None, f"{M}.biases: missing"),
        ("scales", None, f"{M}.scales: missing"),
        ("weight", np.zeros((4, 8), np.int32), "expected uint32 words"),
        ("weight", np.zeros((4, 7), np.uint32), "not divisible by the group size 32"),
        ("weight", np.zeros((0, 8), np.uint32), "it is empty"),
        ("scales", np.ones((4, 3), np.float16), "scales: the shape is [4, 3]; expected [4, 2]"),
        ("biases", np.ones((4, 2), np.float32), "scales are float16, biases float32"),
        ("biases", np.ones((4, 2), np.int32), "expected a float type"),
    ],
)
def test_files_that_lie(name: str, value: Any, sentence: str) -> None:
    stored = mlx.pack(M, random_quant(scheme(), 4, 64), PLAIN)
    with pytest.raises(FormatError) as caught:
        mlx.unpack(M, damaged(stored, name, value).__getitem__, found_for(scheme()))
    assert sentence in str(caught.value)


def test_tables() -> None:
    """Of modules that differ; and what is not decoded."""
    table = mlx.config(Facts({"a": scheme(4, 64), "b": scheme(4, 64), "c": scheme(6, 32)}), PLAIN)
    assert table == {
        "group_size": 64, "bits": 4, "mode": "affine",
        "c": {"group_size": 32, "bits": 6, "mode": "affine"},
    }  # fmt: skip
    found = detect(table)
    assert (found.format, found.layout, str(found.scheme)) == ("mlx", "affine", "w4 g64 asym")
    assert detect({"bits": 4, "group_size": 64}).scheme == found.scheme
    assert detect({"bits": 7, "group_size": 64}).scheme is None
    assert detect({"bits": 4, "group_size": 64, "quant_method": "gptq"}).format == "gptq"
    with pytest.raises(FormatError, match="for all modules at once whether weights are symmetric"):
        mlx.config(Facts({"a": scheme(), "b": scheme(symmetric=True)}), PLAIN)
    for bad, reason in (
        (scheme(7), "2, 3, 4, 5, 6 or 8 bits, not 7"), (scheme(4, 16), "groups of 32, 64 or 128"),
        (Scheme(4, 32, False), "integers with a scale"),
    ):  # fmt: skip
        assert reason in str(mlx.supports(bad, (4, 64), PLAIN))


def test_codes_are_nearest_with_offsets_as_stored() -> None:
    """Of 8 bits a bias in bfloat16 is off by up to a quarter of a step."""
    rng = np.random.default_rng(2)
    weight = (rng.normal(size=(64, 128)) + 0.3).astype(np.float32)
    one = scheme(8, 64, dtype="bfloat16")
    quant = rtn.quantize(weight, None, one, rtn.Options()).quant
    steps = np.abs(quant.dequantize() - weight) / quant.scale.repeat(64, axis=1)
    inside = (quant.codes > 0) & (quant.codes < 255)
    assert steps[inside].max() <= 0.5 + 2**-10 and inside.mean() > 0.97


def test_zeros_out_of_reach_are_encoded_anew(tmp_path: Path) -> None:
    """Weights of one sign, as mlx-lm rounds them, have no zero among 0 to 15."""
    rng = np.random.default_rng(1)
    value = GroupQuant(
        scheme(), rng.integers(0, 16, (8, 64)).astype(np.uint8), np.full((8, 2), 0.05, np.float16),
        np.zeros((8, 2), np.uint8), offset=np.full((8, 2), 0.5, np.float32),
    )  # fmt: skip
    assert survey.far_from_zeros(value)
    fours = np.full((8, 2), 4, np.uint8)
    near = replace(value, zero=fours, offset=np.full((8, 2), -0.21, np.float32))
    assert not survey.far_from_zeros(near)
