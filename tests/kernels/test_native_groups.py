"""Rounding group by group in C against the equations of qtool.grid in numpy and plain loops."""

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool import native
from qtool.scheme import Scheme
from support.kernels.isas import isa_restored
from support.methods import integer_grids

__all__ = ["isa_restored"]

Floats = NDArray[np.float32]


def weights(rows: int, columns: int) -> Floats:
    """Heavy-tailed rows, one of zeros, one tiny, one of a single sign."""
    w = np.random.default_rng(rows).standard_t(3, (rows, columns)).astype(np.float32)
    w[0] = 0
    w[1] *= np.float32(1e-8)
    w[2] = np.abs(w[2])
    return w


def reach_of(bits: int) -> float:
    return 2.0 ** (bits - 1) if bits <= 4 else 2.0 ** (bits - 1) - 0.5


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns", "group_size"), [(40, 96, 32), (5, 50, -1), (33, 70, 32)]
)
def test_round_to_nearest_equals_numpy(
    bits: int, symmetric: bool, rows: int, columns: int, group_size: int
) -> None:
    w = weights(rows, columns)
    scheme = Scheme(bits, group_size, symmetric)
    expected = integer_grids.rounded(w, integer_grids.fit(w, scheme), scheme)
    found = native.quantize_groups(
        w,
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        reach=reach_of(bits) if symmetric else None,
        dequantize=True,
    )
    np.testing.assert_array_equal(found.scale, expected.scale)
    np.testing.assert_array_equal(found.zero, expected.zero)
    np.testing.assert_array_equal(found.codes, expected.codes)
    np.testing.assert_array_equal(found.dequantized, expected.dequantize())


def test_given_scales_only_round() -> None:
    w = weights(6, 64)
    scale = np.full((6, 2), 0.125, np.float32)
    zero = np.arange(12, dtype=np.uint8).reshape(6, 2)
    found = native.quantize_groups(w, bits=4, group_size=32, symmetric=False, given=(scale, zero))
    wide = np.repeat(zero, 32, axis=1)
    expected = np.clip(np.round(w / np.float32(0.125)) + wide, 0, 15)
    np.testing.assert_array_equal(found.codes, expected)
    np.testing.assert_array_equal(found.scale, scale)


@pytest.mark.parametrize("symmetric", [True, False])
def test_importance_search_finds_the_least_error(symmetric: bool) -> None:
    w = weights(40, 96)
    importance = np.exp(np.random.default_rng(1).standard_normal(96)).astype(np.float32)
    scheme = Scheme(3, 32, symmetric)
    found = native.quantize_groups(
        w,
        bits=3,
        group_size=32,
        symmetric=symmetric,
        reach=4.0 if symmetric else None,
        search=native.RangeSearch(),
        importance=importance,
        dequantize=True,
    )

    def error(dequantized: Floats) -> NDArray[np.float64]:
        squares = (w.astype(np.float64) - dequantized) ** 2 * importance
        return squares.reshape(40, 3, 32).sum(-1)

    assert found.dequantized is not None
    grids = integer_grids.clipped(w, scheme)
    tried = np.stack([error(integer_grids.rounded(w, g, scheme).dequantize()) for g in grids])
    best = np.argmin(tried, axis=0)[None]
    scale, zero = (
        np.take_along_axis(np.stack(one), best, 0)[0] for one in zip(*grids, strict=True)
    )
    assert np.mean((scale == found.scale) & (zero == found.zero)) > 0.97
    expected = tried.min(axis=0)
    np.testing.assert_allclose(error(found.dequantized), expected, rtol=1e-5)
    assert np.mean(expected < tried[0]) > 0.5


@pytest.mark.parametrize(("columns", "group_size"), [(96, 32), (80, 32), (45, -1)])
def test_gram_search_finds_the_least_output_error(columns: int, group_size: int) -> None:
    w = weights(35, columns)
    size = columns if group_size == -1 else group_size
    groups = -(-columns // size)
    rng = np.random.default_rng(2)
    x = rng.standard_normal((200, columns)) @ rng.standard_normal((columns, columns))
    h = (x.T @ x / 200).astype(np.float32)
    blocks = np.full((groups, size, size), np.nan, np.float32)  # padding must not be read
    for g in range(groups):
        part = h[g * size : (g + 1) * size, g * size : (g + 1) * size]
        blocks[g, : len(part), : len(part)] = part
    search = native.RangeSearch()
    options = {"bits": 3, "group_size": group_size, "symmetric": False, "dequantize": True}
    found = native.quantize_groups(w, search=search, gram=blocks, **options)  # type: ignore[arg-type]
    scheme = Scheme(3, group_size, False)
    tried = (integer_grids.rounded(w, g, scheme) for g in integer_grids.clipped(w, scheme))
    trials = [output_error(w, quant.dequantize(), blocks, size) for quant in tried]
    assert found.dequantized is not None
    least = np.min(trials, axis=0)
    np.testing.assert_allclose(output_error(w, found.dequantized, blocks, size), least, rtol=1e-4)
    assert np.mean(least < trials[0]) > 0.5


def output_error(w: Floats, dequantized: Floats, blocks: Floats, size: int) -> NDArray[np.float64]:
    """e'He of each row and group, [out, groups], in float64."""
    e = w.astype(np.float64) - dequantized
    parts = []
    for g, block in enumerate(blocks):
        part = e[:, g * size : (g + 1) * size]
        width = part.shape[1]
        parts.append(np.einsum("ri,ij,rj->r", part, block[:width, :width].astype(float), part))
    return np.stack(parts, axis=1)


@pytest.mark.parametrize("kind", ["range", "importance", "norm", "gram"])
def test_same_bits_on_every_instruction_set_and_thread_count(kind: str, isa_restored: None) -> None:
    w = weights(77, 100)
    rng = np.random.default_rng(3)
    a = rng.standard_normal((4, 32, 32)).astype(np.float32)
    options: dict[str, object] = {
        "range": {},
        "importance": {
            "search": native.RangeSearch(),
            "importance": rng.random(100, dtype=np.float32),
        },
        "norm": {"search": native.RangeSearch(norm=2.4)},
        "gram": {"search": native.RangeSearch(), "gram": a @ a.transpose(0, 2, 1)},
    }[kind]
    results = []
    for isa in native.available():
        native.select(isa)
        results += [
            native.quantize_groups(
                w,
                bits=4,
                group_size=32,
                symmetric=False,
                threads=threads,
                dequantize=True,
                **options,  # type: ignore[arg-type]
            )
            for threads in (1, 3)
        ]
    for other in results[1:]:
        for field in ("codes", "scale", "zero", "dequantized"):
            np.testing.assert_array_equal(getattr(other, field), getattr(results[0], field))


def test_bad_arguments_are_refused() -> None:
    w = np.zeros((4, 8), np.float32)

    def call(**more: object) -> None:
        options: dict[str, object] = {"bits": 4, "group_size": 4, "symmetric": False, **more}
        native.quantize_groups(w, **options)  # type: ignore[arg-type]

    call()
    with pytest.raises(ValueError, match=r"gram has shape \(2, 4, 5\), expected \(2, 4, 4\)"):
        call(gram=np.zeros((2, 4, 5), np.float32), search=native.RangeSearch())
    with pytest.raises(ValueError, match="gram needs a search"):
        call(gram=np.zeros((2, 4, 4), np.float32))
    with pytest.raises(TypeError, match="importance is float64"):
        call(importance=np.zeros(8))
    with pytest.raises(ValueError, match="ratios are"):
        call(search=native.RangeSearch((1.0, 0.0)))
    with pytest.raises(ValueError, match=r"reach is 9\.0, expected 7\.0 to 8\.0"):
        call(reach=9.0)
    with pytest.raises(ValueError, match="at least one element"):
        native.quantize_groups(np.zeros((0, 4), np.float32), bits=4, group_size=4, symmetric=True)
