"""Weights to blocks of GGUF in C: the bytes that ggml makes, on every instruction set.

The digests are of ggml's own output (tests/oracle/ggml_digests.py); tests/oracle/test_ggml.py
compares more weights with the library itself.
"""

import json
from hashlib import sha256

import gguf
import numpy as np
import pytest

from qtool import native, native_gguf
from qtool.errors import FormatError
from qtool.gguf_types import BY_NAME
from support.kernels import gguf_data
from support.kernels.isas import isa_restored
from support.places import SUPPORT

__all__ = ["isa_restored"]

DIGESTS: dict[str, dict[str, list[str]]] = json.loads(
    (SUPPORT / "kernels" / "gguf_digests.json").read_text()
)


def test_every_type_has_digests() -> None:
    assert set(DIGESTS) == set(BY_NAME)
    for name, digests in DIGESTS.items():
        without = set() if BY_NAME[name].needs_importance else {"none"}
        assert set(digests) == set(gguf_data.IMPORTANCE) - {"none"} | without


@pytest.mark.parametrize("name", list(BY_NAME))
def test_bytes_are_those_of_ggml_on_every_instruction_set(name: str) -> None:
    kinds = {kind: gguf_data.digested(kind) for kind in gguf_data.DIGESTED}
    for importance, (expected, defined) in DIGESTS[name].items():
        factors = gguf_data.importance(importance, 1280)
        for isa in native.available():
            native.select(isa)
            digest = sha256()
            for kind in defined.split(","):  # ggml aborts on the others
                blocks = native_gguf.encode(kinds[kind], BY_NAME[name], factors)
                digest.update(blocks.tobytes())
            assert digest.hexdigest()[:32] == expected, (name, importance, isa)


@pytest.mark.parametrize(
    "name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]
)
@pytest.mark.parametrize("kind", ["bell", "heavy", "positive", "zero"])
def test_bytes_are_those_of_the_package_gguf(name: str, kind: str) -> None:
    weight = gguf_data.weights(kind, 40, 512, seed=5)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(native_gguf.encode(weight, BY_NAME[name]), theirs)


def test_scales_of_the_largest_numbers() -> None:
    """Just below 2^128, the logarithm of some rounds up to 128 (in float32, as ggml takes it)."""
    bits = 0x7F7FFFFF - np.array([0, 42, 43, 44, 60, 87, 88, 200], np.uint32)
    weight = bits.view(np.float32).repeat(32).reshape(8, 32)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.MXFP4)
    assert len(set(theirs[:, 0].tolist())) == 2
    for isa in native.available():
        native.select(isa)
        ours = native_gguf.encode(weight, BY_NAME["MXFP4"])
        np.testing.assert_array_equal(ours[:, 0], theirs[:, 0], isa)


@pytest.mark.parametrize("name", list(BY_NAME))
def test_rows_and_threads_are_independent(name: str) -> None:
    block = BY_NAME[name]
    weight = gguf_data.weights("heavy", 70, 256)
    factors = gguf_data.importance("spread", 256)
    whole = native_gguf.encode(weight, block, factors, threads=1)
    np.testing.assert_array_equal(native_gguf.encode(weight, block, factors, threads=3), whole)
    row = native_gguf.encode(weight[33:34].copy(), block, factors)
    np.testing.assert_array_equal(row, whole[33:34])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_blocks_are_the_same_in_pairs_and_alone(name: str) -> None:
    """Rows of one block and of two, whose mean squares are the same and exact."""
    block = BY_NAME[name]
    size = np.random.default_rng(3).integers(0, 9, (40, 1, 32))
    sign = np.random.default_rng(4).choice([-1, 1], (40, 2, 32))
    weight = (size * sign / 8).astype(np.float32)
    factors = gguf_data.importance("spread", 64)
    assert factors is not None
    for isa in native.available():
        native.select(isa)
        pairs = native_gguf.encode(weight.reshape(40, 64), block, factors).reshape(40, 2, -1)
        for u in range(2):
            part = np.ascontiguousarray(weight[:, u])
            alone = native_gguf.encode(part, block, factors[32 * u : 32 * u + 32].copy())
            np.testing.assert_array_equal(pairs[:, u], alone)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "IQ4_XS", "Q8_0"])
def test_encoding_what_blocks_stand_for_loses_little(name: str) -> None:
    block = BY_NAME[name]
    weight = gguf_data.weights("bell", 16, 1024)
    error = native_gguf.dequantize(native_gguf.encode(weight, block), block, 1024) - weight
    relative = float(np.sqrt((error**2).mean() / (weight**2).mean()))
    # The published table of ggml on normal weights, rounded up.
    assert relative < {"Q4_K": 0.08, "Q6_K": 0.02, "IQ4_XS": 0.08, "Q8_0": 0.006}[name]


def test_refusals() -> None:
    weight = np.zeros((2, 256), np.float32)
    with pytest.raises(ValueError, match="IQ2_XXS needs importance weights"):
        native_gguf.encode(weight, BY_NAME["IQ2_XXS"])
    with pytest.raises(ValueError, match="importance has shape"):
        native_gguf.encode(weight, BY_NAME["Q4_K"], np.ones(255, np.float32))
    with pytest.raises(FormatError, match="blocks of 256 weights, and 64 is not a multiple"):
        native_gguf.encode(weight[:, :64].copy(), BY_NAME["Q4_K"])
    with pytest.raises(TypeError, match="weight is float64, expected float32"):
        native_gguf.encode(weight.astype(np.float64), BY_NAME["Q4_K"])  # type: ignore[arg-type]
