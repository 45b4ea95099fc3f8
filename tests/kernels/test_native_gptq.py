"""The GPTQ column sweep against a float64 loop that recomputes the inverse at every step."""

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool import native
from qtool.errors import UnsupportedError
from support.kernels.hessians import Floats, factor, hessian, trace_error
from support.kernels.isas import isa_restored

__all__ = ["isa_restored"]


def group_parameters(w: Floats, bits: int, symmetric: bool) -> tuple[Floats, Floats]:
    """Scale and zero of each row of a group [out, columns], by the definition."""
    low, high = np.minimum(w.min(1), 0), np.maximum(w.max(1), 0)
    span = 2 * np.maximum(high, -low) if symmetric else high - low
    scale = np.where(span == 0, 1, span / (2**bits - 1)).astype(np.float16)
    scale64 = np.maximum(scale, np.float16(2**-24)).astype(np.float64)
    zero = np.full(len(w), 2.0 ** (bits - 1))
    if not symmetric:
        zero = np.minimum(np.round(-low / scale64), 2**bits - 1)
    return scale64, zero


def oracle(
    w: Floats,
    h: Floats,
    bits: int,
    group_size: int,
    symmetric: bool,
    order: NDArray[np.int32] | None = None,
    static_groups: bool = False,
) -> tuple[NDArray[np.uint8], Floats, Floats]:
    """Optimal brain quantization in a fixed order: the inverse of what remains, at each step."""
    columns = w.shape[1]
    size = columns if group_size == -1 else group_size
    steps = np.arange(columns) if order is None else order
    by_column = static_groups or order is None
    w = w.copy()
    codes = np.zeros(w.shape, np.uint8)
    groups = -(-columns // size)
    scale, zero = np.zeros((len(w), groups)), np.zeros((len(w), groups))
    if static_groups:
        for g in range(groups):
            part = w[:, g * size : (g + 1) * size]
            scale[:, g], zero[:, g] = group_parameters(part, bits, symmetric)
    for i, column in enumerate(steps):
        g = (column if by_column else i) // size
        if not static_groups and i % size == 0:
            members = steps[i : i + size]
            scale[:, g], zero[:, g] = group_parameters(w[:, members], bits, symmetric)
        rest = steps[i:]
        inverse = np.linalg.inv(h[np.ix_(rest, rest)])
        q = np.clip(np.round(w[:, column] / scale[:, g]) + zero[:, g], 0, 2**bits - 1)
        codes[:, column] = q
        error = w[:, column] - (q - zero[:, g]) * scale[:, g]
        w[:, rest] -= np.outer(error / inverse[0, 0], inverse[0])
    return codes, scale, zero


def run(
    w: Floats,
    h: Floats,
    bits: int,
    group_size: int,
    symmetric: bool,
    order: NDArray[np.int32] | None = None,
    static_groups: bool = False,
    dtype: type = np.float64,
    threads: int = 1,
    search: native.RangeSearch | None = None,
) -> native.Sweep:
    permuted = h if order is None else h[np.ix_(order, order)]
    return native.gptq_sweep(
        w.astype(dtype),
        factor(permuted).astype(dtype),
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        order=order,
        static_groups=static_groups,
        search=search,
        threads=threads,
    )


def output_error(w: Floats, h: Floats, sweep: native.Sweep, group_size: int) -> float:
    """tr(E H E') of the dequantized result."""
    columns = w.shape[1]
    size = columns if group_size == -1 else group_size
    index = np.arange(columns) // size if sweep.g_idx is None else sweep.g_idx
    dq = (sweep.codes.astype(np.float64) - sweep.zero[:, index]) * sweep.scale[:, index]
    return trace_error(w, dq, h)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [16, -1])
@pytest.mark.parametrize("ordered", ["no", "dynamic", "static"])
def test_float64_equals_the_oracle(
    bits: int, symmetric: bool, group_size: int, ordered: str
) -> None:
    w = np.random.default_rng(bits).standard_normal((64, 64))
    h = hessian(64, seed=7)
    order = None if ordered == "no" else np.argsort(-np.diag(h), kind="stable").astype(np.int32)
    static = ordered == "static"
    sweep = run(w, h, bits, group_size, symmetric, order, static)
    codes, scale, zero = oracle(w, h, bits, group_size, symmetric, order, static)
    np.testing.assert_array_equal(sweep.codes, codes)
    np.testing.assert_array_equal(sweep.scale, scale)
    np.testing.assert_array_equal(sweep.zero, zero)


@pytest.mark.parametrize(
    ("rows", "columns", "group_size"), [(5, 300, 32), (33, 300, 150), (1, 7, 3), (70, 257, -1)]
)
def test_odd_shapes_equal_the_oracle(rows: int, columns: int, group_size: int) -> None:
    """Rows that fill no panel, columns that fill no tile or block, groups longer than a block."""
    w = np.random.default_rng(rows).standard_normal((rows, columns))
    h = hessian(columns, seed=3)
    sweep = run(w, h, 4, group_size, False)
    codes, scale, zero = oracle(w, h, 4, group_size, False)
    np.testing.assert_array_equal(sweep.codes, codes)
    np.testing.assert_array_equal(sweep.scale, scale)
    np.testing.assert_array_equal(sweep.zero, zero)


def test_float32_hardly_differs_from_float64() -> None:
    w = np.random.default_rng(0).standard_normal((128, 512)) * 0.02
    h = hessian(512, seed=1)
    single = run(w, h, 4, 128, True, dtype=np.float32)
    double = run(w.astype(np.float32).astype(np.float64), h, 4, 128, True)
    assert np.mean(single.codes != double.codes) <= 1e-3
    expected = output_error(w, h, double, 128)
    assert abs(output_error(w, h, single, 128) / expected - 1) < 1e-4
    assert abs(float(single.loss.sum()) / expected - 1) < 1e-3  # loss is that error, summed


def test_loss_is_the_output_error_of_each_row() -> None:
    w = np.random.default_rng(0).standard_normal((9, 96))
    h = hessian(96, seed=2)
    sweep = run(w, h, 3, 32, False)
    index = np.arange(96) // 32
    e = w - (sweep.codes.astype(np.float64) - sweep.zero[:, index]) * sweep.scale[:, index]
    np.testing.assert_allclose(sweep.loss, np.einsum("ri,ij,rj->r", e, h, e), rtol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_same_bits_on_every_instruction_set_and_thread_count(
    dtype: type, isa_restored: None
) -> None:
    w = np.random.default_rng(5).standard_normal((75, 290))
    h = hessian(290, seed=5)
    order = np.random.default_rng(6).permutation(290).astype(np.int32)
    search = native.RangeSearch(norm=2.4)
    results = []
    for isa in native.available():
        native.select(isa)
        results += [
            run(w, h, 4, 32, False, order, False, dtype, threads, search) for threads in (1, 2, 3)
        ]
    for other in results[1:]:
        for field in ("codes", "scale", "zero", "loss"):
            np.testing.assert_array_equal(getattr(other, field), getattr(results[0], field))


def test_search_finds_the_least_error_of_its_grid() -> None:
    """One group a row and an identity Hessian, where the sweep is plain rounding."""
    rng = np.random.default_rng(8)
    w = rng.standard_t(3, (40, 64))
    ratios = tuple(1 - step / 50 for step in range(40))
    search = native.RangeSearch(ratios, norm=2.4)
    sweep = run(w, np.eye(64), 3, -1, True, search=search)
    errors = []
    for ratio in ratios:
        scale, zero = group_parameters(w * ratio, 3, True)
        q = np.clip(np.round(w / scale[:, None]) + zero[:, None], 0, 7)
        errors.append((np.abs(w - (q - zero[:, None]) * scale[:, None]) ** 2.4).sum(1))
    dq = (sweep.codes - sweep.zero.astype(np.float64)) * sweep.scale
    found = (np.abs(w - dq) ** 2.4).sum(1)
    np.testing.assert_allclose(found, np.min(errors, axis=0), rtol=1e-4)
    assert np.mean(found < errors[0]) > 0.5


def test_given_scales_are_used_as_they_are() -> None:
    w = np.random.default_rng(1).standard_normal((6, 64))
    h = hessian(64, seed=1)
    scale = np.full((6, 2), 0.25)
    zero = np.full((6, 2), 5, np.uint8)
    sweep = native.gptq_sweep(
        w, factor(h), bits=4, group_size=32, symmetric=False, given=(scale, zero)
    )
    assert np.all(sweep.scale == 0.25) and np.all(sweep.zero == 5)
    assert sweep.codes[0, 0] == np.clip(np.round(w[0, 0] / 0.25) + 5, 0, 15)


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_tiny_and_huge_groups_have_usable_scales(symmetric: bool) -> None:
    w = np.zeros((4, 32), np.float32)
    w[1] = 1e-9
    w[2] = -3e6
    w[3, 5] = 1e-40
    identity = np.eye(32, dtype=np.float32)
    sweep = native.gptq_sweep(w, identity, bits=4, group_size=32, symmetric=symmetric)
    assert np.all(np.isfinite(sweep.scale)) and np.all(sweep.scale > 0)
    assert sweep.scale[0, 0] == 1
    assert np.all(sweep.codes[0] == sweep.zero[0])


def test_bad_arguments_are_refused() -> None:
    w, u = np.zeros((4, 8), np.float32), np.eye(8, dtype=np.float32)

    def sweep(
        weight: NDArray[np.float32] = w, hinv: NDArray[np.float32] = u, **more: object
    ) -> None:
        options: dict[str, object] = {"bits": 4, "group_size": 4, "symmetric": True, **more}
        native.gptq_sweep(weight, hinv, **options)  # type: ignore[arg-type]

    sweep()
    with pytest.raises(ValueError, match=r"hinv_upper has shape \(7, 8\), expected \(8, 8\)"):
        sweep(hinv=u[:7])
    with pytest.raises(TypeError, match="weight is float16"):
        sweep(weight=w.astype(np.float16))
    with pytest.raises(TypeError, match="hinv_upper is float64, expected float32"):
        sweep(hinv=u.astype(np.float64))
    with pytest.raises(ValueError, match="weight is not contiguous"):
        sweep(weight=np.zeros((4, 16), np.float32)[:, ::2])
    with pytest.raises(ValueError, match="bits is 9"):
        sweep(bits=9)
    with pytest.raises(ValueError, match="group_size is 0"):
        sweep(group_size=0)
    with pytest.raises(ValueError, match="not a permutation"):
        sweep(order=np.zeros(8, np.int32))
    with pytest.raises(ValueError, match="scale_dtype is 'float8'"):
        sweep(scale_dtype="float8")
    with pytest.raises(ValueError, match="given zero is 16"):
        sweep(given=(np.ones((4, 2), np.float32), np.full((4, 2), 16, np.uint8)))


def test_an_absent_instruction_set_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'mmx' is not available here; this machine has sc"):
        native.select("mmx")
