"""Norms that a GGUF file has with 1 added: exact to the checkpoint's numbers, or refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.errors import UnsupportedError
from qtool.gguf.from_hf import source as from_hf
from qtool.gguf.to_hf import files
from support.converting.converting import numbers, run, said_of, weights
from support.runs import quantizing
from support.verification.verifying import forget_digests

NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 in GPTQ, its norms float16 numbers such as the sum with 1 in float16 rounds."""
    folder = tmp_path_factory.mktemp("gemma")
    model = quantizing.build("gemma3", folder / "model")
    file = model / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = {name: value.to(torch.float16) for name, value in load_file(file).items()}
    for name, value in tensors.items():
        if "norm" in name:
            drawn = torch.rand(value.shape, generator=generator) * 0.5 + 2**-10
            tensors[name] = (drawn * torch.where(drawn > 0.25, 1, -1)).to(torch.float16)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"dtype": "float16"}
    (model / "config.json").write_text(json.dumps(config))
    return quantizing.quantize(
        model, "w4g128-rtn", folder / "source", "format=gptq", "weights.symmetric=true",
        "weights.group_size=32",
    ).out  # fmt: skip


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_hf, "tokenizer_metadata", lambda *_, **__: {})
    monkeypatch.setattr(files, "tokenizer_files", lambda _: {})


def test_norms_come_back_to_the_bit(gemma: Path, tmp_path: Path) -> None:
    norm = numbers(gemma)[NORM].astype(np.float16)
    assert (norm + np.float16(1) - np.float16(1) != norm).mean() > 0.5  # float16 would round
    file = run(gemma, "gguf", tmp_path / "file.gguf")
    assert said_of(file)["exact"] is True
    assert weights(run(file, "gptq", tmp_path / "back")) == weights(gemma)


def test_norms_that_float32_rounds_are_refused_or_recorded(gemma: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in gemma.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors[NORM][3] = 2.0**-24  # half of the last bit of 1 + w
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    forget_digests(source)
    with pytest.raises(UnsupportedError, match=rf"{NORM} is stored with 1 added.*--lossy"):
        run(source, "gguf", tmp_path / "file.gguf")
    record = said_of(run(source, "gguf", tmp_path / "file.gguf", lossy=True))
    (rounded,) = record["rounded"]
    assert record["exact"] is False and rounded["name"] == NORM
    expected = 2.0**-24 / np.linalg.norm(numbers(source)[NORM].astype(np.float64))
    assert rounded["relative_error"] == pytest.approx(expected, rel=1e-3)
