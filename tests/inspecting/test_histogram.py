"""inspect --tensor: how often each code and each scale occurs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from qtool.cli.main import app
from qtool.formats.gguf_codes import CODES
from qtool.formats.gguf_values import Kind
from qtool.gguf_types import BY_NAME
from qtool.inspecting.histogram import BINS, Bars, bars, edges, of_codes, of_scales, of_values
from qtool.inspecting.tensor_detail import of_quant
from qtool.scheme import GroupQuant, Scheme
from support.formats.artifact_files import random_quant, write_folder
from support.gguf.gguf_bytes import Gguf, entry, info


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def gguf(path: Path, kind: str, blocks: np.ndarray) -> Path:
    """Blocks of bytes as one row each."""
    type_ = BY_NAME[kind]
    tensor = info("x", [len(blocks), type_.weights], type_.number)
    path.write_bytes(
        bytes(Gguf([entry("k", Kind.UINT8, 1)], [tensor], blocks.tobytes() + bytes(31)))
    )
    return path


def test_q8_0_by_hand(tmp_path: Path) -> None:
    blocks = np.zeros((3, 34), np.uint8)
    blocks[:, :2] = np.array([[0.5], [2], [-1]], "<f2").view(np.uint8)
    blocks[:, 2:] = 1
    blocks[0, 2:4] = 127, 128  # 127 and -128
    path = gguf(tmp_path / "m.gguf", "Q8_0", blocks)
    detail = json.loads(run(path, "--tensor", "x", "--json"))
    counts = dict(zip(detail["code_values"], detail["code_counts"], strict=True))
    assert {value: n for value, n in counts.items() if n} == {-128: 1, 1: 94, 127: 1}
    assert detail["scales"]["range"] == [-1, 2] and detail["scales"]["median"] == 0.5
    assert detail["scales"]["negative"] == 1 and detail["scales"]["count"] == 3
    text = run(path, "--tensor", "x")
    assert "  scales           -1 to 2, median 0.5, 3 in all\n    of them        1 negative" in text
    assert "       0..7  97.92 %  " + "#" * 40 in text


@pytest.mark.parametrize("kind", sorted(BY_NAME))
def test_every_type(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    blocks = rng.integers(0, 256, (8, BY_NAME[kind].nbytes), dtype=np.uint8)
    path = gguf(tmp_path / "m.gguf", kind, blocks)
    detail = json.loads(run(path, "--tensor", "x", "--json"))
    weights = 8 * BY_NAME[kind].weights
    if kind in CODES:
        assert sum(detail["code_counts"]) == weights
        values = detail["code_values"]
        assert values == sorted(values) and len(values) == CODES[kind].levels
        assert ("scales" in detail) == (CODES[kind].scale is not None)
    else:
        assert sum(detail["histogram"]["counts"]) == weights - detail["not_finite"]
    assert "#" in run(path, "--tensor", "x")


def test_a_matrix_of_small_floats() -> None:
    codes = np.array([[0x00, 0x80, 0x7F, 0x38, 0xB8, 0x38]], np.uint8)  # 0 -0 nan 1 -1 1
    quant = GroupQuant(
        Scheme(8, -1, True, "float32", "e4m3"),
        codes, np.full((1, 1), 0.25, np.float32), np.zeros((1, 1), np.uint8), outer=2.0,
    )  # fmt: skip
    found = of_quant(quant)
    counts: dict[float, int] = {}
    for value, count in zip(found["code_values"], found["code_counts"], strict=True):
        counts[value] = counts.get(value, 0) + count
    assert {value: n for value, n in counts.items() if n} == {0: 2, 1: 2, -1: 1}
    assert found["not_finite"] == 1 and found["outer_scale"] == 2 and "zero_range" not in found
    assert found["code_values"][0] == -448 and len(of_codes(found).counts) <= 32
    json.dumps(found, allow_nan=False)


def test_scales_that_are_no_numbers(tmp_path: Path) -> None:
    quant = random_quant(Scheme(4, 32, False), 16, 64)
    quant.scale[:] = 0.5
    quant.scale[0] = np.nan, 0
    quant.scale[1, 0] = -0.25
    write_folder(tmp_path, "awq", {"a": quant})
    scales = json.loads(run(tmp_path, "--tensor", "a", "--json"))["scales"]
    assert (scales["not_finite"], scales["zero"], scales["negative"]) == (1, 1, 1)
    assert scales["range"] == [-0.25, 0.5] and scales["median"] == 0.5
    assert sum(scales["histogram"]["counts"]) == 31
    assert "1 zero, 1 negative, 1 not finite" in run(tmp_path, "--tensor", "a")
    quant.scale[:] = np.nan
    assert of_quant(quant)["scale_range"] is None and bars(of_quant(quant))[0].title == "codes"


def test_bins() -> None:
    assert list(edges(1, 1)) == [1, 1] and len(edges(1, 2)) == BINS + 1
    ratio = edges(1e-6, 1)
    assert ratio[0] == 1e-6 and ratio[-1] == 1 and ratio[1] == pytest.approx(10 ** (-6 + 6 / BINS))
    found = of_scales(np.array([1.0, 2, 3, 4]), np.array([1, 1, 1, 5]))
    assert found["median"] == 4 and found["count"] == 8
    assert sum(found["histogram"]["counts"]) == 8 and found["histogram"]["counts"][-1] == 5
    same = of_scales(np.full(3, 7.0))
    assert same["histogram"] == {"edges": [7, 7], "counts": [3]}


@pytest.mark.parametrize(("low", "high"), [(0, 0), (-1e308, 1.5e308), (1, 1 + 1e-15), (-2, 6)])
def test_values_in_pieces(low: float, high: float) -> None:
    values = np.linspace(0, 1, 100) * low
    values[-1] = high
    pieces: list[Any] = [values[:30], values[30:], np.array([np.nan, np.inf])]
    found = of_values(pieces, float(values.min()), float(values.max()))
    assert sum(found["counts"]) == 100 and len(found["edges"]) == len(found["counts"]) + 1
    json.dumps(found, allow_nan=False)


def test_drawing() -> None:
    lines = Bars("codes", ["0", "1", "2"], [2, 1, 0]).lines()
    assert lines[1:] == [
        f"          0  66.67 %  {'#' * 40}", f"          1  33.33 %  {'#' * 20}",
        "          2   0.00 %",
    ]  # fmt: skip
    assert Bars("c", ["0", "1"], [3, 1]).lines(blocks=True)[2].endswith(" " + "█" * 13 + "▍")
    assert Bars("c", ["0"], [0]).lines()[1].endswith("0.00 %")
