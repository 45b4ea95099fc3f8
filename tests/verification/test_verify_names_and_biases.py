"""Tensors under names that a class does not have, and blocks and biases that a config.json does not
speak of as they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from qtool.verification.stored_biases import CHECK, READ, READ_MLP
from support.gallery import raw
from support.gallery.raw import Raw
from support.gguf import gguf_models
from support.runs.quantizing import quantize
from support.verification.labelled_folders import TINY, dense, said
from support.verification.verifying import forget_digests

Q, K, V = (f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv")


def lost(folder: Path) -> set[str]:
    """What transformers makes up, since it does not find it."""
    found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return set(found[1]["missing_keys"])


def test_a_decoder_under_names_that_it_has_inside_of_another_model(tmp_path: Path) -> None:
    folder = dense(tmp_path / "x")
    with raw.edited(folder) as tensors:
        for name in [*tensors]:
            tensors[f"language_model.{name}"] = tensors.pop(name)
    (one,) = said(folder, "tensors")
    assert one.severity == "error" and "38 tensors (" in one.message
    assert "LlamaForCausalLM looks for model.embed_tokens.weight: rename them" in one.message
    assert "model.embed_tokens.weight" in lost(folder)


def test_packed_likewise(tmp_path: Path) -> None:
    quantize(TINY, "w4g128-rtn", tmp_path / "x", "format=awq")
    forget_digests(tmp_path / "x")
    with raw.edited(tmp_path / "x") as tensors:
        for name in [*tensors]:
            tensors[f"language_model.{name}"] = tensors.pop(name)
    assert [one.severity for one in said(tmp_path / "x", "tensors")] == ["error"]


def test_inside_of_another_model_they_are_well(tmp_path: Path) -> None:
    gguf_models.build("mistral4", tmp_path / "x")
    assert said(tmp_path / "x", "tensors") == []


def test_a_class_that_takes_them_under_either_names(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    gguf_models.build("qwen3.5", folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_5_text"
    with raw.edited(folder) as tensors:
        for name in [name for name in tensors if name.startswith("model.")]:
            inside = name.replace("model.", "model.language_model.", 1)
            tensors[inside] = tensors.pop(name)
    assert said(folder, "tensors") == []
    assert lost(folder) == set()


def test_a_number_of_blocks_that_is_not_said(tmp_path: Path) -> None:
    folder = dense(tmp_path / "x", num_hidden_layers=None)
    (one,) = said(folder, "tensors")
    assert one.severity == "error" and "no num_hidden_layers" in one.message
    assert "4 blocks are there" in one.message
    assert len([name for name in lost(folder) if name.endswith("q_proj.weight")]) == 28
    older = dense(tmp_path / "y", num_hidden_layers=None, n_layer=4)
    assert said(older, "tensors") == []


def with_biases(folder: Path) -> None:
    with raw.edited(folder) as tensors:
        for block in range(4):
            for part in (Q, K, V):
                name = part.format(block)
                rows = tensors[f"{name}.weight"].shape[0]
                tensors[f"{name}.bias"] = Raw("F32", (rows,), np.ones(rows, np.float32).tobytes())


@pytest.mark.parametrize(
    ("changes", "stored", "severity"),
    [
        ({"attention_bias": True}, False, "error"),
        ({"attention_bias": False}, True, "error"),
        ({"attention_bias": True, "architectures": ["OwnForCausalLM"], "model_type": "own"},
         False, "warning"),
        ({"attention_bias": True}, True, None),
        ({"attention_bias": False}, False, None),
        ({"attention_bias": None}, False, None),
        # Its class has biases whatever is said.
        ({"attention_bias": False, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
         True, None),
        ({"attention_bias": False, "bias": True}, True, None),
        ({"mlp_bias": True}, False, "error"),
        ({"mlp_bias": True, "architectures": ["OwnForCausalLM"], "model_type": "own"},
         False, "warning"),
    ],
)  # fmt: skip
def test_biases_that_a_config_speaks_of(
    changes: dict[str, Any], stored: bool, severity: str | None, tmp_path: Path
) -> None:
    folder = dense(tmp_path / "x", **changes)
    if stored:
        with_biases(folder)
    assert [one.severity for one in said(folder, CHECK)] == ([severity] if severity else [])


def test_biases_of_zeros_change_nothing(tmp_path: Path) -> None:
    """AutoGPTQ stored them for every layer, whatever the source had."""
    quantize(TINY, "w4g128-rtn", tmp_path / "x", "format=gptq")
    forget_digests(tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    config["attention_bias"] = False
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    for value, told in ((0.0, 0), (0.5, 1)):
        with raw.edited(tmp_path / "x") as tensors:
            for block in range(4):
                tensors.pop(f"{Q.format(block)}.bias", None)
                rows = tensors[f"{Q.format(block)}.scales"].shape[1]
                zeros = np.full(rows, value, np.float16).tobytes()
                tensors[f"{Q.format(block)}.bias"] = Raw("F16", (rows,), zeros)
        assert len(said(tmp_path / "x", CHECK)) == told


def test_classes_that_read_it_are_those_of_transformers() -> None:
    for kind, key in [(k, "attention_bias") for k in READ] + [(k, "mlp_bias") for k in READ_MLP]:
        module = CONFIG_MAPPING[kind].__module__.replace("configuration_", "modeling_")
        source = Path(transformers.__file__).parent.joinpath(*module.split(".")[1:])
        assert f"bias=config.{key}" in source.with_suffix(".py").read_text(), kind
