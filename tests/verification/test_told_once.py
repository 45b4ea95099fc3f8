"""What is wrong once is told once: a setting, the width of a matrix, a GGUF file's architecture."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import quantizing
from safetensors.torch import load_file, save_file
from verifying import serious

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import UnsupportedError
from qtool.formats.gguf_values import string, u32
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import load
from qtool.verification.finding import Finding
from qtool.verification.run import verify_artifact


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return quantizing.first_blocks_of_tiny(tmp_path / "model", 2)


def errors(folder: Path, **more: Any) -> list[Finding]:
    found = verify_artifact(folder, threads=1, **more).findings
    return [one for one in found if one.severity == "error"]


@pytest.mark.parametrize("value", ["256", None, True])
def test_a_setting_that_is_no_count(value: object, model: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(model, tmp_path / "source"))
    config = json.loads((model / "config.json").read_text()) | {"hidden_size": value}
    (model / "config.json").write_text(json.dumps(config))
    (alone,) = errors(model)
    assert "hidden_size" in alone.message and "whole number" in alone.message
    assert errors(model, against=source, engine="vllm") == [alone]
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    first, second = errors(model, against=source)
    assert first == alone and "rope_theta" in second.message


def test_a_setting_that_is_a_count_of_another_model(model: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(model, tmp_path / "source"))
    config = json.loads((model / "config.json").read_text()) | {"hidden_size": 512}
    (model / "config.json").write_text(json.dumps(config))
    found = errors(model, against=source)
    assert [one.check for one in found] == ["tensors", "settings"]
    assert found[0].message.endswith("config and weights are of different models")


def test_one_wrong_width_is_its_matrix_own(model: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(model / "model.safetensors")
    tensors[name] = tensors[name][:700].contiguous()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    said = (
        f"{name} is [700, 256], and by config.json it should be [768, 256]; the same tensors of "
        "other blocks are as config.json says: fetch "
    )
    (found,) = errors(model)
    assert found.message.startswith(said)
    with pytest.raises(UnsupportedError) as error:
        make_plan(load("w4g128-rtn"), Checkpoint.open(model))
    assert said in str(error.value)


def test_another_architecture_of_a_gguf_file(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": string("qwen2"),
        "llama.block_count": u32(1),
        "llama.embedding_length": u32(256),
    }
    path = gguf_files.write(tmp_path / "m.gguf", metadata, {})
    first, *others = serious(path)
    assert first.message == (
        "general.architecture says qwen2, and the keys of the model are llama's "
        "(llama.block_count): llama.cpp does not load the file; put back llama"
    )
    assert not [one for one in others if one.check == "keys"]
