"""What gpt-oss's own MXFP4 is not written of, told in one sentence; and odd sources of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.fused_experts import apart, apart_as, fused_layers
from qtool.errors import FormatError, RecipeError, SourceError, UnsupportedError
from qtool.quantizing.plan import Asked, foresee
from qtool.recipe.recipe import load
from qtool.verification.run import verify_artifact
from support.gguf import gguf_models
from support.models.mxfp4_models import LAYER, RTN, plain, written
from support.runs import quantizing

__all__ = ["plain", "written"]


# What is refused


def test_other_models_are_refused(tmp_path: Path) -> None:
    folder = quantizing.build("qwen3_moe", tmp_path / "model")
    with pytest.raises(UnsupportedError, match=r"gpt-oss's own .* recipe mxfp4 writes"):
        quantizing.quantize(folder, RTN, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pattern", ["model.layers.0.mlp.experts.*", "*.experts.2.*"])
def test_all_of_the_experts_or_none(plain: Path, tmp_path: Path, pattern: str) -> None:
    leave = f'overrides=[{{match: "{pattern}", dense: true}}]'
    with pytest.raises(UnsupportedError, match=r"override .*all of its experts"):
        quantizing.quantize(plain, RTN, tmp_path / "out", leave)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("method=awq", "method: rtn"),
        ("method=[gptq,tune]", "tune"),
        ("transforms=[rotate]", "take none"),
        ("pad_intermediate=128", "keeps gpt-oss's widths"),
        ("weights.type=nvfp4", "nvfp4"),
        ("activations={bits: 4, type: mxfp4, group_size: 32}", "activations"),
    ],
)
def test_settings_that_do_not_go_with_it(item: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load(RTN, [item])


def test_other_recipes_name_it(plain: Path) -> None:
    with pytest.raises(UnsupportedError, match="mxfp4-gpt-oss"):
        foresee(Asked(str(plain), "w8a16-ct"))


def renamed(folder: Path, out: Path, change: Any) -> Path:
    """The checkpoint with its tensors under other names; of None they are left out."""
    import shutil

    from safetensors.torch import load_file
    from safetensors.torch import save_file as save

    shutil.copytree(folder, out)
    state = load_file(out / "model.safetensors")
    named = {change(name): tensor for name, tensor in state.items()}
    named.pop(None, None)
    save(named, out / "model.safetensors", {"format": "pt"})
    return out


def test_numbers_under_names_of_blocks(plain: Path, written: Path, tmp_path: Path) -> None:
    """As transformers 5.23 saves what it has dequantized: taken, and told by `verify`."""

    def wrong_name(name: str) -> str:
        return f"{name}_blocks" if name.endswith(("experts.gate_up_proj", "down_proj")) else name

    model = renamed(plain, tmp_path / "model", wrong_name)
    made = quantizing.quantize(model, RTN, tmp_path / "out").out
    first, second = Checkpoint.open(made), Checkpoint.open(written)
    assert first.tensors.keys() == second.tensors.keys()
    for name in first.tensors:
        assert first.raw(name).tobytes() == second.raw(name).tobytes()
    (found,) = [one for one in verify_artifact(model).findings if one.severity == "error"]
    assert "plain numbers under names of MXFP4's blocks" in found.message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda n: None if n.endswith("1.mlp.experts.gate_up_proj_bias") else n,
         r"lacks model\.layers\.1\.mlp\.experts\.gate_up_proj_bias"),
        (lambda n: f"base_model.model.{n}", "as peft wraps a model"),
    ],
)  # fmt: skip
def test_sources_that_are_not_whole(plain: Path, tmp_path: Path, change: Any, said: str) -> None:
    model = renamed(plain, tmp_path / "model", change)
    with pytest.raises((SourceError, UnsupportedError), match=said):
        quantizing.quantize(model, RTN, tmp_path / "out")


def test_without_a_config(plain: Path, tmp_path: Path) -> None:
    model = renamed(plain, tmp_path / "model", lambda name: name)
    (model / "config.json").unlink()
    with pytest.raises(SourceError, match=r"has no config\.json"):
        foresee(Asked(str(model), RTN))


def test_float16_is_told_of_vllm(tmp_path: Path) -> None:
    model = quantizing.add_tokenizer(
        gguf_models.build("gpt-oss", tmp_path / "model", dtype="float16")
    )
    made = quantizing.quantize(model, RTN, tmp_path / "out").out
    for findings in (
        foresee(Asked(str(model), RTN, engine="vllm")).findings,
        verify_artifact(made, engine="vllm").findings,
    ):
        (found,) = [one for one in findings if one.check == "engine-dtype"]
        assert "--dtype bfloat16" in found.message


def test_one_expert_is_inspected(written: Path) -> None:
    from qtool.inspecting.tensor_detail import tensor_detail

    artifact = Artifact.open(written)
    detail = tensor_detail(artifact, f"{LAYER.format(1)}.2.gate_up_proj.weight")
    assert detail["shape"] == [192, 64] and detail["scheme"] == "mxfp4 g32"


def test_a_matrix_measures_nothing_for_it(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What headers tell is told before a text passes through the model."""
    from qtool.matrix import shared

    def measuring(*_: object, **__: object) -> None:
        raise AssertionError("a text passes through the model")

    monkeypatch.setattr(shared, "measure", measuring)
    text = quantizing.text_file(tmp_path / "text.txt")
    call = quantizing.caller(monkeypatch, capfd)
    small = ("--samples", 4, "--length", 64)
    words = ("--recipes", "w4g64-gptq", "--calibration", text, *small, "-o", tmp_path / "out")
    said = call("matrix", plain, *words)
    assert said.status == 1 and "would leave 79%" in said.out + said.err


# Experts apart


def test_fused_layers_of_both_kinds(plain: Path, tmp_path: Path) -> None:
    """With biases gate and up take turns: no recipe but this one sees such experts apart."""
    checkpoint = Checkpoint.open(plain)
    assert not [*fused_layers(checkpoint.tensors)] and apart(checkpoint) is checkpoint
    assert [one.layer for one in fused_layers(checkpoint.tensors, interleaved=True)] == [
        LAYER.format(0), LAYER.format(1)
    ]  # fmt: skip
    view = apart(checkpoint, interleaved=True)
    name = f"{LAYER.format(1)}.3.gate_up_proj.weight"
    wanted = checkpoint.float32(f"{LAYER.format(1)}.gate_up_proj")[3].T
    assert np.array_equal(view.float32(name), wanted)
    rows = view.part(name, 5, 9).view(np.uint16).reshape(4, -1)
    assert np.array_equal(rows, view.raw(name).view(np.uint16).reshape(wanted.shape)[5:9])
    assert apart_as(checkpoint, view.tensors).tensors == view.tensors
    other = Checkpoint.open(quantizing.build("qwen3_moe", tmp_path / "other"))
    assert apart(other, interleaved=True) is other


def test_damaged_stacks_are_told(written: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(written)
    arrays = {
        n: checkpoint.array(n) for n, info in checkpoint.tensors.items() if info.dtype == "U8"
    }
    name = f"{LAYER.format(0)}.down_proj_scales"
    arrays[name] = arrays[name][:, :, :2].copy()
    folder = tmp_path / "bad"
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_bytes((written / "config.json").read_bytes())
    with pytest.raises(FormatError, match="one scale for each group"):
        _ = Artifact.open(folder).entries
    assert ("error", "shapes") in [(f.severity, f.check) for f in verify_artifact(folder).findings]
