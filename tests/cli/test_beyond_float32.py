"""Doubles that float32 has no number for: told as such, by their value and where they stand."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from qtool import small_floats
from qtool.errors import SourceError
from qtool.formats.safetensors_header import TensorInfo
from qtool.gguf.from_hf.hf_rows import hf_rows
from qtool.recipe.recipe import Recipe, load
from support.runs import quantizing
from support.runs.bad_models import (
    RECIPES,
    Q,
    arguments,
    assert_one_sentence,
    model,
    original,
    replace,
)
from support.runs.quantizing import Call

__all__ = ["model", "original"]

NORM = "model.layers.1.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("recipe", [*RECIPES, "w4-gptq-rotated"])
@pytest.mark.parametrize(
    ("name", "index", "value"),
    [(Q, (5, 7), 1e300), (NORM, (9,), -1e39), (EMBEDDING, (95, 3), 3.5e38)],
)
def test_its_value_and_place(
    recipe: str, name: str, index: tuple[int, ...], value: float,
    model: Path, tmp_path: Path, call: Call,
) -> None:  # fmt: skip
    replace(model, name, index, value, np.float64)
    said = call(*arguments(model, recipe, tmp_path / "out"))
    where = f"tensor {name!r} holds {value} at {[*index]}, which is beyond float32"
    assert_one_sentence(said, str(model / "model.safetensors"), where)
    assert not [*tmp_path.glob("out*")]


def test_what_gradients_meet_is_not_mended_without_them(
    model: Path, tmp_path: Path, call: Call
) -> None:
    replace(model, Q, (5, 7), 1e300, np.float64)
    said = call(*arguments(model, "w4g128-gptq", tmp_path / "out", "--set", "gptq.yaqa=1"))
    assert "measuring gradients" in said.err and "holds 1e+300" in said.err
    assert "gptq.yaqa=0" not in said.err


def test_rows_of_a_matrix_that_has_such_a_number() -> None:
    """One scale of NVFP4 is that of all rows: numpy had nothing to divide by, and said so."""
    recipe = load("nvfp4")
    assert isinstance(recipe, Recipe)
    with warnings.catch_warnings(action="error"):
        made = small_floats.quantize(np.ones((2, 32), np.float32), recipe.scheme, float("inf"))
    assert np.isfinite(made.row_scale()).all()


def test_a_gguf_file_of_it(tmp_path: Path, call: Call) -> None:
    model = quantizing.first_blocks_of_tiny(tmp_path / "model", 1)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_torch(model / "model.safetensors")
    tensors[name] = tensors[name].double()
    tensors[name][5, 7] = 1e300
    save_torch(tensors, model / "model.safetensors")
    said = call("quantize", model, "--recipe", "q8_0", "-o", tmp_path / "out.gguf")
    where = f"{model / 'model.safetensors'}: tensor {name!r} holds 1e+300 at [5, 7]"
    assert_one_sentence(said, f"error: {where}")


def test_an_infinity_is_one(model: Path, tmp_path: Path, call: Call) -> None:
    replace(model, Q, (5, 7), float("inf"), np.float64)
    said = call(*arguments(model, "w4g128-rtn", tmp_path / "out"))
    assert_one_sentence(said, f"tensor {Q!r} holds inf at [5, 7]", "damaged")


@pytest.mark.parametrize("value", [1e39, float("inf")])
def test_rows_for_gguf(value: float) -> None:
    """An infinity is told of by who takes the rows."""
    stored = np.ones((4, 8))
    stored[3, 2] = value
    raw = stored.reshape(-1).view(np.uint8)

    def stretch(start: int, stop: int) -> NDArray[np.uint8]:
        return raw[start:stop]

    info = TensorInfo("a.weight", "F64", (4, 8), 0, raw.size)
    rows = hf_rows([(stretch, info)], stacked=False, float32=False, rows=None, groups=1, add=0)
    assert rows.read(0, 3).size == 3 * 8 * 4
    if np.isinf(value):
        assert np.isinf(rows.read(2, 4).view(np.float32)).sum() == 1
        return
    with pytest.raises(SourceError, match=r"'a.weight' holds 1e\+39 at \[3, 2\], .* float32"):
        rows.read(2, 4)
