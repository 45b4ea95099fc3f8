"""Inputs that engines round: the arithmetic against its definition."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qtool.float_codes import TABLES
from qtool.gguf_types import TENSOR_TYPES
from qtool.methods import activations
from qtool.quality.engine_inputs import of_block_type
from qtool.quality.rounded_inputs import RoundedInputs
from qtool.streaming.online_rotation import rotated

Function = Callable[[np.ndarray], np.ndarray]


def inputs(seed: int = 0) -> np.ndarray:
    """Rows of very different sizes, zeros among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((7, 512)) * np.exp2(rng.integers(-12, 9, (7, 1)))
    x[2, :256] = 0
    x[3] = 0
    x[4, 100] = 1e4
    return x.astype(np.float32)


def by_blocks(x: np.ndarray, size: int, half: bool) -> np.ndarray:
    """q8 as defined, block after block, in float64; NaN where the code is near a tie."""
    out = np.empty(x.shape)
    blocks = x.astype(np.float64).reshape(-1, size)
    for row, values in zip(out.reshape(-1, size), blocks, strict=True):
        most = np.abs(values).max()
        step = np.float64(np.float16(most / 127)) if half else most / 127
        exact = values * (127 / most) if most else values
        row[:] = np.where(np.abs(exact % 1 - 0.5) < 1e-4, np.nan, np.rint(exact) * step)
    return out


@pytest.mark.parametrize(
    ("function", "size", "half"),
    [(activations.q8_of_256, 256, False), (activations.q8_of_32, 32, True)],
)
def test_q8_is_its_definition(
    function: Callable[[torch.Tensor], torch.Tensor], size: int, half: bool
) -> None:
    x = inputs()
    found = function(torch.from_numpy(x)).double().numpy()
    expected = by_blocks(x, size, half)
    near = np.isnan(expected)
    assert near.mean() < 1e-2
    np.testing.assert_allclose(found[~near], expected[~near], rtol=3e-7)
    step = np.repeat(np.abs(x.reshape(7, -1, size)).max(-1) / 127, size, 1)
    # Scales of float16, too, some of them subnormal.
    of_scale = half * (np.abs(x) * 2**-11 + 127 * 2**-25)
    assert (np.abs(found - x) <= step * 0.501 + of_scale).all()


def test_floats() -> None:
    x = inputs()
    found = activations.half(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(found, x.astype(np.float16).astype(np.float32))
    bits = x.view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    expected = (bits << np.uint64(16)).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(activations.brain(torch.from_numpy(x)).numpy(), expected)


def nearest(values: np.ndarray, book: str) -> np.ndarray:
    """Of the finite numbers of a code book; NaN where two are about as near."""
    numbers = np.unique(TABLES[book][np.isfinite(TABLES[book])].astype(np.float64))
    place = np.clip(np.searchsorted(numbers, values), 1, len(numbers) - 1)
    low, high = numbers[place - 1], numbers[place]
    to_low, to_high = np.abs(values - low), np.abs(high - values)
    tie = np.abs(to_low - to_high) < 1e-4 * (high - low)
    return np.where(tie, np.nan, np.where(to_low < to_high, low, high))


def by_runs(x: np.ndarray, size: int, function: Function) -> np.ndarray:
    """function of each run, in float64."""
    runs = x.astype(np.float64).reshape(-1, x.shape[-1] if size < 0 else size)
    return np.stack([function(run) for run in runs]).reshape(x.shape)


def rint(values: np.ndarray) -> np.ndarray:
    """NaN near a tie."""
    return np.where(np.abs(values % 1 - 0.5) < 1e-4, np.nan, np.rint(values))


def symmetric(run: np.ndarray) -> np.ndarray:
    scale = np.abs(run).max() / 127
    return rint(run / scale) * scale if scale else run


def asymmetric(run: np.ndarray) -> np.ndarray:
    low, high = min(run.min(), 0), max(run.max(), 0)
    if low == high:
        return run
    scale = (high - low) / 255
    zero = rint(-128 - low / scale)
    return (np.clip(rint(run / scale) + zero, -128, 127) - zero) * scale


def float8(run: np.ndarray) -> np.ndarray:
    scale = np.abs(run).max() / 448
    return nearest(run / scale, "e4m3") * scale if scale else run


def mx(book: str) -> Function:
    def rounded(run: np.ndarray) -> np.ndarray:
        if not run.any():
            return run
        most = {"e4m3": 8, "e2m1": 2}[book]
        largest = TABLES[book][np.isfinite(TABLES[book])].max()
        scale = 2.0 ** (np.floor(np.log2(np.abs(run).max() * 8 / 7)) - most)
        return nearest(np.clip(run / scale, -largest, largest), book) * scale

    return rounded


def nv(run: np.ndarray) -> np.ndarray:
    if not run.any():
        return run
    scale = nearest(np.abs(run).max() / 6 * 0.5, "e4m3") / 0.5
    return nearest(np.clip(run / scale, -6, 6), "e2m1") * scale


@pytest.mark.parametrize(
    ("rounding", "size", "function"),
    [
        (activations.integers(8, -1, True), -1, symmetric),
        (activations.integers(8, 128, True), 128, symmetric),
        (activations.integers(8, -1, False), -1, asymmetric),
        (activations.fp8(-1), -1, float8),
        (activations.fp8(128), 128, float8),
        (activations.microscaling(8), 32, mx("e4m3")),
        (activations.microscaling(4), 32, mx("e2m1")),
        (activations.nvfp4(0.5), 16, nv),
    ],
    ids=["int8", "int8-group", "int8-asymmetric", "fp8", "fp8-group", "mxfp8", "mxfp4", "nvfp4"],
)
def test_roundings_are_their_definitions(
    rounding: activations.Rounding, size: int, function: Function
) -> None:
    x = inputs(1)[:, :256]
    x[5] = np.abs(x[5])
    if function is nv:
        x = np.clip(x, -500, 500) * (np.abs(x) > 0.02)  # within float8 scales
    found = rounding.apply(torch.from_numpy(x)).double().numpy()
    expected = by_runs(x, size, function)
    near = np.isnan(expected)
    assert near.mean() < 0.05
    np.testing.assert_allclose(found[~near], expected[~near], rtol=2e-6, atol=1e-12)
    assert np.isfinite(found).all() and len(np.unique(found)) > 30


def test_roundings_with_stored_scales() -> None:
    x = inputs(2)
    wide = x.astype(np.float64)
    for rounding, expected in (
        (activations.stored_integers(8, 0.25, 0), np.clip(rint(wide / 0.25), -128, 127) / 4),
        (
            activations.stored_integers(8, 0.25, -7),
            (np.clip(rint(wide / 0.25) - 7, -128, 127) + 7) / 4,
        ),
        (activations.stored_fp8(0.5), nearest(np.clip(wide / 0.5, -448, 448), "e4m3") / 2),
    ):
        found = rounding.apply(torch.from_numpy(x)).double().numpy()
        near = np.isnan(expected)
        assert near.mean() < 0.05
        np.testing.assert_array_equal(found[~near], expected[~near])


class Divisions(TorchDispatchMode):
    """Within, nothing on the meta device is divided by a number that is elsewhere."""

    count = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            assert args[0].device.type == "meta" or args[0].ndim == 0
            assert isinstance(args[1], torch.Tensor) and args[1].device.type == "meta", args
            Divisions.count += 1
        return func(*args, **(kwargs or {}))


ALL = [activations.integers(8, size, symmetric) for size in (-1, 32) for symmetric in (0, 1)]
ALL += [activations.whole_together(8), activations.fp8_together(), activations.fp8(-1)]
ALL += [activations.stored_integers(8, 0.3, 1.0), activations.stored_fp8(0.3)]
ALL += [activations.nvfp4(0.3), activations.microscaling(8), activations.microscaling(4)]
ALL += [activations.llm_int8(6.0), activations.kept_as_it_comes(4), activations.Q8_OF_32]
ALL += [activations.kept_of_heads(8, kind, (0.3,)) for kind in ("float", "int")]
ALL += [activations.Q8_OF_256, activations.Rounding("rotated", lambda x: rotated(x, 8))]


@pytest.mark.parametrize("rounding", ALL, ids=lambda rounding: rounding.name)
def test_a_gpu_divides_as_the_cpu_does(rounding: activations.Rounding) -> None:
    """On a GPU torch multiplies by the rounded reciprocal of a divisor that is not there."""
    before = Divisions.count
    with Divisions():
        rounding.apply(torch.empty(2, 3, 256, device="meta"))
    assert Divisions.count > before


def test_which_block_types() -> None:
    """As the table of ggml-cpu.c says."""
    name_of = {
        (activations.Q8_OF_256.apply): "Q8_K",
        (activations.Q8_OF_32.apply): "Q8_0",
        (activations.F16.apply): "F16",
        (activations.BF16.apply): "BF16",
    }
    known = {type_.name: type_ for type_ in TENSOR_TYPES.values()}
    for names, expected in (
        ("Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL MXFP4 NVFP4 Q1_0 Q2_0", "Q8_0"),
        ("Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS IQ3_S IQ2_XXS IQ1_M TQ1_0 TQ2_0", "Q8_K"),
        ("F16", "F16"),
        ("BF16", "BF16"),
    ):
        for name in names.split():
            rounding = of_block_type(known[name])
            assert rounding is not None and name_of[rounding.apply] == expected
    assert of_block_type(known["F32"]) is None


@pytest.mark.parametrize("how", ["linear", "matmul", "at", "addmm", "slice"])
def test_every_way_to_multiply(how: str) -> None:
    """Only what meets the known matrix is rounded."""
    x, weight = torch.randn(5, 64), torch.randn(32, 64)
    other, bias = torch.randn(32, 64), torch.randn(32)
    expected = activations.half(x) @ weight.t()
    mode = RoundedInputs(
        lambda w: activations.F16 if w.data_ptr() == weight.data_ptr() else None, None
    )
    stack = torch.stack([other, weight])
    if how == "slice":
        weight = stack[1]
    with mode:
        found = {
            "linear": lambda: torch.nn.functional.linear(x, weight),
            "slice": lambda: torch.nn.functional.linear(x, stack[1]),
            "matmul": lambda: torch.matmul(x, weight.t()),
            "at": lambda: x @ weight.t(),
            "addmm": lambda: torch.addmm(bias, x, weight.t()) - bias,
        }[how]()
        untouched = torch.nn.functional.linear(x, other)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-5)
    assert not torch.equal(x, activations.half(x))
    assert torch.equal(untouched, torch.nn.functional.linear(x, other))


def test_an_input_that_changes_is_rounded_anew() -> None:
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    with RoundedInputs(lambda _: activations.F16, None):
        torch.nn.functional.linear(x, weight)
        x.mul_(3)
        found = torch.nn.functional.linear(x, weight)
    assert torch.equal(found, torch.nn.functional.linear(activations.half(x), weight))
