"""mlx-lm loads what is written in MLX's format, on any machine's CPU: the same weights to the bit,
and the logits of an evaluation in float32; and what mlx-lm writes is read alike.

    QTOOL_ORACLE_MLX   mlx[cpu] 0.32.4, mlx-lm 0.32.2, transformers 5.24.0
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.formats.mlx_experts import stack_of
from qtool.hub import tiny_folder
from qtool.quality.weights import open_weights
from qtool.scheme import GroupQuant
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.workers import Workers
from qtool.verification.run import verify_artifact
from support.converting import converting
from support.gguf import gguf_models
from support.runs import quantizing

pytestmark = pytest.mark.oracle

FEW = ("calibration.samples=4", "calibration.length=64")


# What mlx-lm calls modules of two classes, by what checkpoints have there.
_OTHERWISE = {
    "nemotron_h": {f"switch_mlp.{one}_proj": f"switch_mlp.{other}"
                   for one, other in (("up", "fc1"), ("down", "fc2"))},
    "lfm2_moe": {f"feed_forward.{one}": f"feed_forward.{other}_proj"
                 for one, other in (("w1", "gate"), ("w2", "down"), ("w3", "up"))},
}  # fmt: skip


def place_of(name: str, kind: str) -> tuple[str, Any]:
    """mlx-lm's tensor, and where in it a tensor of the checkpoint is."""
    stack, place = stack_of(name) or (name, ...)
    for ours, theirs in _OTHERWISE.get(kind, {}).items():
        stack = stack.replace(ours, theirs)
    return stack, place


def loaded(
    ask: Callable[..., object], folder: Path, out: Path, alike: bool = True, **more: Any
) -> None:
    """Weights are equal, and, where alike, logits nearly: sums are made in another order."""
    tokens = np.random.default_rng(0).integers(3, 90, (1, 40), dtype=np.int64)
    request = {"folder": str(folder), "tokens": tokens.tolist(), "out": str(out), **more}
    found = ask("mlx_model.py", request)
    theirs = np.load(out)
    artifact = Artifact.open(folder)
    entries = artifact.entries.items()
    kind = artifact.checkpoint.config["model_type"]
    places = {name: place_of(name, kind) for name, entry in entries if entry.scheme}
    assert {*theirs.files} - {"logits"} == {stack for stack, _ in places.values()}
    assert found == len(theirs.files) - 1 and (found or more.get("bits", 0) is None)
    for name, (stack, place) in places.items():
        ours = artifact.read(name)
        assert isinstance(ours, GroupQuant)
        assert np.array_equal(theirs[stack][place], ours.dequantize()), name
    with open_weights(folder) as weights, Workers(1) as workers:
        logits = Skeleton.open(weights).logits(tokens, workers).numpy()
    off = np.abs(theirs["logits"] - logits).max()
    assert not alike or off < 1e-4 * np.abs(logits).max()


@pytest.mark.parametrize(
    ("recipe", "sets"),
    [
        ("w4g64-mlx-rtn", ("weights.bits=2", "weights.group_size=32")),
        ("w4g64-mlx-rtn", ("weights.bits=5", "weights.group_size=128")),
        ("w8g64-mlx-rtn", ()),
        ("w8g64-mlx-rtn", ("weights.bits=6", "weights.symmetric=true")),
        ("w3g64-mlx-awq-gptq", FEW),
        ("w4g64-mlx-awq-gptq", (*FEW, 'overrides=[{match: "*_proj", weights: {bits: 5}}]')),
        ("mxfp4", ("format=mlx", "mlx.head=6")),
        ("nvfp4", ("format=mlx",)),
        ("mxfp4", ("format=mlx", "weights.type=mxfp8", "weights.bits=8")),
    ],
)
def test_of_tiny(
    mlx: Callable[..., object], recipe: str, sets: tuple[str, ...], tmp_path: Path
) -> None:
    out = quantizing.quantize(tiny_folder(), recipe, tmp_path / "out", *sets).out
    loaded(mlx, out, tmp_path / "theirs.npz")


# Keys of config.json that mlx-lm asks for, and transformers 5 writes elsewhere or leaves out.
_ASKED = {
    "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "rope_scaling": None,
    "shared_intermediate_size": 0,
}  # fmt: skip


def built(name: str, folder: Path) -> Path:
    """A random model, with the keys that mlx-lm asks for."""
    gguf_models.build(name, folder)
    config = json.loads((folder / "config.json").read_text())
    asked = _ASKED | {k: v for k, v in (config.get("rope_parameters") or {}).items() if k in _ASKED}
    if config["model_type"] == "lfm2":
        asked |= {"block_dim": config["hidden_size"], "block_ff_dim": config["intermediate_size"],
                  "block_ffn_dim_multiplier": 1.0}  # fmt: skip
    if config["model_type"] == "mamba2":
        asked["intermediate_size"] = config["expand"] * config["hidden_size"]
    if "num_local_experts" in config:
        asked["num_experts"] = config["num_local_experts"]
    (folder / "config.json").write_text(json.dumps(asked | config))
    return folder


@pytest.mark.parametrize(
    "name",
    ["qwen3-untied", "olmo2", "smollm3", "phi3", "glm4", "mixtral", "qwen2-moe", "qwen3-moe",
     "olmoe", "minimax-m2", "ernie4.5-moe", "glm4-moe-plain", "deepseek-v3-plain", "lfm2-moe"],
)  # fmt: skip
def test_other_models(mlx: Callable[..., object], name: str, tmp_path: Path) -> None:
    """Embeddings, heads and experts among what is quantized."""
    model = built(name, tmp_path / "model")
    sets = ("weights.group_size=32", "indivisible=dense")
    out = quantizing.quantize(model, "w4g64-mlx-rtn", tmp_path / "out", *sets).out
    stacks = [n for n in Checkpoint.open(out).tensors if ".switch_mlp." in n]
    assert bool(stacks) == ("moe" in name or name in ("mixtral", "minimax-m2", "deepseek-v3-plain"))
    loaded(mlx, out, tmp_path / "theirs.npz")


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_experts_of_small_floats(
    mlx: Callable[..., object], kind: str, name: str, tmp_path: Path
) -> None:
    model = built(name, tmp_path / "model")
    sets = ("format=mlx", "indivisible=dense")
    out = quantizing.quantize(model, kind, tmp_path / "out", *sets).out
    stored = Checkpoint.open(out).tensors.items()
    assert {"U8"} == {info.dtype for n, info in stored if "switch_mlp" in n and "scales" in n}
    loaded(mlx, out, tmp_path / "theirs.npz")


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_converted(mlx: Callable[..., object], name: str, tmp_path: Path) -> None:
    """Of compressed-tensors, to the byte."""
    bits = "weights.bits=" + name[-1]
    ours = quantizing.quantize(
        tiny_folder(), "mxfp4", tmp_path / "ours", f"weights.type={name}", bits
    ).out
    converting.run(ours, "mlx", tmp_path / "mlx")
    loaded(mlx, tmp_path / "mlx", tmp_path / "theirs.npz")


@pytest.mark.parametrize(
    ("mode", "bits", "group"),
    [*(("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)),
     ("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)],
)  # fmt: skip
def test_what_mlx_lm_makes(
    mlx: Callable[..., object], mode: str, bits: int, group: int, tmp_path: Path
) -> None:
    source = str(tiny_folder())
    made = {"source": source, "bits": bits, "group": group, "mode": mode}
    loaded(mlx, tmp_path / "made", tmp_path / "theirs.npz", **made)


# Of the others mlx-lm's logits are not transformers', of the checkpoint itself either.
_ALIKE = ("falcon-mamba", "nemotron-h", "lfm2", "lfm2-moe")


@pytest.mark.parametrize("bits", [4, None])
@pytest.mark.parametrize("name", [*_ALIKE, "mamba", "mamba2", "jamba", "nemotron-h-moe"])
def test_convolutions_that_lie_otherwise(
    mlx: Callable[..., object], name: str, bits: int | None, tmp_path: Path
) -> None:
    """Codes, and plain files; the latter are the checkpoint's to the bit."""
    source = built(name, tmp_path / "model")
    made = {"source": str(source), "bits": bits, "group": 32, "mode": "affine"}
    loaded(mlx, tmp_path / "made", tmp_path / "theirs.npz", alike=name in _ALIKE, **made)
    if bits is None:
        before, after = (Artifact.open(one) for one in (source, tmp_path / "made"))
        assert before.entries.keys() ^ after.entries.keys() <= {"lm_head.weight"}  # if tied
        for one in before.entries.keys() & after.entries.keys():
            assert after.entries[one].shape == before.entries[one].shape
            assert np.array_equal(after.read(one), before.read(one)), one


@pytest.mark.parametrize("mode", ["mxfp4", "affine"])
def test_gpt_oss(mlx: Callable[..., object], mode: str, tmp_path: Path) -> None:
    """As it is released, and as mlx-lm saves that with the rest in codes: experts are to the bit
    what they were, and logits mlx-lm's."""
    source = built("gpt-oss-mxfp4", tmp_path / "model")
    bits, group = (4, 32) if mode == "mxfp4" else (8, 64)
    made = tmp_path / "made"
    tokens = np.random.default_rng(0).integers(3, 90, (1, 40), dtype=np.int64)
    request = {"source": str(source), "folder": str(made), "bits": bits, "group": group}
    request |= {"mode": mode, "tokens": tokens.tolist(), "out": str(tmp_path / "out.npz")}
    mlx("mlx_model.py", request)
    theirs = np.load(tmp_path / "out.npz")
    before, after = Artifact.open(source), Artifact.open(made)
    assert before.entries.keys() == after.entries.keys()
    stacked = {name for name, entry in after.entries.items() if entry.stacked}
    assert len(stacked) == 8
    for name in stacked:
        assert np.array_equal(after.read(name), before.read(name)), name
    for name, entry in after.entries.items():
        if entry.scheme is not None and name not in stacked:
            assert np.array_equal(theirs[name], after.read(name).dequantize()), name  # type: ignore[union-attr]
    with open_weights(made) as weights, Workers(1) as workers:
        logits = Skeleton.open(weights).logits(tokens, workers).numpy()
    assert np.abs(theirs["logits"] - logits).max() < 1e-4 * np.abs(logits).max()
    assert not [f for f in verify_artifact(made).findings if f.severity == "error"]
    dense = converting.run(made, "hf", tmp_path / "dense", dtype="float32")
    plain = Checkpoint.open(dense)
    assert all(np.array_equal(plain.float32(name), before.read(name)) for name in stacked)
