"""Intermediate widths padded with zeros: the same model, of which more shapes can be stored.

The oracle of the transform is transformers: a padded checkpoint, loaded as any other, gives the
logits of the one that it was made of.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.fused_experts import apart
from qtool.checkpoints.padding import Padded, padded, padded_as
from qtool.errors import FormatError, UnsupportedError
from qtool.formats.safetensors_file import TensorSpec, lay_out
from qtool.hub import tiny_folder
from qtool.planning.experts import as_quantized
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import Recipe, load
from support.gguf import gguf_models
from support.models import header_files

WIDE = 36  # no width of the small models is a multiple of it
# Of each way to name or to store a feed-forward layer one; the rest take minutes.
SOME = (
    "llama-biases-tied", "mixtral", "qwen2-moe", "phi3", "starcoder2", "gpt-neox", "falcon",
    "qwen3-vl-moe", "granite-moe-shared", "gemma3-windows", "llama4", "ernie4.5-moe",
)  # fmt: skip
REST = (
    "llama", "qwen3", "gemma", "gemma2", "qwen3-moe", "olmo2", "granite", "stablelm", "qwen2.5-vl",
    "mistral3", "glm4", "arcee", "nemotron", "internlm3", "phi2", "starcoder-heads", "gemma4",
    "gemma4-26b-a4b", "gemma4-e4b", "glm4-moe-plain", "minimax-m2", "dots1", "olmoe", "deepseek-v2",
    "deepseek-v3-plain", "hunyuan-moe", "afmoe", "exaone-moe", "mistral4", "qwen3-omni", "qwen3.5",
    "qwen3.5-moe", "qwen3-next", "lfm2-moe", "nemotron-h-moe", "granite-4-h-moe", "jamba",
    "falcon-h1", "mimo-v2", "laguna", "dots3-note", "kimi-linear", "hy-v4", "glm-5.3",
    "deepseek-v4", "ling-3",
)  # fmt: skip


def written(view: Checkpoint, like: Path, out: Path) -> Path:
    """A view as a folder that anybody can load."""
    shutil.copytree(like, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = view.tensors.values()
    layout = lay_out("model.safetensors", [TensorSpec(i.name, i.dtype, i.shape) for i in tensors])
    with (out / "model.safetensors").open("wb") as file:
        file.write(layout.header)
        for name in layout.tensors:
            file.write(view.raw(name).tobytes())
    (out / "config.json").write_text(json.dumps(dict(view.config)))
    return out


def logits(folder: Path) -> Any:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    family = gguf_models.auto_model(config)
    if not hasattr(family, "_model_mapping") or type(config) in family._model_mapping:
        model = family.from_pretrained(folder, dtype=torch.float32)
    else:
        model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(1, 33)[None]).logits.double()


def same_model(name: str, tmp_path: Path) -> Padded:
    source = gguf_models.build(name, tmp_path / "source")
    view = padded(Checkpoint.open(source), WIDE)
    assert isinstance(view, Padded) and view.widths and view.pads
    assert all(width % WIDE == 0 for width in view.widths.values())
    found, expected = logits(written(view, source, tmp_path / "wide")), logits(source)
    assert float((found - expected).abs().mean() / expected.abs().mean()) < 1e-5
    return view


@pytest.mark.parametrize("name", SOME)
def test_transformers_computes_the_same(name: str, tmp_path: Path) -> None:
    same_model(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_transformers_computes_the_same_of_many_more(name: str, tmp_path: Path) -> None:
    same_model(name, tmp_path)


def test_zeros_are_at_the_end_and_nothing_else_changes(tmp_path: Path) -> None:
    source = gguf_models.build("llama-biases-tied", tmp_path / "source")
    view = padded(Checkpoint.open(source), WIDE)
    before = load_file(source / "model.safetensors")
    for name, old in before.items():
        new = view.array(name)
        assert (new[tuple(slice(0, n) for n in old.shape)] == old).all()
        assert np.count_nonzero(new) == np.count_nonzero(old)
        grown = new.shape != old.shape
        assert grown == (("mlp." in name) and not name.endswith("down_proj.bias"))
    assert view.digest() == Checkpoint.open(source).digest()


@pytest.mark.parametrize("name", ["phi3", "llama-biases-tied", "granite-moe-shared", "llama4"])
def test_a_part_has_the_bytes_of_the_whole(name: str, tmp_path: Path) -> None:
    """Rows of both halves of one matrix, columns, experts in one tensor either way around."""
    checkpoint = Checkpoint.open(gguf_models.build(name, tmp_path))
    for view in (padded(checkpoint, WIDE), padded(apart(checkpoint), WIDE)):
        assert isinstance(view, Padded)
        for one in view.pads:
            whole, info = view.raw(one), view.tensors[one]
            row = info.nbytes // info.shape[0]
            for first, last in ((0, 1), (1, info.shape[0]), (info.shape[0] // 3, 5), (2, 2)):
                if first <= last:
                    assert (view.part(one, first, last) == whole[first * row : last * row]).all()
            for start, stop in ((0, 3), (row - 1, row + 1), (info.nbytes - 5, info.nbytes)):
                assert (view.stretch(one, start, stop) == whole[start:stop]).all()


def test_experts_are_padded_alike_whether_they_are_apart_or_not(tmp_path: Path) -> None:
    """Llama 4 keeps the transpose of all of them in one tensor."""
    checkpoint = Checkpoint.open(gguf_models.build("llama4", tmp_path))
    other = padded(apart(checkpoint), WIDE)
    assert isinstance(other, Padded)
    with pytest.raises(
        UnsupportedError, match="plain checkpoint"
    ):  # which would read what is not in the file
        apart(padded(checkpoint, WIDE))
    name = next(name for name in other.pads if name.endswith("experts.1.down_proj.weight"))
    stack = padded(checkpoint, WIDE).array(name.replace(".1.down_proj.weight", ".down_proj"))
    assert (other.array(name) == stack[1].T).all()


def test_experts_that_lie_transposed_do_not_become_square(tmp_path: Path) -> None:
    """transformers and llama.cpp's converter go by shapes; one by one they are no riddle."""
    checkpoint = Checkpoint.open(gguf_models.build("qwen3-vl-moe", tmp_path))
    with pytest.raises(UnsupportedError, match="would be as wide as its inputs, 64, and nobody"):
        padded(checkpoint, 64)
    view = padded(apart(checkpoint), 64)
    assert isinstance(view, Padded) and dict(view.widths) == {"moe_intermediate_size": 64}


def test_shared_experts_as_wide_as_several(tmp_path: Path) -> None:
    """The class makes them n times as wide as one expert: 2 * 40 becomes 2 * 64, not 96."""
    shapes = header_files.experts(1, 2, inner=40)
    mlp = "model.layers.0.mlp.shared_experts"
    shapes |= {f"{mlp}.{name}_proj.weight": (80, 256) for name in ("gate", "up")}
    shapes[f"{mlp}.down_proj.weight"] = (256, 80)
    config = {"moe_intermediate_size": 40, "n_shared_experts": 2, "shared_intermediate_size": 80}
    view = padded(Checkpoint.open(header_files.write(tmp_path, shapes, config)), 32)
    assert isinstance(view, Padded)
    assert dict(view.widths) == {"moe_intermediate_size": 64, "shared_intermediate_size": 128}
    assert view.tensors[f"{mlp}.up_proj.weight"].shape == (128, 256)


def test_what_is_a_multiple_stays_as_it_is(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_folder())
    assert padded(checkpoint, 256) is checkpoint
    assert padded_as(checkpoint, {**checkpoint.config, "intermediate_size": 512}) is checkpoint


@pytest.mark.parametrize(
    ("more", "config", "said"),
    [
        ({"model.layers.0.mlp.norm.weight": (768,)}, {}, "mlp.norm.weight, 768 wide, is none of"),
        ({}, {"intermediate_size": 700}, "model.layers.0.mlp is 768 wide, and of the keys"),
        ({"model.layers.0.mlp.gate_proj.weight": (760, 256)}, {}, "of shapes that do not go"),
        ({"model.layers.1.experts.w1": (800, 256)}, {}, "holds experts in a way of its own"),
        ({}, {"activation_sparsity_pattern": [0.9]}, "takes a mean over that width"),
    ],
)
def test_what_is_not_understood_is_refused(
    more: dict[str, tuple[int, ...]], config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = header_files.write(
        tmp_path, {**header_files.llama(1), **more}, {"intermediate_size": 768, **config}
    )
    with pytest.raises(UnsupportedError, match="cannot be padded: .*" + said) as caught:
        padded(Checkpoint.open(folder), 512)
    assert "--set pad_intermediate=0" in str(caught.value)


def test_no_feed_forward_layer_at_all(tmp_path: Path) -> None:
    source = gguf_models.build("mamba", tmp_path)
    with pytest.raises(UnsupportedError, match="no feed-forward layer is known by its names"):
        padded(Checkpoint.open(source), 512)


def test_widths_that_no_group_divides_can_be_padded(tmp_path: Path) -> None:
    """As the refusal says; what helps no width of another kind is not advised."""
    shapes = header_files.llama(1, inner=800)
    folder = header_files.write(tmp_path / "a", shapes, {"intermediate_size": 800})
    recipe = load("w4g128-gptq")
    with pytest.raises(FormatError, match=r"--set pad_intermediate=128 \(zeros up to widths"):
        make_plan(recipe, Checkpoint.open(folder))  # type: ignore[arg-type]
    wider = load("w4g128-gptq", ["pad_intermediate=128"])
    assert isinstance(wider, Recipe)
    plan = make_plan(wider, as_quantized(wider, Checkpoint.open(folder)))
    assert plan.by_name["model.layers.0.mlp.down_proj.weight"].shape == (256, 896)
    folder = header_files.write(tmp_path / "b", header_files.llama(1, hidden=320, kv=320), {})
    with pytest.raises(FormatError) as caught:
        make_plan(recipe, Checkpoint.open(folder))  # type: ignore[arg-type]
    assert "pad_intermediate" not in str(caught.value)


def test_keys_that_say_the_width_of_one_shared_expert(tmp_path: Path) -> None:
    """dots3-note's classes go by that key, others by the width of routed ones: both grow."""
    checkpoint = Checkpoint.open(gguf_models.build("dots3-note", tmp_path))
    view = padded(checkpoint, WIDE)
    assert isinstance(view, Padded)
    shared = view.widths["moe_shared_expert_intermediate_size"]
    assert shared == view.widths["moe_intermediate_size"] == 36


def test_widths_said_block_by_block(tmp_path: Path) -> None:
    """HunYuan's config has a list, which transformers does not read and others do."""
    checkpoint = Checkpoint.open(gguf_models.build("hunyuan-moe", tmp_path))
    view = padded(checkpoint, WIDE)
    assert view.config["moe_intermediate_size"] == [108, 108]
    assert view.config["intermediate_size"] == 108
    assert not isinstance(padded_as(checkpoint, checkpoint.config), Padded)
    again = padded_as(checkpoint, view.config)
    assert isinstance(again, Padded) and again.config == view.config
