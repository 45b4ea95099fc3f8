"""The sweep over rows that become blocks of GGUF: output errors, inputs that were hardly seen."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool import native_gguf
from qtool.gguf.gptq.levels import SWEPT, together
from qtool.gguf_types import BY_NAME, BlockType
from qtool.methods import gptq
from qtool.quantizing.gguf.gptq import sweep
from support.kernels.hessians import hessian, trace_error


def factor(gram: NDArray[np.float32], type_: BlockType) -> gptq.Factor:
    return gptq.factor(gram, gptq.Options(), together=together(type_))


@pytest.mark.parametrize("name", sorted(SWEPT))
def test_the_sweep_lowers_the_error_of_outputs(name: str) -> None:
    """Against the encoder alone, with the same importance and without."""
    type_, width = BY_NAME[name], 512
    gram = hessian(width, seed=3)
    weight = np.random.default_rng(3).standard_normal((64, width), np.float32)
    seen = gram.astype(np.float32)
    given = sweep.swept(np.diagonal(seen), factor(seen, type_))
    swept = native_gguf.dequantize(sweep.blocks_of(weight, type_, given), type_, width)

    def lost(back: NDArray[np.float32]) -> float:
        return trace_error(weight.astype(np.float64), back, gram)

    flat = np.ones(width, np.float32) if type_.needs_importance else None
    for importance in (flat, np.diagonal(gram).astype(np.float32).copy()):
        plain = native_gguf.encode(weight, type_, importance)
        assert lost(swept) < 0.85 * lost(native_gguf.dequantize(plain, type_, width))


def test_an_input_that_was_hardly_seen_weighs_as_llama_quantize_has_it() -> None:
    square = np.random.default_rng(4).random(256, np.float32)
    weight = np.random.default_rng(5).standard_normal((4, 256), np.float32)
    for count, importance in ((60, square / np.float32(60)), (0, np.ones(256, np.float32))):
        np.testing.assert_array_equal(
            sweep.blocks_of(weight, BY_NAME["Q2_K"], sweep.unswept(square, count)),
            native_gguf.encode(weight, BY_NAME["Q2_K"], importance),
        )


@pytest.mark.parametrize(
    "name", ["Q2_K", "Q4_0", "Q4_K", "IQ4_XS", "IQ1_S", "IQ1_M", "IQ2_XS", "IQ3_XXS"]
)
@pytest.mark.parametrize("dead", [slice(0, 256), slice(None)])
def test_inputs_that_are_always_zero_cost_nothing(name: str, dead: slice) -> None:
    """Weights of channels that nothing comes through are stored as the encoder would."""
    weight = np.random.default_rng(6).standard_normal((8, 512), np.float32)
    gram = hessian(512, seed=6).astype(np.float32)
    gram[dead] = gram[:, dead] = 0
    given = sweep.swept(np.diagonal(gram), factor(gram, BY_NAME[name]))
    made = sweep.blocks_of(weight, BY_NAME[name], given)
    back = native_gguf.dequantize(made, BY_NAME[name], 512)
    flat = np.ones(512, np.float32) if BY_NAME[name].needs_importance else None
    plain = native_gguf.encode(weight, BY_NAME[name], flat)
    usual = native_gguf.dequantize(plain, BY_NAME[name], 512)
    off, least = (np.square(one - weight)[:, dead].mean() for one in (back, usual))
    assert off < 1.3 * least


@pytest.mark.parametrize("name", ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_inputs_that_are_always_zero_take_nothing_from_their_neighbours(name: str) -> None:
    """Where they are scattered, a unit's point is nearly what it is if their errors are free."""
    type_, width = BY_NAME[name], 512
    weight = np.random.default_rng(7).standard_normal((32, width), np.float32)
    dead = np.random.default_rng(8).random(width) < 0.4
    gram = hessian(width, seed=7).astype(np.float32)
    gram[dead] = gram[:, dead] = 0
    found = factor(gram, type_)
    upper, at = np.array(found.upper), np.flatnonzero(dead[found.order])
    upper[at, at] = 1000

    def lost(given: gptq.Factor) -> float:
        made = sweep.blocks_of(weight, type_, sweep.swept(np.diagonal(gram), given))
        back = native_gguf.dequantize(made, type_, width)
        return trace_error(weight.astype(np.float64), back, gram.astype(np.float64))

    assert lost(found) < 1.1 * lost(replace(found, upper=upper))
