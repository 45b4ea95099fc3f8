"""Fused experts seen one by one: the same GGUF file, and scales for the inputs of each."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.scaled import from_json
from qtool.formats.gguf_file import GgufFile
from qtool.gguf.from_hf.experts_apart import experts_apart
from qtool.gguf.from_hf.source import hf_source
from qtool.verification.run import verify_artifact
from support.gguf import gguf_models
from support.gguf.families.sparse import TURNED
from support.gguf.gguf_runs import without_tokenizers, write
from support.runs import quantizing
from support.verification.verifying import but_digests

__all__ = ["without_tokenizers"]

_FUSED = ("granite-moe", "granite-4-h-moe", "gemma4-26b-a4b", "mistral4", "qwen3-vl-moe")
# Experts as in others; in some blocks of the first no attention.
SLOW = ("granite-4-h-moe", "gemma4-26b-a4b")


def loud(name: str, folder: Path) -> Path:
    """Norms and experts' up have some channels far larger than others, which AWQ scales."""
    quantizing.add_tokenizer(gguf_models.build(name, folder, dtype="bfloat16"))
    found = load_file(folder / "model.safetensors")
    for key in (key for key in found if "layernorm" in key and found[key].ndim == 1):
        found[key][::11] *= 16
    for key in (key for key in found if key.endswith(("gate_up_proj", "input_linear.weight"))):
        rows = found[key].mT if name in TURNED else found[key]
        if rows.ndim == 3:
            rows[:, rows.shape[1] // 2 :: 5] *= 16
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", _FUSED)
def test_the_file_is_the_same(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(gguf_models.build(name, tmp_path / "model", dtype="bfloat16"))
    seen = experts_apart(checkpoint)
    assert any(
        ".experts.0.up_proj.weight" in key for key in set(seen.tensors) - {*checkpoint.tensors}
    )
    one, other = hf_source(checkpoint), hf_source(seen)
    assert one.metadata == other.metadata and one.dropped == other.dropped
    there = {tensor.name: tensor for tensor in other.tensors}
    assert there.keys() == {tensor.name for tensor in one.tensors}
    for tensor in one.tensors:
        again = there[tensor.name]
        assert (tensor.shape, tensor.type) == (again.shape, again.type), tensor.name
        assert np.array_equal(tensor.read(0, tensor.rows), again.read(0, again.rows)), tensor.name
        some = tensor.rows // 3, 2 * tensor.rows // 3 + 1
        assert np.array_equal(tensor.read(*some), again.read(*some)), tensor.name


@pytest.mark.parametrize("name", ["llama-3.1", "gpt-oss", "gpt-oss-mxfp4", "llama4", "mixtral"])
def test_others_stay_what_they_are(name: str, tmp_path: Path) -> None:
    """Biases and transposes that no expert's tensor of the table stands for, and no experts."""
    checkpoint = Checkpoint.open(gguf_models.build(name, tmp_path / "model"))
    assert experts_apart(checkpoint) is checkpoint


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in _FUSED],
)
def test_inputs_of_experts_are_scaled(name: str, tmp_path: Path) -> None:
    """By each expert's own factors before its down projection; `verify` scales the source alike."""
    model = loud(name, tmp_path / "model")
    text = quantizing.text_file(tmp_path / "text.txt", 12000)
    sets = [f"calibration.source={text}", "calibration.samples=8", "calibration.length=64"]
    write(model, tmp_path / "out.gguf", "q4_0-awq-gptq", *sets)
    with GgufFile.open(tmp_path / "out.gguf") as file:
        record = from_json(json.loads(str(file.metadata["qtool.scales"].value)))
    experts = {key: one for key, one in record.items() if ".experts." in key}
    kinds = {key.rpartition(".experts.")[2].split(".")[1] for key in experts}
    assert kinds >= {"gate_proj", "up_proj"}
    if name in TURNED:  # whose down projection's rows are no whole blocks: it is not quantized
        assert kinds == {"gate_proj", "up_proj"}
        return
    down = [one.columns for key, one in experts.items() if key.endswith("down_proj.weight")]
    assert any(one is not None and one.any() for one in down)
    verdict = verify_artifact(tmp_path / "out.gguf", against=model)
    assert [(f.severity, f.check) for f in but_digests(verdict.findings)] == [("note", "smoothing")]
    assert all(layer.relative_error < 0.25 for layer in verdict.layers)
