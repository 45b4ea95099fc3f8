"""Tensors of a GGUF file that are a multiple of the source's, another one of it, or another
model's: told as that, and once."""

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import qtool
from qtool.gguf_types import BY_NAME
from qtool.hub import tiny_folder
from support.verification.verifying import beside_tiny

UP, EMBEDDING, NORM = "blk.1.ffn_up.weight", "token_embd.weight", "blk.1.ffn_norm.weight"
SCALE_AT = {"Q6_K": 208}  # bytes into a block; of others it begins with a float16


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("gguf")

    def get(recipe: str, source: Path | None = None) -> Path:
        path = folder / f"{recipe}{'-tuned' if source else ''}.gguf"
        if not path.exists():
            name = str(source or "tiny")
            qtool.quantize(name, recipe, path, threads=1, changes=["importance=false"])
            assert source or not beside_tiny(path)
        return path

    return get


def copied(path: Path, out: Path, changes: dict[str, np.ndarray]) -> Path:
    """A copy with the stored numbers of some tensors others."""
    shutil.copy(path, out)
    reader = gguf.GGUFReader(out, "r+")
    for tensor in reader.tensors:
        if tensor.name in changes:
            tensor.data[:] = changes[tensor.name]
    reader.data.flush()
    return out


def tensors_of(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def multiplied(tensor: gguf.ReaderTensor, by: float) -> np.ndarray:
    """Its numbers with all scales so many times as large."""
    data = np.array(tensor.data)
    if tensor.data.dtype != np.uint8:
        return data * data.dtype.type(by)
    kind = tensor.tensor_type.name
    raw = data.reshape(-1, BY_NAME[kind].nbytes)
    for at in [0, 2] if kind == "Q4_K" else [SCALE_AT.get(kind, 0)]:
        scale = np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16)
        raw[:, at : at + 2] = (scale * np.float16(by)).view(np.uint8)
    return data


@pytest.mark.parametrize("recipe", ["q4_0", "q4_k_m", "f16"])
@pytest.mark.parametrize("by", [2.0, 0.5, 1.25])
@pytest.mark.parametrize("name", [UP, EMBEDDING, NORM])
def test_a_multiple(
    name: str, by: float, recipe: str, made: Callable[..., Path], tmp_path: Path
) -> None:
    healthy = made(recipe)
    new = multiplied(tensors_of(healthy)[name], by)
    (one,) = beside_tiny(copied(healthy, tmp_path / "x.gguf", {name: new}))
    assert (one.severity, one.check, one.name) == ("error", "layer-error", name)
    assert one.message.startswith(f"1 tensor is the source's but for a factor: {name}: about ")
    assert float(one.message.partition("about ")[2].split(" ")[0]) == pytest.approx(by, rel=0.05)


@pytest.mark.parametrize("recipe", ["q4_0", "q2_k", "f16"])
def test_two_that_changed_places(recipe: str, made: Callable[..., Path], tmp_path: Path) -> None:
    healthy, other = made(recipe), UP.replace("1", "2")
    data = {name: np.array(tensor.data) for name, tensor in tensors_of(healthy).items()}
    changes = {UP: data[other], other: data[UP]}
    (one,) = beside_tiny(copied(healthy, tmp_path / "x.gguf", changes))
    assert (one.severity, one.check) == ("error", "swapped")
    assert one.message.startswith("2 matrices stand under names of another: ")
    assert f"{UP} is the source's {other}" in one.message


@pytest.mark.parametrize(("recipe", "share"), [("q4_0", 0.15), ("q8_0", 0.012)])
def test_a_few_of_a_fine_tune(
    recipe: str, share: float, made: Callable[..., Path], tmp_path: Path
) -> None:
    """Nearer than what its type may make, and farther than rounding leaves the others."""
    healthy = made(recipe)
    shutil.copytree(tiny_folder(), tmp_path / "tuned")
    file = tmp_path / "tuned" / "model.safetensors"
    tensors = load_file(file)
    weight = tensors["model.layers.1.mlp.up_proj.weight"]
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    weight.add_((noise * share * weight.float().std()).to(weight.dtype))
    save_file(tensors, file, {"format": "pt"})
    new = np.array(tensors_of(made(recipe, tmp_path / "tuned"))[UP].data)
    (one,) = beside_tiny(copied(healthy, tmp_path / "x.gguf", {UP: new}))
    assert (one.severity, one.check, one.name) == ("warning", "layer-error", UP)
    assert one.message.startswith("1 matrix farther from the source than the scales explain, as ")
