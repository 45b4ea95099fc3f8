"""R3 and R4: rotations of which engines do a part, found, proved, recorded and evaluated."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.converting.from_artifact import artifact_model
from qtool.errors import QtoolError, RecipeError, UnsupportedError
from qtool.formats.compressed_tensors_config import named
from qtool.formats.compressed_tensors_targets import targets_of
from qtool.quality.weights import ArtifactWeights, open_weights
from qtool.recipe import recipe as recipes
from qtool.recipe.rotate import RotateOptions
from qtool.streaming import online_rotation
from qtool.streaming.online import Online
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.workers import Workers
from qtool.texts.calibration import calibration_tokens
from qtool.transforms import rotate, rotated, smooth_attention
from qtool.verification.engines.rules import engine_findings
from qtool.verification.run import verify_artifact
from support.models import arch_models
from support.models.small_models import checkpoint, difference, logits, models
from support.runs import quantizing
from support.transforms.rotating import quiet

__all__ = ["models"]

# Sizes of H at the inputs of the MLP's last matrices and in heads; 0: left out, with a reason.
SIZES = {"llama": (32, 8), "qwen3": (32, 32), "gemma3": (32, 16), "phi3": (32, 16),
         "opt": (32, 16), "gpt_neox": (32, 16), "mixtral": (0, 16), "qwen3_moe": (32, 16),
         "qwen2": (32, 16), "stablelm": (32, 16), "sarvam_moe": (32, 16)}  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 8, 64, 512])
def test_the_product_is_sylvesters(size: int) -> None:
    whole = np.ones((1, 1))
    while whole.shape[0] < size:
        whole = np.block([[whole, whole], [whole, -whole]])
    x = np.random.default_rng(0).standard_normal((3, 5, 2 * size)).astype(np.float32)
    wanted = (x.reshape(3, 5, 2, size).astype(np.float64) @ whole / np.sqrt(size)).reshape(x.shape)
    found = online_rotation.rotated(torch.from_numpy(x), size).numpy()
    assert np.abs(found - wanted).max() < 2e-6
    assert np.abs(online_rotation.rotated(torch.from_numpy(found), size).numpy() - x).max() < 4e-6


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.slow] if name in ("qwen2", "qwen3", "stablelm") else []
        )
        for name in arch_models.CONFIGS
    ],
)
def test_rotating_online_changes_no_logits(name: str, models: Path) -> None:
    source = checkpoint(models, name)
    view = rotated.untied(source)
    found = rotate.prepare(view, RotateOptions(r3=True, r4=True), quiet)
    last, head = SIZES[name]
    assert {*found.online.inputs.values()} == ({last} if last else set())
    count = Skeleton.open(source).count
    assert found.online.heads == dict.fromkeys(range(count), head)
    if name in ("mixtral", "qwen3_moe", "sarvam_moe"):  # the last two have blocks without experts
        assert "inputs of experts are not rotated" in found.left_out[-1]
    for matrix in found.online.inputs:
        assert not np.array_equal(view.float32(matrix), source.float32(matrix))
    assert difference(logits(source), logits(view)) < 2e-6
    # Without the engine's part R4 is another network, and R3 the same one.
    view.online.heads.clear()
    assert difference(logits(source), logits(view)) < 2e-6
    view.online.inputs.clear()
    assert (difference(logits(source), logits(view)) > 1e-2) == bool(last)


RECIPE = """# of a test
method: rtn
format: compressed-tensors
weights: {bits: 8, group_size: 32, symmetric: true}
transforms: [rotate]
rotate: {r3: true, r4: true}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks of it."""
    return quantizing.first_blocks_of_tiny(tmp_path_factory.mktemp("tiny") / "model", 2)


@pytest.fixture(scope="module")
def artifact(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny in 8 bits, rotated online too."""
    folder = tmp_path_factory.mktemp("artifact")
    (folder / "r.yaml").write_text(RECIPE)
    return quantizing.quantize(tiny, str(folder / "r.yaml"), folder / "out").out


def edited(artifact: Path, out: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The artifact with another transform_config."""
    shutil.copytree(artifact, out)
    config = json.loads((out / "config.json").read_text())
    change(config["quantization_config"]["transform_config"]["config_groups"])
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_the_config_says_what_engines_have_to_rotate(artifact: Path) -> None:
    groups = json.loads((artifact / "config.json").read_text())["quantization_config"][
        "transform_config"
    ]["config_groups"]
    places = {
        name: [(entry["location"], entry["targets"]) for entry in group["apply"]]
        for name, group in groups.items()
    }
    attention = [r"re:(?:.*\.)?layers\.\d+\.self_attn$"]
    assert places == {
        "R4": [("input", [r"re:(?:.*\.)?layers\.\d+\.mlp\.down_proj$"])],
        "R3": [("q_attn", attention), ("k_cache", attention)],
    }
    assert {name: (g["type"], g["head_dim"]) for name, g in groups.items()} == {
        "R4": ("hadamard", 256), "R3": ("hadamard", 64),
    }  # fmt: skip


def test_the_evaluator_rotates_and_verify_compares(artifact: Path, tiny: Path) -> None:
    tokens = np.random.default_rng(2).integers(0, 2000, (1, 32), dtype=np.int64)
    with open_weights(artifact) as weights, Workers(1) as workers:
        found = Skeleton.open(weights).logits(tokens, workers)
        before = Skeleton.open(Checkpoint.open(tiny)).logits(tokens, workers)
        assert difference(before, found) < 0.05  # of 8 bits
        assert isinstance(weights, ArtifactWeights)
        bare = replace(weights, online=Online())
        assert difference(before, Skeleton.open(bare).logits(tokens, workers)) > 0.1
    verdict = verify_artifact(artifact, against=tiny)
    assert not [f for f in verdict.findings if f.severity in ("error", "warning")]
    assert any("rotated as qtool.json says" in f.message for f in verdict.findings)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda g: g["R4"].update(type="random-hadamard"), "a rotation of type 'random-hadamard'"),
        (lambda g: g["R4"].update(randomize=True), "randomized"),
        (lambda g: g["R4"].update(head_dim=24), "of head_dim 24"),
        (lambda g: g["R4"].update(head_dim=4096), "by a Hadamard matrix of 4096"),
        (lambda g: g["R4"]["apply"][0].update(location="output"), "a rotation of output"),
        (lambda g: g["R4"]["apply"][0].update(targets=["re:.*nothing$"]), "names no matrix"),
        (lambda g: g["R4"]["apply"][0].update(targets=["lm_head"]), "rotates inputs of lm_head"),
        (lambda g: g["R4"]["apply"][0].update(targets=["Linear"]), "rotates inputs of lm_head"),
        (
            lambda g: g.update(again=g["R4"]),
            "again rotates model.layers.0.mlp.down_proj.weight once more",
        ),
        (lambda g: g.update(again=g["R3"]), "again rotates attention of block 0 once more"),
        (lambda g: g["R3"]["apply"].pop(), "not rotated alike"),
        (lambda g: g["R3"].update(apply=None), "no list `apply`"),
    ],
)
def test_what_is_not_rotated_here_is_refused(
    change: Callable[[dict[str, Any]], None], said: str, artifact: Path, tmp_path: Path
) -> None:
    path = edited(artifact, tmp_path / "other", change)
    with pytest.raises(QtoolError, match=re.escape(said)), open_weights(path):
        pass


@pytest.mark.parametrize(
    "change",
    [
        lambda groups: groups["R4"].update(type="random-matrix"),
        lambda groups: groups["R4"].update(head_dim=100),
        lambda groups: groups["R4"].update(head_dim=4096),
    ],
)
def test_verify_says_what_eval_refuses(
    change: Callable[[dict[str, Any]], None], artifact: Path, tmp_path: Path
) -> None:
    path = edited(artifact, tmp_path / "other", change)
    with pytest.raises(QtoolError) as refused, open_weights(path):
        pass
    found = verify_artifact(path).findings
    (said,) = [f.message for f in found if f.severity == "error"]
    assert said == str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda groups: groups.pop("R4"),
         {"inputs of the MLP's last matrices rotated by hadamard 256 while the model runs (R4), "
          "config.json's transform_config says nothing"}),
        (lambda groups: groups["R4"].update(head_dim=64),
         {"by hadamard 256 while the model runs (R4), config.json's transform_config says hadamard "
          "64"}),
        (lambda groups: groups.clear(), {"(R4), config.json's", "(R3), config.json's"}),
    ],
)  # fmt: skip
def test_a_config_without_what_was_made_is_an_error(
    change: Callable[[dict[str, Any]], None], said: set[str], artifact: Path, tiny: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    path = edited(artifact, tmp_path / "other", change)
    for against in (None, tiny):
        verdict = verify_artifact(path, against=against)
        errors = [f.message for f in verdict.findings if f.severity == "error"]
        assert len(errors) == len(said)
        assert all(any(text in one for one in errors) for text in said), errors
        assert all(one.endswith("; make the artifact again") for one in errors)


def test_a_config_that_rotates_what_was_not_made_for_it_is_an_error(
    artifact: Path, tmp_path: Path
) -> None:
    path = edited(artifact, tmp_path / "other", lambda _: None)
    record = json.loads((path / "qtool.json").read_text())
    del record["rotation"]
    (path / "qtool.json").write_text(json.dumps(record))
    errors = [f.message for f in verify_artifact(path).findings if f.severity == "error"]
    assert len(errors) == 2 and all("rotated by nothing while" in one for one in errors)
    del record["recipe"]  # of another tool
    (path / "qtool.json").write_text(json.dumps(record))
    assert not [f for f in verify_artifact(path).findings if f.severity == "error"]


def test_what_is_in_the_weights_already_asks_for_nothing(artifact: Path, tmp_path: Path) -> None:
    def change(groups: dict[str, Any]) -> None:
        groups["R4"]["apply"].append({**groups["R4"]["apply"][0], "location": "weight_input"})
        groups["R4"]["apply"][0]["targets"] = "re:.*down_proj$"

    path = edited(artifact, tmp_path / "other", change)
    with open_weights(artifact) as weights, open_weights(path) as other:
        assert isinstance(weights, ArtifactWeights) and isinstance(other, ArtifactWeights)
        assert weights.online == other.online and len(other.online.inputs) == 2


def test_a_class_means_the_linear_layers_of_blocks_and_no_embedding(
    artifact: Path, tmp_path: Path
) -> None:
    def change(groups: dict[str, Any]) -> None:
        groups["R4"].update(head_dim=64)
        groups["R4"]["apply"][0].update(targets=["Linear"], ignore=["lm_head"])

    with open_weights(edited(artifact, tmp_path / "other", change)) as weights:
        assert isinstance(weights, ArtifactWeights)
        assert len(weights.online.inputs) == 14
        assert all(".layers." in name for name in weights.online.inputs)


def test_targets_mean_the_same_under_the_prefix_of_an_engine() -> None:
    inner = [f"model.language_model.layers.{n}.mlp.down_proj" for n in range(12)]
    others = [f"model.language_model.layers.{n}.mlp.up_proj" for n in range(12)]
    (target,) = targets_of(inner, [*inner, *others]) or []
    for prefix in ("model.language_model.", "language_model.model.", ""):
        assert named(target, f"{prefix}layers.7.mlp.down_proj")
        assert not named(target, f"{prefix}layers.7.mlp.up_proj")
        assert not named(target, f"{prefix}layers.7.mlp.down_proj.bias")
    assert not named(target, "model.otherlayers.7.mlp.down_proj")
    # A tower with the same names: told apart by a prefix that engines keep, or not at all.
    tower = [f"vision.layers.{n}.mlp.down_proj" for n in range(4)]
    assert targets_of(inner, [*inner, *tower]) is None
    plain = [name.replace("language_model.", "") for name in inner]
    (target,) = targets_of(plain, [*plain, *tower]) or []
    assert named(target, plain[3]) and not any(named(target, name) for name in tower)


def loud_keys(folder: Path, channels: tuple[int, ...]) -> Path:
    """llama with channels of every head of keys 32 times as large."""
    arch_models.build("llama", folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "k_proj" in name:
            for channel in channels:
                tensor.reshape(-1, 8, tensor.shape[-1])[:, channel] *= 32
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return quantizing.add_tokenizer(folder)


CACHE = """# of a test
method: none
format: compressed-tensors
transforms: [rotate, smooth-attention]
rotate: {r1: false, r2: false, r3: true}
kv_cache: {bits: 8, type: float, scale: tensor}
"""


def test_scales_of_keys_are_chosen_before_r3_and_those_of_the_cache_measured_after(
    tmp_path: Path,
) -> None:
    model = loud_keys(tmp_path / "m", (1, 5))  # which rotary embedding turns into each other
    text = quantizing.text_file(tmp_path / "text.txt", 6000)
    given = [f"calibration.source={text}", "calibration.samples=4", "calibration.length=32"]
    (tmp_path / "r.yaml").write_text(CACHE)
    recipe = str(tmp_path / "r.yaml")
    made = {
        r3: quantizing.quantize(model, recipe, tmp_path / r3, *given, f"rotate.r3={r3}", *more).out
        for r3, more in (("true", ()), ("false", ("transforms=[smooth-attention]",)))
    }
    before = Checkpoint.open(model)
    key = "model.layers.1.self_attn.k_proj.weight"
    after = [Checkpoint.open(folder).float32(key) for folder in made.values()]
    assert np.allclose(*after, rtol=1e-4, atol=1e-6)
    divided = (before.float32(key) / after[0])[:, 0].reshape(2, 8)
    assert (divided[:, [1, 5]] > 2 * divided[:, [0, 2, 3, 4, 6, 7]].max(1, keepdims=True)).all()
    # The cache holds k H, and so its scale is of that.
    tokens = calibration_tokens(recipes.load(recipe, given).calibration, model).tokens
    skeleton = Skeleton.open(Checkpoint.open(made["false"]))
    stream = skeleton.embed(tokens)
    largest = {"true": 0.0, "false": 0.0}
    for index in range(2):
        block = skeleton.block(index)
        for number, hidden in enumerate(stream.hidden):
            with smooth_attention._Watch() as watch:
                stream.hidden[number] = block.run(hidden, stream.calls[index][number])
            if index == 1:
                keys = watch.seen[0][1]
                for r3, k in (
                    ("true", online_rotation.rotated(keys.contiguous(), 8)),
                    ("false", keys),
                ):
                    largest[r3] = max(largest[r3], float(k.abs().max()))
    assert largest["true"] != pytest.approx(largest["false"], rel=0.01)
    for r3, folder in made.items():
        (scale,) = Artifact.open(folder).checkpoint.float32("model.layers.1.self_attn.k_scale")
        assert scale == pytest.approx(largest[r3] / 448, rel=1 / 128)


def test_no_other_format_is_made_of_it(artifact: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"inputs that the engine rotates .*R4"):
        artifact_model(artifact, None)
    for text in (
        RECIPE.replace("compressed-tensors", "gptq"),
        "# x\nformat: gguf\ntype: q8_0\ntransforms: [rotate]\nrotate: {r4: true}\n",
    ):
        with pytest.raises(RecipeError, match="r3 and r4 are to be done while the model runs"):
            recipes.parse(text, "r.yaml", "r")


@pytest.mark.parametrize(
    "engine, tp, severity, said",
    [
        ("vllm", 1, "note", "with a kernel for CUDA"),
        ("vllm", 2, "error", "on one GPU only"),
        ("sglang", 1, "error", "reads no transform_config"),
        ("transformers", 1, "error", "reads no transform_config"),
    ],
)
def test_engines_that_do_not_rotate_are_named(
    engine: str, tp: int, severity: str, said: str, artifact: Path
) -> None:
    found = [
        f
        for f in engine_findings(Artifact.open(artifact), engine, tp)
        if f.check == "engine-rotation"
    ]
    assert any(f.severity == severity and said in f.message for f in found)
