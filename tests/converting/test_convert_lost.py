"""A conversion is of weights: what engines did with inputs and the cache is said to be lost."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qtool.artifacts import lost
from qtool.artifacts.artifact import Artifact
from qtool.errors import UnsupportedError
from qtool.scheme import GroupQuant, Scheme
from support.converting.converting import converted, place, run, weights
from support.formats.artifact_files import random_quant, write_folder

LAYER = "model.layers.0.mlp.up_proj"


def w8a8(folder: Path, *, static: bool) -> Path:
    """compressed-tensors' int-quantized of one matrix, with quantized inputs."""
    folder.mkdir()
    dense = {"model.norm.weight": np.ones(128, np.float16)}
    quant = random_quant(Scheme(8, -1, True), 64, 128)
    write_folder(folder, "compressed-tensors", {LAYER: quant}, dense, "plain")
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": not static}
    inputs["strategy"] = "tensor" if static else "token"
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs
    (folder / "config.json").write_text(json.dumps(config))
    if static:
        add(folder, {f"{LAYER}.input_scale": np.ones(1, np.float32)})
    return folder


def add(folder: Path, tensors: dict[str, Any]) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("to", ["gptq", "hf"])
@pytest.mark.parametrize("static", [False, True])
def test_the_certificate_is_of_weights_and_names_the_inputs(
    to: str, static: bool, tmp_path: Path
) -> None:
    source = w8a8(tmp_path / "source", static=static)
    made = converted(source, to, tmp_path / place(to), dtype="float32" if to == "hf" else None)
    (said,) = json.loads((tmp_path / to / "qtool.json").read_text())["conversions"]
    assert said["exact"] is True and said["certified"] == "weights"
    assert made.json()["certified"] == "weights"
    names = {one["name"]: one["reason"] for one in said["dropped"]}
    assert names.keys() == {"activations"} | ({f"{LAYER}.input_scale"} if static else set())
    assert ("static" if static else "dynamic") in names["activations"]
    assert "int8" in names["activations"]
    card = (tmp_path / to / "README.md").read_text()
    assert "the same numbers; the source's quantized activations are dropped" in card
    assert f"{LAYER}.input_scale" not in Artifact.open(tmp_path / to).checkpoint.tensors


@pytest.mark.parametrize("static", [False, True])
def test_what_could_keep_its_inputs_is_not_written_anew_without_them(
    static: bool, tmp_path: Path
) -> None:
    """compressed-tensors again would be W8A16, packed: another model to engines."""
    source = w8a8(tmp_path / "source", static=static)
    with pytest.raises(UnsupportedError, match=r"activations .*int8.*--lossy for its"):
        run(source, "compressed-tensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    made = converted(source, "compressed-tensors", tmp_path / "out", lossy=True)
    assert made.certificate.dropped[0][0] == "activations"


def test_weights_alone_are_written_anew(tmp_path: Path) -> None:
    quant = random_quant(Scheme(8, -1, True), 64, 128)
    (tmp_path / "source").mkdir()
    write_folder(tmp_path / "source", "compressed-tensors", {LAYER: quant}, {})
    made = converted(tmp_path / "source", "compressed-tensors", tmp_path / "out")
    assert made.certificate.dropped == () and made.warnings == ()
    assert weights(tmp_path / "out") == weights(tmp_path / "source")


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_fp8_has_inputs_too(scheme: str, tmp_path: Path) -> None:
    """quant_method fp8 always means FP8 inputs; where they are static, their scales are stored."""
    folder = tmp_path / "source"
    folder.mkdir()
    codes = np.random.default_rng(0).integers(0, 0x7F, (128, 256), dtype=np.uint8)
    scheme_ = Scheme(8, 128, True, "float32", "e4m3", 128)
    quant = GroupQuant(scheme_, codes, np.ones((1, 2), np.float32), np.empty((0, 0), np.uint8))
    write_folder(folder, "fp8", {LAYER: quant}, {})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["activation_scheme"] = scheme
    (folder / "config.json").write_text(json.dumps(config))
    if scheme == "static":
        add_bytes(folder, f"{LAYER}.input_scale")
    made = converted(folder, "hf", tmp_path / "out", dtype="float32")
    assert f"quantized activations, too (float8, {scheme})" in made.warnings[0]
    names = [name for name, _ in made.certificate.dropped]
    assert names == ["activations"] + [f"{LAYER}.input_scale"] * (scheme == "static")


def add_bytes(folder: Path, name: str) -> None:
    """A float32 number more; torch's types, since numpy has no FP8."""
    import safetensors.torch as st
    import torch

    file = folder / "model.safetensors"
    st.save_file(st.load_file(file) | {name: torch.ones(1)}, file, metadata={"format": "pt"})


def test_scales_of_the_cache_beside_packed_matrices_are_named(tmp_path: Path) -> None:
    """FP8 checkpoints keep k_scale beside k_proj's weight, where it belongs to that matrix."""
    folder, layer = tmp_path / "source", "model.layers.0.self_attn.k_proj"
    folder.mkdir()
    write_folder(folder, "gptq", {layer: random_quant(Scheme(4, 32, True), 64, 128)}, {})
    add(folder, {f"{layer}.k_scale": np.ones(1, np.float32)})
    made = converted(folder, "awq", tmp_path / "out")
    assert [name for name, _ in made.certificate.dropped] == [f"{layer}.k_scale"]
    assert f"1 scale of the KV cache is dropped ({layer}.k_scale" in made.warnings[0]


def test_reasons() -> None:
    assert lost.reason("model.layers.0.mlp.up_proj.weight_scale") is None
    assert "inputs" in str(lost.reason("a.input_global_scale"))
    assert "outputs" in str(lost.reason("a.output_scale"))
