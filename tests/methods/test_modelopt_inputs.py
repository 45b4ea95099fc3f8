"""ModelOpt quantizes inputs and the cache as well: `eval` rounds them, or says that it does not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qtool.artifacts.artifact import Artifact
from qtool.errors import FormatError
from qtool.float_codes import TABLES, encode
from qtool.quality.engine_inputs import declared

LAYER = "model.layers.0.self_attn.k_proj"
SCALE = 0.02


def write(folder: Path, algorithm: str, bits: int, **more: Any) -> Artifact:
    """One matrix [4, 32], its input scale, scales of the cache, and a config."""
    weight = torch.zeros(4, 16, dtype=torch.uint8)
    tensors = {f"{LAYER}.weight": weight, f"{LAYER}.weight_scale_2": torch.tensor(0.5)}
    tensors[f"{LAYER}.weight_scale"] = torch.ones(4, 2).to(torch.float8_e4m3fn)
    if bits == 8:
        tensors = {f"{LAYER}.weight": torch.zeros(4, 32).to(torch.float8_e4m3fn)}
        tensors[f"{LAYER}.weight_scale"] = torch.tensor(0.5)
    tensors |= {f"{LAYER}.{name}": torch.tensor(SCALE) for name in ("input_scale", "k_scale")}
    for name in more.pop("without", ()):
        del tensors[f"{LAYER}.{name}"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantization = {"quant_method": "modelopt", "quant_algo": algorithm, **more}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "quantization_config": quantization})
    )
    return Artifact.open(folder)


def e4m3(x: np.ndarray) -> np.ndarray:
    return TABLES["e4m3"][encode(np.clip(x, -448, 448).astype(np.float32), "e4m3")]


def fp8_stored(x: np.ndarray) -> np.ndarray:
    return e4m3(x / np.float32(SCALE)) * np.float32(SCALE)


def fp8_token(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(448)
    return e4m3(x / scale) * scale


def nvfp4(x: np.ndarray) -> np.ndarray:
    """Scales of 16 in float8, which are multiplied by what is stored."""
    runs = x.reshape(*x.shape[:-1], -1, 16)
    most = np.abs(runs).max(-1, keepdims=True)
    scale = e4m3(most / np.float32(6) / np.float32(SCALE)) * np.float32(SCALE)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = np.abs(np.abs(runs / scale)[..., None] - grid).argmin(-1)
    return (np.copysign(grid[nearest], runs) * scale).reshape(x.shape)


@pytest.mark.parametrize(
    ("algorithm", "bits", "name", "function"),
    [
        ("NVFP4", 4, "nvfp4", nvfp4),
        ("FP8", 8, "fp8", fp8_stored),
        ("FP8_PER_CHANNEL_PER_TOKEN", 8, "fp8", fp8_token),
        ("MIXED_PRECISION", 4, "nvfp4", nvfp4),
    ],
)
def test_inputs_and_the_cache_are_rounded(
    algorithm: str, bits: int, name: str, function: Any, tmp_path: Path
) -> None:
    found = declared(write(tmp_path, algorithm, bits, kv_cache_quant_algo="FP8"))
    # The file has the scale of keys alone.
    said = ["the KV cache: no v_scale in block 0: 1.0 taken, as engines do"]
    assert found.json() == {"activations": name, "kv_cache": "fp8", "not_simulated": said}
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    rounded = found.of_matrix[f"{LAYER}.weight"].apply(x).numpy()
    np.testing.assert_allclose(rounded, function(x.numpy()), rtol=1e-6, atol=0)
    assert found.kept is not None
    np.testing.assert_array_equal(found.kept.of_block(0)[0].apply(x).numpy(), fp8_stored(x.numpy()))


def test_a_scale_that_lacks(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=f"no {LAYER}.input_scale"):
        declared(write(tmp_path, "NVFP4", 4, without=["input_scale"]))
    found = declared(write(tmp_path, "MIXED_PRECISION", 4, without=["input_scale"]))
    assert found.json()["activations"] == "float32"  # weights alone, in a mixture


def test_a_cache_of_another_kind_is_said(tmp_path: Path) -> None:
    found = declared(write(tmp_path, "NVFP4", 4, kv_cache_quant_algo="NVFP4"))
    assert found.not_simulated == ("the KV cache: static 4-bit NVFP4 per tensor",)
