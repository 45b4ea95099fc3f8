"""Scales below 0 in blocks of types that have none."""

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from qtool.gguf_types import BY_NAME
from qtool.verification.finding import Finding
from qtool.verification.gguf.signs import SCALES, negative
from qtool.verification.run import verify_artifact
from support.verification.made_gguf import made

__all__ = ["made"]

MINUS = 0x80  # of the second byte of a float16


def turned(path: Path, out: Path, kind: str, at: int, blocks: list[int]) -> str:
    """A copy with another sign of what lies at a place of blocks of the last such tensor."""
    shutil.copy(path, out)
    reader = gguf.GGUFReader(out, "r+")
    tensor = [t for t in reader.tensors if t.tensor_type.name == kind][-1]
    rows = tensor.data.reshape(-1, BY_NAME[kind].nbytes)
    for block in blocks:
        rows[block, at + 1] ^= MINUS
    reader.data.flush()
    return str(tensor.name)


def serious(path: Path) -> list[Finding]:
    return [f for f in verify_artifact(path, threads=1).findings if f.severity != "note"]


@pytest.mark.parametrize(
    ("recipe", "kind", "scale"),
    [
        ("q4_k_m", "Q4_K", "dmin"), ("q4_k_m", "Q4_K", "d"), ("q5_k_m", "Q5_K", "dmin"),
        ("q2_k", "Q2_K", "dmin"), ("q2_k", "Q2_K", "d"), ("q4_1", "Q4_1", "d"),
    ],
)  # fmt: skip
def test_a_scale_below_0_is_told(
    recipe: str, kind: str, scale: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    assert serious(made(recipe)) == []
    out = tmp_path / "x.gguf"
    name = turned(made(recipe), out, kind, SCALES[kind][scale], [9, 11])
    (one,) = serious(out)
    assert (one.severity, one.check, one.name) == ("warning", "values", name)
    row, column = divmod(9 * BY_NAME[kind].weights, 768 if "down" in name else 256)
    assert one.message.startswith("2 scales of blocks below 0, as no known encoder of their types")
    assert f"{name} (the first: {scale} of row {row}, columns {column} to" in one.message


def test_types_that_begin_with_a_weight_have_both_signs(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "x.gguf"
    turned(made("q4_k_m"), out, "Q6_K", 208, [9])
    assert serious(out) == []


def test_what_is_0_or_no_number_is_not_below_0() -> None:
    block = BY_NAME["Q4_K"]
    raw = np.zeros((6, block.nbytes), np.uint8)
    halves = np.array([0.0, -0.0, np.nan, -np.nan, -np.inf, 1.0], np.float16)
    raw[:, :2] = halves.view(np.uint8).reshape(-1, 2)
    assert negative(raw, block, 512) is None
    raw[5, 2:4] = raw[4, 2:4] = np.array([-6e-8], np.float16).view(np.uint8)  # the least there is
    found = negative(raw, block, 512)
    assert found is not None and (found.scale, found.count) == ("dmin", 2)
    assert found.below(10).place == "row 12, columns 0 to 255"


@pytest.mark.parametrize(
    ("kind", "scale"), [(k, s) for k, scales in SCALES.items() for s in scales]
)
def test_each_lies_where_gguf_has_it(kind: str, scale: str) -> None:
    """Without one nothing is multiplied, and without the other nothing taken off."""
    block = BY_NAME[kind]
    raw = np.random.default_rng(0).integers(1, 255, (2, block.nbytes), np.uint8)
    for at in SCALES[kind].values():
        raw[:, at : at + 2] = np.array([0.5], np.float16).view(np.uint8)
    if kind in ("Q4_1", "Q5_1"):
        raw[:, 2:4] = 0
    code = gguf.GGMLQuantizationType[kind]
    before = gguf.dequantize(raw, code)
    at = SCALES[kind][scale]
    raw[1, at : at + 2] = np.array([-0.5], np.float16).view(np.uint8)
    after = gguf.dequantize(raw, code)
    others = [where for name, where in SCALES[kind].items() if name != scale]
    found = negative(raw, block, block.weights)
    assert found is not None and (found.row, found.scale, found.count) == (1, scale, 1)
    assert np.array_equal(after[0], before[0])
    if not others:
        assert np.array_equal(after[1], -before[1])
    else:  # of two the weights are one part less the other
        raw[1, others[0] : others[0] + 2] = 0
        alone = gguf.dequantize(raw, code)[1]
        assert (alone <= 0).all() if scale == "d" else (alone >= 0).all()
