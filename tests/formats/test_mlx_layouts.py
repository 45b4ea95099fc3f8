"""Where mlx-lm's names and shapes are not those of checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from qtool.artifacts.artifact import Artifact
from qtool.artifacts.expert_stack import ExpertStack
from qtool.converting.from_artifact import artifact_model
from qtool.errors import FormatError, UnsupportedError
from qtool.formats import detect, mlx, mlx_experts
from qtool.formats.mlx_floats import MODES
from qtool.formats.safetensors_header import TensorInfo
from qtool.planning import mlx as plan
from qtool.quality.weights import artifact_weights
from qtool.recipe.recipe import load
from qtool.scheme import Dense, GroupQuant, Scheme


def apart(kind: str, name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    info = TensorInfo(name, "U8", shape, 0, int(np.prod(shape)))
    return {n: i.shape for n, (_, i) in mlx_experts.apart({name: info}, kind).items()}


@pytest.mark.parametrize(
    ("kind", "name", "shape", "transposed"),
    [
        ("falcon_mamba", "backbone.layers.0.mixer.conv1d.weight", (8, 4, 1), True),
        ("lfm2", "model.layers.0.conv.conv.weight", (8, 3, 1), True),
        ("lfm2", "model.layers.0.conv.conv.weight", (8, 1, 3), False),  # as checkpoints have it
        ("lfm2", "model.layers.0.conv.in_proj.weight", (8, 3, 1), False),
        ("qwen3_next", "model.layers.0.linear_attn.conv1d.weight", (8, 4, 1), False),
        ("mamba", "backbone.layers.0.mixer.conv1d.weight", (8, 4), False),
    ],
)
def test_convolutions(kind: str, name: str, shape: tuple[int, ...], transposed: bool) -> None:
    """Of classes that change nothing else."""
    assert apart(kind, name, *shape) == {name: (shape[0], 1, shape[1]) if transposed else shape}


def test_names() -> None:
    assert apart("nemotron_h", "m.switch_mlp.fc1.weight", 2, 3, 4) == {
        "m.experts.0.up_proj.weight": (3, 4), "m.experts.1.up_proj.weight": (3, 4),
    }  # fmt: skip
    assert apart("lfm2_moe", "a.feed_forward.up_proj.scales", 3, 4) == {
        "a.feed_forward.w3.scales": (3, 4)
    }
    assert apart("lfm2_moe", "a.feed_forward.w3.weight", 3, 4) == {
        "a.feed_forward.w3.weight": (3, 4)
    }
    assert [*apart("lfm2_moe", "a.feed_forward.switch_mlp.down_proj.biases", 2, 3, 4)] == [
        f"a.feed_forward.experts.{one}.w2.biases" for one in range(2)
    ]
    assert apart("mixtral", "m.switch_mlp.up_proj.global_scale", 2) == {
        "m.experts.0.w3.global_scale": (), "m.experts.1.w3.global_scale": (),
    }  # fmt: skip


def test_layers_that_mlx_lm_renames_stay_dense() -> None:
    scheme = Scheme(4, 64, False, "bfloat16", outer="offset")
    recipe = load("w4g64-mlx-rtn", [])
    names = ("a.feed_forward.w1.weight", "a.feed_forward.experts.0.w1.weight", "a.q_proj.weight")
    for kind, left in (("lfm2_moe", {names[0]}), ("lfm2", set())):
        actions: dict[str, Scheme | Dense] = dict.fromkeys(names, scheme)
        plan.leave(recipe, kind, actions)  # type: ignore[arg-type]
        assert {name for name, one in actions.items() if isinstance(one, Dense)} == left


def test_a_scale_of_each_expert(tmp_path: Path) -> None:
    """NVFP4 of mlx-lm's own, with max|w| of each expert beside the scales."""
    rng = np.random.default_rng(0)
    name = "model.layers.0.mlp.switch_mlp.up_proj"
    tensors = {
        f"{name}.weight": rng.integers(0, 1 << 32, (2, 4, 4), dtype=np.uint32),
        f"{name}.scales": rng.integers(1, 120, (2, 4, 2), dtype=np.uint8),
        f"{name}.global_scale": np.float32([0.37, 5.0]),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "mlx"})
    table = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    config = {"model_type": "qwen3_moe", "quantization": table, "quantization_config": table}
    (tmp_path / "config.json").write_text(json.dumps(config))
    artifact = Artifact.open(tmp_path)
    assert [*artifact.entries] == [
        f"model.layers.0.mlp.experts.{one}.up_proj.weight" for one in range(2)
    ]
    for one, whole in enumerate((0.37, 5.0)):
        read = artifact.read(f"model.layers.0.mlp.experts.{one}.up_proj.weight")
        assert isinstance(read, GroupQuant) and read.scheme.scale_dtype == "float8_e4m3"
        assert read.outer == np.float32(whole) / np.float32(2688)
        assert read.scheme.group_size == MODES["nvfp4"].group_size
        assert read.codes[0, 0] == tensors[f"{name}.weight"][one, 0, 0] & 15


def test_numbers_that_mlx_lm_changed(tmp_path: Path) -> None:
    """A convolution that is transposed tells: norms of Qwen3-Next have 1 added beside it."""
    name = "model.layers.0.linear_attn"
    tensors = {
        f"{name}.in_proj_qkvz.weight": np.zeros((2, 4), np.uint32),
        f"{name}.in_proj_qkvz.scales": np.ones((2, 1), np.float16),
        f"{name}.in_proj_qkvz.biases": np.ones((2, 1), np.float16),
        f"{name}.conv1d.weight": np.ones((8, 4, 1), np.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "mlx"})
    table = {"group_size": 32, "bits": 4}
    config = {"model_type": "qwen3_next", "quantization": table}
    (tmp_path / "config.json").write_text(json.dumps(config))
    artifact = Artifact.open(tmp_path)
    assert artifact.entries[f"{name}.conv1d.weight"].shape == (8, 4, 1)
    for refuse in (lambda: artifact_weights(artifact), lambda: artifact_model(tmp_path, None)):
        with pytest.raises(UnsupportedError, match=r"weight is \[8, 4, 1\], as mlx-lm saves"):
            refuse()


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4"])
def test_experts_of_one_tensor(kind: str, tmp_path: Path) -> None:
    """gate and up, with an output's row in turn or one after another, and inputs first."""
    parent = "model.layers.0.mlp.experts"
    rng = np.random.default_rng(0)
    tensors: dict[str, NDArray[Any]] = {}
    for part in ("gate_proj", "up_proj"):
        tensors[f"{parent}.{part}.weight"] = rng.integers(0, 1 << 32, (2, 3, 4), dtype=np.uint32)
        tensors[f"{parent}.{part}.scales"] = rng.integers(120, 130, (2, 3, 1), dtype=np.uint8)
        tensors[f"{parent}.{part}.bias"] = rng.normal(size=(2, 3)).astype(np.float32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "mlx"})
    config = {"model_type": kind, "quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    artifact = Artifact.open(tmp_path)
    whole, biases = f"{parent}.gate_up_proj", f"{parent}.gate_up_proj_bias"
    assert {name: entry.shape for name, entry in artifact.entries.items()} == {
        whole: (2, 32, 6), biases: (2, 6),
    }  # fmt: skip
    assert artifact.entries[whole].scheme == "mxfp4 g32 stack" and artifact.entries[whole].stacked
    read, order = artifact.read(whole), [0, 3, 1, 4, 2, 5] if kind == "gpt_oss" else [*range(6)]
    found = detect(config["quantization"])  # type: ignore[arg-type]
    for expert in range(2):
        rows = []
        for part in ("gate_proj", "up_proj"):
            stored = {
                f"m.{n}": tensors[f"{parent}.{part}.{n}"][expert] for n in ("weight", "scales")
            }
            rows.append(mlx.unpack("m", stored.__getitem__, found).dequantize())
        assert np.array_equal(read[expert], np.concatenate(rows)[order].T)  # type: ignore[index]
    parts = [tensors[f"{parent}.{part}.bias"] for part in ("gate_proj", "up_proj")]
    wanted = np.concatenate(parts, axis=1)[:, order]
    assert np.array_equal(artifact.read(biases), wanted)  # type: ignore[arg-type]
    assert np.array_equal(ExpertStack(artifact, biases).rows(1, 2), wanted[1:])
    for last in ("weight", "scales", "bias"):
        del tensors[f"{parent}.up_proj.{last}"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "mlx"})
    with pytest.raises(FormatError, match="its experts' gate and up are not there"):
        _ = Artifact.open(tmp_path).entries


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4"])
def test_the_scale_of_each_expert_of_one_tensor(kind: str) -> None:
    """Of nvfp4: it goes with the expert's codes."""
    name = "m.mlp.experts.down_proj"
    tensors = {
        f"{name}.{last}": TensorInfo(f"{name}.{last}", dtype, shape, 0, 64)
        for last, dtype, shape in (
            ("weight", "U32", (2, 4, 2)), ("scales", "U8", (2, 4, 1)), ("global_scale", "F32", (2,))
        )
    }  # fmt: skip
    found = {n: i.shape for n, (_, i) in mlx_experts.apart(tensors, kind).items()}
    for one in range(2):
        assert found[f"m.mlp.experts.{one}.down_proj.global_scale"] == ()
    assert f"{name}.global_scale" not in found
