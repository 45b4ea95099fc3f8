"""`qtool convert` where numbers cannot be kept: measured with --lossy, or refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qtool.errors import QtoolError, UnsupportedError
from qtool.scheme import GroupQuant, Scheme
from support.converting.converting import (
    numbers,
    run,
    weights,
)
from support.formats.artifact_files import random_quant, write_folder


def one_layer(folder: Path, kind: str, quant: GroupQuant, layout: str | None = None) -> Path:
    """An artifact of a single matrix, and a norm."""
    folder.mkdir()
    dense = {"model.norm.weight": np.ones(quant.shape[1], np.float16)}
    write_folder(folder, kind, {"model.layers.0.mlp.up_proj": quant}, dense, layout)
    return folder


def test_columns_out_of_group_order_are_refused(tmp_path: Path) -> None:
    quant = random_quant(Scheme(4, 32, False), 64, 128, act_order=True)
    source = one_layer(tmp_path / "source", "gptq", quant)
    with pytest.raises(UnsupportedError, match=r"up_proj.*desc_act.*--lossy it is encoded anew"):
        run(source, "awq", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    back = run(run(source, "gptq-v2", tmp_path / "v2"), "gptq-v2", tmp_path / "again")
    assert weights(back) == weights(source)
    assert json.loads((back / "config.json").read_text())["quantization_config"]["desc_act"]


@pytest.mark.parametrize("to", ["awq", "compressed-tensors"])
def test_lossy_measures_what_is_lost(to: str, tmp_path: Path) -> None:
    quant = random_quant(Scheme(4, 32, False), 64, 128, act_order=True)
    source = one_layer(tmp_path / "source", "gptq", quant)
    out = run(source, to, tmp_path / "out", lossy=True)
    (said,) = json.loads((out / "qtool.json").read_text())["conversions"]
    assert said["exact"] is False
    (one,) = said["rounded"]
    assert one["name"] == "model.layers.0.mlp.up_proj.weight"
    before, after = quant.dequantize(), numbers(out)[one["name"]]
    expected = np.linalg.norm(before - after) / np.linalg.norm(before)
    assert 0.005 < one["relative_error"] < 0.2
    assert one["relative_error"] == pytest.approx(expected, rel=1e-5)


def wide_scales(tmp_path: Path, factor: float) -> Path:
    """A GPTQ artifact with float32 scales."""
    quant = random_quant(Scheme(4, 32, True), 64, 128)
    source = one_layer(tmp_path / "source", "gptq", quant)
    file = source / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.scales"
    tensors[name] = tensors[name].astype(np.float32) * np.float32(factor)
    save_file(tensors, file, metadata={"format": "pt"})
    return source


def test_scales_that_float16_holds_are_no_obstacle(tmp_path: Path) -> None:
    source = wide_scales(tmp_path, 2.0)
    found = numbers(run(source, "awq", tmp_path / "out"))
    name = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(found[name], numbers(source)[name])


def test_scales_that_float16_rounds(tmp_path: Path) -> None:
    source = wide_scales(tmp_path, 1.0001)
    with pytest.raises(UnsupportedError, match="float32 scales, which float16 rounds"):
        run(source, "awq", tmp_path / "out")
    out = run(source, "awq", tmp_path / "out", lossy=True)
    (said,) = json.loads((out / "qtool.json").read_text())["conversions"]
    assert said["rounded"][0]["what"] == "its scales are rounded"
    assert 0 < said["rounded"][0]["relative_error"] < 2**-11


def test_scales_beyond_float16_are_refused_even_then(tmp_path: Path) -> None:
    source = wide_scales(tmp_path, 1e9)
    with pytest.raises(UnsupportedError, match="too large for float16"):
        run(source, "awq", tmp_path / "out", lossy=True)
    assert not (tmp_path / "out").exists()


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    source = wide_scales(tmp_path, float("nan"))
    with pytest.raises(QtoolError, match="scale is not finite"):
        run(source, "gptq-v2", tmp_path / "out")
