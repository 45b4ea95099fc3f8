"""Checkpoint names against transformers' names, and the conversions that are no views."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.conversions import splits
from qtool.checkpoints.names import Binding, bind
from qtool.errors import SourceError
from qtool.streaming.joined_rows import join
from qtool.streaming.meta_model import find_blocks
from support.models.arch_models import CONFIGS, build


@dataclass(frozen=True)
class Shape:
    shape: tuple[int, ...]


def model_of(name: str, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def headers(folder: Path) -> dict[str, Shape]:
    return {n: Shape(info.shape) for n, info in Checkpoint.open(folder).tensors.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_is_covered_exactly_once(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    tensors = headers(build(name, tmp_path))
    joined = join(model, splits(model, tensors), find_blocks(model)[0])
    assert bool(joined) == (name == "sarvam_moe")
    names = bind(model, tensors, joined)
    assert names.unknown == ()
    tied = set(model.all_tied_weights_keys)
    for parameter, value in model.state_dict().items():
        if parameter in tied and parameter not in names.of_parameter:
            continue
        covered = torch.zeros(value.shape, dtype=torch.int64)
        for binding in names.of_parameter[parameter]:
            assert binding.view(covered).shape == binding.shape
            binding.view(covered).add_(1)
        assert bool((covered == 1).all()), parameter


def test_experts_are_slices_of_one_parameter(tmp_path: Path) -> None:
    names = bind(model_of("mixtral"), headers(build("mixtral", tmp_path)))
    prefix = "model.layers.1.block_sparse_moe.experts.2"
    assert names.of_tensor[f"{prefix}.w1.weight"] == Binding(
        f"{prefix}.w1.weight",
        "model.layers.1.mlp.experts.gate_up_proj",
        (2, slice(0, 96), slice(0, 64)),
        (96, 64),
    )
    assert names.of_tensor[f"{prefix}.w3.weight"].index == (2, slice(96, 192), slice(0, 64))
    assert names.of_tensor[f"{prefix}.w2.weight"].index[0] == 2
    gate = names.of_tensor["model.layers.1.block_sparse_moe.gate.weight"]
    assert gate.parameter_name == "model.layers.1.mlp.gate.weight" and gate.index == ()


def test_more_than_nine_experts_keep_their_numbers(tmp_path: Path) -> None:
    """Sorted as text, expert 10 would come before expert 2."""
    tensors: dict[str, Shape] = {}
    for e in range(12):
        prefix = f"model.layers.0.block_sparse_moe.experts.{e}"
        tensors |= {f"{prefix}.{w}.weight": Shape((96, 64)) for w in ("w1", "w3")}
        tensors[f"{prefix}.w2.weight"] = Shape((64, 96))
    names = bind(model_of("mixtral", num_local_experts=12), tensors)
    for name, binding in names.of_tensor.items():
        assert binding.index[0] == int(name.split(".")[5])


def test_names_without_the_models_prefix_are_found() -> None:
    names = bind(model_of("opt"), {"decoder.layers.0.fc1.bias": Shape((96,))})
    assert "model.decoder.layers.0.fc1.bias" in names.of_parameter


def test_a_missing_half_is_an_error() -> None:
    prefix = "model.layers.0.block_sparse_moe.experts"
    tensors = {f"{prefix}.{e}.w1.weight": Shape((96, 64)) for e in range(4)}
    with pytest.raises(SourceError, match=r"no tensor like '\.experts\.\*\.w3\.weight'"):
        bind(model_of("mixtral"), tensors)


def test_a_missing_expert_is_an_error() -> None:
    prefix = "model.layers.0.block_sparse_moe.experts"
    tensors = {f"{prefix}.{e}.{w}.weight": Shape((96, 64)) for e in (0, 1, 3) for w in ("w1", "w3")}
    with pytest.raises(SourceError, match=r"\[3, 192, 64\].*expects \[4, 192, 64\]"):
        bind(model_of("mixtral"), tensors)


def test_experts_of_unequal_shapes_are_an_error() -> None:
    prefix = "model.layers.0.block_sparse_moe.experts"
    tensors = {
        f"{prefix}.{e}.{w}.weight": Shape((96, 64 + e // 3)) for e in range(4) for w in ("w1", "w3")
    }
    with pytest.raises(SourceError, match=r"experts\.3\.w1.*\[96, 65\].*does not go with"):
        bind(model_of("mixtral"), tensors)


@pytest.mark.parametrize("operation", ["Transpose", "Chunk"])
def test_conversions_that_are_no_views_are_refused(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import conversion_mapping, core_model_loading

    make: Callable[..., Any] = getattr(core_model_loading, operation)
    converter = core_model_loading.WeightConverter(
        ".mlp.down.weight", ".mlp.down_proj.weight", operations=[make(0)]
    )
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda _: [converter])
    names = bind(model_of("llama"), {"model.layers.0.mlp.down.weight": Shape((64, 96))})
    name = "model.layers.0.mlp.down_proj.weight"
    assert [*names.refused] == [name] and name not in names.of_parameter
    for parameter in (name, "model.layers.1.mlp.up_proj.weight"):  # or one in the same place
        why = names.why_refused(parameter)
        assert why is not None and re.search(rf"{operation}.*RTN can", why)
    assert names.why_refused("model.norm.weight") is None
