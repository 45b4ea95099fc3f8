"""What `qtool verify` measures of a matrix: scales, zeros, groups, and what no config explains."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool.artifacts.artifact import Artifact
from qtool.methods import rtn
from qtool.scheme import GroupQuant, Scheme
from qtool.verification.matrix import measure
from qtool.verification.run import verify_artifact
from qtool.verification.zero_convention import check_convention
from support.formats.artifact_files import random_quant, write_folder
from support.formats.packed_files import compressed_tensors
from support.formats.packed_files import write as write_packed
from support.verification.verified_folders import LAYER, Q, folder_of


@pytest.mark.parametrize(
    ("symmetric", "share", "wrong"), [(True, 0.5, False), (True, 0.01, True), (False, 0.5, True)]
)
def test_negative_scales(symmetric: bool, share: float, wrong: bool, tmp_path: Path) -> None:
    """Symmetric integers have them about as often as positive ones, where a method has any."""
    quant = random_quant(Scheme(4, 32, symmetric), 64, 64)
    scale = np.abs(quant.scale)
    scale.reshape(-1)[: int(share * scale.size)] *= -1
    out = tmp_path / "out"
    out.mkdir()
    write_folder(out, "gptq", {Q: replace(quant, scale=scale)}, {})
    found = [f for f in verify_artifact(out).findings if f.check == "scales"]
    assert bool(found) is wrong


def test_weights_that_no_config_explains(tmp_path: Path) -> None:
    tensors = {f"{Q}.weight": ("F8_E4M3", np.ones((32, 32), np.uint8))}
    folder = write_packed(tmp_path / "out", tensors, {})
    (folder / "config.json").write_text('{"model_type": "x"}')
    found = [f for f in verify_artifact(folder).findings if f.check == "dtypes"]
    assert [(f.severity, f.name) for f in found] == [("error", f"{Q}.weight")]
    assert "F8_E4M3, and no quantization_config" in found[0].message


def test_parts_of_a_matrix_that_is_not_there(tmp_path: Path) -> None:
    """But for the scales of an activation, which AutoAWQ stores under a name like theirs."""
    scales = ("F16", np.ones((2, 32), np.float16))
    tensors = {f"{Q}.scales": scales, f"{LAYER}.mlp.act.scales": scales}
    found = verify_artifact(write_packed(tmp_path / "out", tensors, {})).findings
    (alone,) = [f for f in found if f.check == "tensors" and f.severity == "error"]
    assert alone.name == f"{Q}.scales" and alone.message.startswith("1 tensor (")


@pytest.mark.parametrize(
    ("dynamic", "stored", "said"),
    [
        (True, None, ""),
        (False, 0.5, ""),
        (False, None, "input_scale of 1 matrix is missing"),
        (False, np.nan, "not positive"),
        (False, 0.0, "not positive"),
    ],
)
def test_scales_of_activations(
    dynamic: bool, stored: float | None, said: str, tmp_path: Path
) -> None:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    config = compressed_tensors("int-quantized", weights)
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": dynamic}
    config["config_groups"]["group_0"]["input_activations"] = inputs
    tensors = {
        f"{Q}.weight": ("I8", np.ones((8, 32), np.int8)),
        f"{Q}.weight_scale": ("F32", np.ones((8, 1), np.float32)),
    }
    if stored is not None:
        tensors[f"{Q}.input_scale"] = ("F32", np.full(1, stored, np.float32))
    verdict = verify_artifact(write_packed(tmp_path / "out", tensors, config))
    found = [f for f in verdict.findings if f.check == "input-scales"]
    assert [f.name for f in found] == ([f"{Q}.input_scale"] if said else [])
    assert not said or said in found[0].message


def quant_of(**changes: Any) -> GroupQuant:
    plain = random_quant(Scheme(4, 32, False), 8, 64)
    fields = {"codes": plain.codes, "scale": plain.scale, "zero": plain.zero} | changes
    return GroupQuant(plain.scheme, **fields)


def test_what_is_measured(tmp_path: Path) -> None:
    artifact = folder_of(tmp_path, "gptq").artifact
    entry = artifact.entry(Q)
    scale = np.full((8, 2), 0.01, np.float16)
    scale[0] = np.nan, np.inf
    scale[1] = 0, -1
    scale[2, 0] = 1e-6
    codes = np.tile(np.arange(64, dtype=np.uint8) % 16, (8, 1))
    codes[5] = 3
    zero = np.full((8, 2), 7, np.uint8)
    found = measure(artifact, entry, quant_of(codes=codes, scale=scale, zero=zero))
    assert (found.scales, found.not_finite, found.zero_scales) == (16, 2, 1)
    assert (found.negative, found.subnormal, found.same_rows) == (1, 1, 1)
    assert (found.low_code, found.high_code) == (0, 15)
    assert found.zeros is not None and found.zeros.is_only(7)
    assert found.zeros.offset == pytest.approx((7 * 7.5 + 3) / 8 - 7)
    zero[:, 0] = 0  # of codes that are on average 7.5: not beyond the half of the range
    assert _far(artifact, codes, zero) == 0
    codes[:4, :32] = 12
    assert _far(artifact, codes, zero) == 4


def _far(artifact: Artifact, codes: Any, zero: Any) -> int:
    zeros = measure(artifact, artifact.entry(Q), quant_of(codes=codes, zero=zero)).zeros
    assert zeros is not None
    return zeros.at_ends


def test_uneven_groups(tmp_path: Path) -> None:
    artifact = folder_of(tmp_path, "gptq").artifact
    index = np.arange(64, dtype=np.int32)[::-1] // 32
    even = measure(artifact, artifact.entry(Q), quant_of(g_idx=index.copy()))
    assert even.reordered and not even.uneven
    index = np.where(np.arange(64) < 40, 0, 1).astype(np.int32)
    assert measure(artifact, artifact.entry(Q), quant_of(g_idx=index)).uneven == 2


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_means_tell_the_convention(bits: int, shift: int, tmp_path: Path) -> None:
    """Of eight bits only all matrices together do: a sound one's mean is often a step off."""
    rng, quants = np.random.default_rng(bits), {}
    for index in range(64):
        weight = rng.normal(0, 1, (64, 64)).astype(np.float32)
        rounded = rtn.quantize(weight, None, Scheme(bits, 64, False), rtn.Options()).quant
        zero = (rounded.zero.astype(int) - shift).clip(0, (1 << bits) - 1).astype(np.uint8)
        quants[f"model.layers.{index}.self_attn.q_proj"] = replace(rounded, zero=zero)
    out = tmp_path / "out"
    out.mkdir()
    write_folder(out, "gptq", quants, {})
    artifact = Artifact.open(out)
    measured = [measure(artifact, artifact.entry(name), quants[name]) for name in quants]
    offsets = [m.zeros.offset for m in measured if m.zeros]
    assert len(offsets) == 64 and (max(offsets) - min(offsets) > 2) == (bits == 8)
    found = [*check_convention(artifact, measured)]
    assert [(f.severity, f.check) for f in found] == [("error", "zero-convention")] * abs(shift)
    assert all("the zeros of all matrices" in f.message for f in found)
