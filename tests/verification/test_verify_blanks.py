"""Codes that are 0 where the source's weights are far from what these stand for: of stretches that
were lost, a few bytes long or single; and none where they are 0 on purpose, or by GPTQ's errors."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.float_codes import LARGEST, encode
from qtool.scheme import GroupQuant, Scheme, joined
from qtool.verification.against.blanks import blanks
from qtool.verification.against.likeness import sums_of
from qtool.verification.against.side_by_side import SideBySide, rows_of_array, rows_of_quant
from qtool.verification.run import verify_artifact
from support.gallery.raw import edited
from support.runs.quantizing import first_block_of_tiny, quantize
from support.verification import made_up_matrices
from support.verification.made_up_matrices import beside, rounded, scattered
from support.verification.verifying import forget_digests

Floats = NDArray[np.float32]
SHAPE = (512, 512)
INTEGERS = [Scheme(4, 128, False), Scheme(4, 128, True), Scheme(3, 128, True), Scheme(4, 512, True)]
FLOATS = {"fp8": ("e4m3", 512), "fp4": ("e2m1", 16)}


def normal(seed: int = 0) -> Floats:
    return made_up_matrices.normal(seed, SHAPE)


def small_floats(weight: Floats, kind: str) -> GroupQuant:
    book, size = FLOATS[kind]
    largest = np.abs(weight.reshape(SHAPE[0], -1, size)).max(axis=2)
    scale = np.maximum(largest / LARGEST[book], 1e-9).astype(np.float32)
    codes = encode(weight / np.repeat(scale, size, axis=1), book)
    scheme = Scheme(8 if book == "e4m3" else 4, size, True, "float32", book)
    return GroupQuant(scheme, codes, scale, np.zeros_like(scale, np.uint8))


@pytest.mark.parametrize("scheme", INTEGERS, ids=str)
@pytest.mark.parametrize("at", [(slice(100, 484), slice(77, 78)), (slice(3, 83), slice(64, 72))])
def test_a_stretch_of_packed_codes(at: tuple[slice, slice], scheme: Scheme) -> None:
    """As AWQ packs them, along outputs, and GPTQ, eight inputs to a word."""
    weight = normal()
    quant = rounded(weight, scheme)
    quant.codes[at] = 0
    found = beside(quant, weight).blanks
    rows, columns = at
    assert found is not None and 0.7 < found.weights / quant.codes[at].size <= 1
    last = columns.stop - 1
    said = f"columns {columns.start} to {last}" if last > columns.start else f"column {last}"
    assert found.where.startswith(f"{said}, rows {rows.start} to ")


def test_most_of_a_column_of_two_bits() -> None:
    weight = normal()
    quant = rounded(weight, Scheme(2, 64, True))
    assert beside(quant, weight).blanks is None
    quant.codes[:300, 77] = 0
    found = beside(quant, weight).blanks
    assert found is not None and found.where == "column 77, rows 0 to 255"


@pytest.mark.parametrize("kind", FLOATS)
def test_a_line_and_single_bytes_of_small_floats(kind: str) -> None:
    weight = normal()
    quant = small_floats(weight, kind)
    assert beside(quant, weight).blanks is None
    quant.codes[7, 64:128] = 0
    found = beside(quant, weight).blanks
    assert found is not None and found.where.endswith("row 7") and found.weights > 15
    quant = small_floats(weight, kind)
    single = np.random.default_rng(1).choice(quant.codes.size, 60, replace=False)
    quant.codes.reshape(-1)[single] = 0
    found = beside(quant, weight).blanks
    assert found is not None and 10 < found.weights <= 60


@pytest.mark.parametrize("kind", FLOATS)
def test_beside_rows_and_columns_of_0(kind: str) -> None:
    """Such as heads that a model was made wider by."""
    weight = normal()
    weight[:256] = 0
    weight[:, :64] = 0
    quant = small_floats(weight, kind)
    assert beside(quant, weight).blanks is None
    quant.codes[300, 64:128] = 0
    found = beside(quant, weight).blanks
    assert found is not None and found.where.endswith("row 300")


def test_bytes_of_eight_bits_whose_middle_is_0() -> None:
    """int8, whose byte of 0 is a weight of 0; packed, it is the lowest of the codes."""
    weight = normal()
    for blank in (128, 0):
        quant = rounded(weight, Scheme(8, -1, True))
        assert beside(quant, weight).blanks is None
        quant.codes[7, 64:128] = blank
        found = beside(quant, weight).blanks
        assert found is not None and found.where.endswith("row 7")


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_what_is_0_on_purpose(share: float) -> None:
    """Weights near 0 pruned; columns and rows that are 0 altogether; few weights of many."""
    weight = normal()
    thinned = np.where(np.abs(weight) < np.quantile(np.abs(weight), share), 0, weight)
    thinned[:, 5:9] = 0
    thinned[100:104] = 0
    random = np.where(np.random.default_rng(1).random(SHAPE) < share + 0.2, 0, weight)
    for kind in FLOATS:
        assert beside(small_floats(thinned.astype(np.float32), kind), weight).blanks is None
        if share > 0.3:  # Wanda, whose weights of 0 are of any size
            assert beside(small_floats(random.astype(np.float32), kind), weight).blanks is None


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_errors_that_gptq_hands_on_are_none(bits: int) -> None:
    """Of the columns last in turn four steps are much; weights are moved up as often as down."""
    weight, scheme = normal(), Scheme(bits, 128, True)
    step = rounded(weight, scheme).scale.astype(np.float32).repeat(128, axis=1)
    size = np.where(np.arange(SHAPE[1]) % 32 == 0, 1 << (bits - 1), 0.6).astype(np.float32)
    moved = weight + step * size * np.random.default_rng(2).standard_normal(SHAPE)
    quant = rounded(weight, scheme)
    quant.codes[:] = np.clip(np.rint(moved / step) + (1 << (bits - 1)), 0, (1 << bits) - 1)
    assert beside(quant, weight).blanks is None
    if bits > 2:
        quant.codes[:384, 77] = 0
        assert beside(quant, weight).blanks is not None


def test_of_three_bits_gptq_takes_more_down_than_up() -> None:
    """Six times as many, here and there: as AWQ and GPTQ leave them of SmolLM2."""
    weight = normal()
    quant = rounded(weight, Scheme(3, 128, True))
    single = np.random.default_rng(1).choice(quant.codes.size, 300, replace=False)
    quant.codes.reshape(-1)[single] = 0
    assert beside(quant, weight).blanks is None


def test_beside_a_fold() -> None:
    weight = normal()
    columns = np.exp(normal(1)[0] * 10).astype(np.float32)
    quant = rounded(weight * columns, Scheme(4, 128, False))
    quant.codes[128:512, 77] = 0
    found = beside(quant, weight)
    assert found.columns is not None and found.blanks is not None
    assert found.blanks.where.startswith("column 77, rows ")


def test_groups_that_lie_anywhere() -> None:
    weight = normal()
    quant = scattered(weight)
    assert beside(quant, weight).blanks is None
    quant.codes[3:35, 64:72] = 0
    assert beside(quant, weight).blanks is not None


def test_one_sentence_of_an_artifact(tmp_path: Path) -> None:
    source = first_block_of_tiny(tmp_path / "source")
    quantize(source, "w4g128-rtn", tmp_path / "out")
    forget_digests(tmp_path / "out")
    with edited(tmp_path / "out") as tensors:
        name = "model.layers.0.mlp.up_proj.qweight"
        words = tensors[name].array.copy()
        words[11:13] = 0  # all outputs of two inputs
        tensors[name] = tensors[name].changed(words)
    verdict = verify_artifact(tmp_path / "out", against=source, threads=1)
    (found,) = [f for f in verdict.findings if f.severity == "error"]
    assert (found.check, found.name) == ("layer-error", "model.layers.0.mlp.up_proj.weight")
    assert found.message.startswith("1 matrix with codes of 0 where the source's weights are far ")
    assert "columns 11 to 12, rows " in found.message


@pytest.mark.parametrize("kind", FLOATS)
def test_memory_does_not_grow_with_rows(kind: str) -> None:
    """Of a matrix with lost codes, a few rows are looked at at a time."""

    def most(times: int) -> int:
        weight = np.tile(normal(), (times, 1))
        quant = joined([small_floats(normal(), kind)] * times)
        quant.codes[7, 64:128] = 0
        pair = SideBySide(quant.shape, rows_of_quant(quant), rows_of_array(weight))
        sums = sums_of(quant, pair)
        tracemalloc.start()
        assert blanks(quant, pair, sums) is not None
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert most(16) < 1.5 * most(2)
