"""Zeros of GPTQ v1 from which ones were taken by whole words, as GPTQModel and AutoRound do it.

The words that are subtracted here are written out as GPTQModel has them.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.errors import FormatError, UnsupportedError
from qtool.formats import Options, detect, gptq, gptq_zeros
from qtool.inspecting.inspect import inspect
from qtool.scheme import GroupQuant, Scheme
from support.converting.converting import converted
from support.formats import other_tools as other
from support.formats.artifact_files import random_quant
from support.verification.verifying import serious

ONES = {2: [0x55555555], 3: [0x24924924, 0x92492492, 0x49249249], 4: [0x11111111], 8: [0x01010101]}


def config(writer: str, bits: int = 4, **more: Any) -> dict[str, Any]:
    meta = {"quantizer": ["optimum:1.24.0", writer]}
    return {**other.GPTQ, "bits": bits, "group_size": 32, "sym": False, "meta": meta, **more}


def less(words: NDArray[np.int32], ones: list[int]) -> NDArray[np.int32]:
    taken = np.resize(np.array(ones, np.uint32), words.shape[1])
    return (words.view("<u4") - taken).view("<i4")


def asymmetric(bits: int) -> GroupQuant:
    quant = random_quant(Scheme(bits, 32, False), 64, 64)
    quant.zero[::3] = 0
    return quant


def stored(quant: GroupQuant, ones: list[int]) -> dict[str, NDArray[Any]]:
    tensors = gptq.pack("m", quant, Options("v2"))
    return tensors | {"m.qzeros": less(tensors["m.qzeros"], ones)}


def read(tensors: dict[str, NDArray[Any]], said: dict[str, Any]) -> NDArray[np.uint8]:
    return gptq.unpack("m", tensors.__getitem__, detect(said)).zero


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("writer", ["gptqmodel:0.9.0", "gptqmodel:7.3.4-dev", "auto-round"])
def test_ones_are_given_back_to_words(bits: int, writer: str) -> None:
    quant = asymmetric(bits)
    said = config(writer, bits)
    if writer == "auto-round":
        said |= {"meta": None, "provider": writer}
    np.testing.assert_array_equal(read(stored(quant, ONES[bits]), said), quant.zero)
    assert not np.array_equal(
        read(stored(quant, ONES[bits]), config("other:7.0", bits)), quant.zero
    )


@pytest.mark.parametrize("symmetric", [False, True])
def test_three_bits_up_to_version_6(symmetric: bool) -> None:
    quant = random_quant(Scheme(3, 32, True), 64, 64) if symmetric else asymmetric(3)
    tensors = stored(quant, ONES[3])
    old = config("gptqmodel:6.0.3", 3, sym=symmetric)
    np.testing.assert_array_equal(read(tensors, old), quant.zero)
    assert not np.array_equal(read(tensors, config("gptqmodel:7.0.0", 3)), quant.zero)


def test_three_bits_from_version_7() -> None:
    quant = asymmetric(3)
    tensors = gptq.pack("m", quant, Options("v2"))
    fields = (quant.zero.T - np.uint8(1)) & np.uint8(7)
    tensors["m.qzeros"] = gptq.bits.pack(fields, 3)
    np.testing.assert_array_equal(read(tensors, config("gptqmodel:7.0.0", 3)), quant.zero)


@pytest.mark.parametrize(("version", "ones"), [("5.8.0", ONES[4]), ("7.3.2", ONES[8])])
def test_matrices_of_another_width(version: str, ones: list[int]) -> None:
    """Up to 7.3.1 they lose the ones of the width that most have."""
    quant = asymmetric(8)
    said = config(f"gptqmodel:{version}", 4, dynamic={"+:^m$": {"bits": 8}})
    np.testing.assert_array_equal(read(stored(quant, ones), said), quant.zero)


@pytest.mark.parametrize("version", ["7.0.0", "7.3.1"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_matrices_of_another_width_where_most_have_three_bits(
    bits: int, symmetric: bool, version: str
) -> None:
    """From 7.0 to 7.3.1 each field of 3 bits in three words loses one, whatever is in them."""
    quant = random_quant(Scheme(bits, 32, symmetric), 192, 64)
    if not symmetric:
        quant.zero[::3] = 0
    tensors = gptq.pack("m", quant, Options("v2"))
    groups, count = tensors["m.qzeros"].shape
    for group in range(groups):
        for at in range(0, count, 3):
            three = tensors["m.qzeros"][group, at : at + 3].view("<u4").tolist()
            stream = three[0] | three[1] << 32 | three[2] << 64
            less = sum((((stream >> place) - 1) & 7) << place for place in range(0, 96, 3))
            words = [less >> place & 0xFFFFFFFF for place in (0, 32, 64)]
            tensors["m.qzeros"][group, at : at + 3] = np.array(words, np.uint32).view(np.int32)
    table = {"+:^m$": {"bits": bits}}
    said = config(f"gptqmodel:{version}", 3, sym=symmetric, dynamic=table)
    np.testing.assert_array_equal(read(tensors, said), quant.zero)
    fixed = config("gptqmodel:7.3.2", 3, sym=symmetric, dynamic=table)
    assert not np.array_equal(read(tensors, fixed), quant.zero)
    assert "ones of 3 bits" in str(gptq_zeros.said(detect(said)))
    assert "ones of 3 bits" not in str(gptq_zeros.said(detect(fixed)))


def test_words_that_do_not_come_in_threes() -> None:
    """GPTQModel 7.0 to 7.3.1 fails on these itself."""
    said = config("gptqmodel:7.1.0", 3, dynamic={"+:^m$": {"bits": 4}})
    with pytest.raises(FormatError, match="8 words of zeros, but GPTQModel takes ones of 3 bits"):
        read(gptq.pack("m", asymmetric(4), Options("v2")), said)


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_widths_in_planes(bits: int) -> None:
    """Whatever the label, GPTQModel lays these in planes, not in one stream."""
    quant = random_quant(Scheme(8, 32, True), 64, 64)
    quant.codes[:] &= 31
    tensors = gptq.pack("m", quant, Options("v2"))
    tensors["m.qweight"] = tensors["m.qweight"][: 64 * bits // 32]
    tensors["m.qzeros"] = tensors["m.qzeros"][:, : 64 * bits // 32]
    with pytest.raises(UnsupportedError, match=f"m: {bits} bits; .*planes"):
        read(tensors, config("gptqmodel:7.3.4", bits, checkpoint_format="gptq"))


def test_symmetric_zeros_tell_themselves() -> None:
    """Whoever the config names: read field by field they are in the middle."""
    quant = random_quant(Scheme(3, 32, True), 64, 64)
    for layout in ("v1", "v2"):
        tensors = gptq.pack("m", quant, Options(layout))
        zero = read(tensors, config("gptqmodel:6.0.3", 3, sym=True))
        np.testing.assert_array_equal(zero, quant.zero)


@pytest.mark.parametrize(
    "said",
    [
        {"meta": None},
        {"meta": {"quantizer": 3}},
        {"meta": {"quantizer": ["qtool:0.1.0", 7, None]}},
        {"meta": {"quantizer": "gptqmodel:"}},
        {"provider": ["auto-round"]},
    ],
)
def test_nobody_known(said: dict[str, Any]) -> None:
    assert gptq_zeros.writer_of({**other.GPTQ, "meta": None, **said}) is None


def skewed(module: str, weight: NDArray[np.float32]) -> other.Tensors:
    """A zero of 0 in a row of every matrix, all of whose weights are positive."""
    weight = weight.copy()
    weight[3] = np.abs(weight[3])
    groups = weight.reshape(len(weight), -1, 128)
    high, low = groups.max(axis=2), np.minimum(groups.min(axis=2), 0)
    scale = ((high - low) / 15).astype(np.float16)
    zero = np.clip(np.rint(-low / scale), 0, 15).astype(np.uint8)
    codes = np.clip(np.rint(groups / scale[..., None]) + zero[..., None], 0, 15).astype(np.uint8)
    quant = GroupQuant(Scheme(4, 128, False), codes.reshape(weight.shape), scale, zero)
    tensors = gptq.pack(module, quant, Options("v2"))
    words = less(tensors[f"{module}.qzeros"], ONES[4])
    kinds = {"scales": "F16"}
    return {
        name: (kinds.get(name.rpartition(".")[2], "I32"), words if "qzeros" in name else array)
        for name, array in tensors.items()
    }


def test_what_is_said_of_such_a_file(tmp_path: Path) -> None:
    said = {**other.GPTQ, "sym": False, "meta": {"quantizer": ["gptqmodel:5.8.0"]}}
    path = other.folder(tmp_path / "in", other.model(skewed), said)
    assert ("zeros", "as GPTQModel 5.8.0 stores them, ones taken from whole words") in inspect(
        path
    ).summary()
    (finding,) = (f for f in serious(path) if f.check == "zeros")
    assert finding.severity == "warning"
    assert "read as GPTQModel 5.8.0 means them" in finding.message
    assert "--to gptq-v2" in finding.message
    out = tmp_path / "out"
    converted(path, "gptq-v2", out)
    assert not [f for f in serious(out) if f.check == "zeros"]
