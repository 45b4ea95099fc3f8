"""A norm that its readers do not compensate for is told against the source, sound folds are not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool import tiny
from qtool.verification.against.side_by_side import Floats, SideBySide, rows_of_array
from qtool.verification.against.taken import taken
from qtool.verification.finding import Finding
from qtool.verification.run import verify_artifact
from support.runs.quantizing import build, quantize
from support.verification.verifying import forget_digests

TINY = Path(tiny.__file__).parent
ATTENTION = "model.layers.1.input_layernorm.weight"
MLP = "model.layers.1.post_attention_layernorm.weight"
FINAL = "model.norm.weight"
FEW = ("calibration.samples=4", "calibration.length=64")
Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(
    scope="module",
    params=["w4g128-rtn", "w4g128-awq", "nvfp4", "w8a8-dynamic", "w8a8-smoothquant", "fp8-dynamic"],
)
def healthy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made-up") / str(request.param)
    quantize(
        TINY, request.param, out, *(FEW if out.name in ("w4g128-awq", "w8a8-smoothquant") else ())
    )
    forget_digests(out)
    return out


def changed(folder: Path, name: str, change: Change, out: Path) -> Path:
    out.mkdir()
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    tensors = load_file(out / "model.safetensors")
    tensors[name] = change(tensors[name].float()).to(tensors[name].dtype)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def errors(folder: Path, source: Path = TINY) -> list[Finding]:
    verdict = verify_artifact(folder, against=source, threads=1)
    return [f for f in verdict.findings if f.severity == "error"]


def test_sound_ones_are_silent(healthy: Path) -> None:
    assert errors(healthy) == []


@pytest.mark.parametrize("name", [ATTENTION, MLP, FINAL])
@pytest.mark.parametrize("by", [1 / 1.1, 1.1, 1.2])
def test_a_small_factor_is_told(healthy: Path, name: str, by: float, tmp_path: Path) -> None:
    """Beside folds the only matrix that tells the factor may be told in place of the norm."""
    found = errors(changed(healthy, name, lambda w: w * by, tmp_path / "x"))
    others = ["model.layers.1.mlp.gate_proj.weight"] if healthy.name == "w4g128-awq" else []
    assert {name, *others} & {f.name for f in found}


def test_channels_that_are_slightly_off_are_told(healthy: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)

    def noisy(weight: torch.Tensor) -> torch.Tensor:
        return weight * torch.exp(0.08 * torch.randn(weight.shape, generator=generator))

    assert errors(changed(healthy, ATTENTION, noisy, tmp_path / "x"))


@pytest.mark.parametrize("by", [1.3, -1.0])
def test_a_single_channel_is_told(healthy: Path, by: float, tmp_path: Path) -> None:
    def one(weight: torch.Tensor) -> torch.Tensor:
        weight[10] *= by
        return weight

    assert errors(changed(healthy, ATTENTION, one, tmp_path / "x"))


@pytest.mark.parametrize("name", [ATTENTION, MLP, "model.layers.1.self_attn.q_norm.weight"])
def test_a_norm_of_one_plus_its_weight(name: str, tmp_path: Path) -> None:
    """Of which one is read by no matrix."""
    model = build("gemma3", tmp_path / "m")
    quantize(model, "w4g32-gptq", tmp_path / "out", "method=rtn")
    forget_digests(tmp_path / "out")
    assert errors(tmp_path / "out", model) == []
    folder = changed(tmp_path / "out", name, lambda w: (1 + w) * 1.1 - 1, tmp_path / "x")
    assert name in [f.name for f in errors(folder, model) if f.check in ("norms", "folds")]


def _one(ratio: Floats, columns: Floats, rows: Floats) -> tuple[float, float, float]:
    """Gain, slope and unlikeness of a noisy matrix with these scales."""
    random = np.random.default_rng(0)
    source = random.standard_normal((256, 128)).astype(np.float32)
    noise = 0.1 * random.standard_normal(source.shape).astype(np.float32)
    stored = rows[:, None] * (source + noise) * columns
    pair = SideBySide((256, 128), rows_of_array(stored), rows_of_array(source))
    target = source * ratio
    fitted = ((stored * target).sum(axis=1) / np.square(target).sum(axis=1)).astype(np.float32)
    found = taken(pair, {"n": ratio}, {"n": fitted})["n"]
    return found.gain, found.slope, found.unlike


def test_what_a_matrix_has_taken_up() -> None:
    ones, out = np.ones(128, np.float32), np.ones(256, np.float32)
    ratio = np.exp(np.random.default_rng(1).standard_normal(128) * 0.3).astype(np.float32)
    gain, slope, unlike = _one(ratio, ratio, out)
    assert abs(gain) < 0.005 and abs(slope - 1) < 0.02 and unlike < 0.01
    assert abs(_one(ratio, ratio * np.float32(1.1), out)[0] - np.log(1.1)) < 0.005
    assert abs(_one(ratio, ones, out)[1]) < 0.02
    spread = np.exp(np.random.default_rng(2).standard_normal(256) * 0.3).astype(np.float32)
    assert np.isnan(_one(ratio, ratio, spread)[0])
