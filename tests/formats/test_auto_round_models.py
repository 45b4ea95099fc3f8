"""Whole models in AutoRound's config: verified, damaged, converted, refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cuda.device import Device
from qtool.quality.reading import OnDevice
from qtool.quality.weights import open_weights
from qtool.verification.engines.rules import engine_findings
from qtool.verification.run import verify_artifact
from support.converting.converting import converted, first_block
from support.cuda.cuda_device import device, emulator
from support.formats import other_tools as other
from support.formats.auto_round_files import (
    AWQ,
    V1,
    V2,
    config,
    folder,
    random_quant,
    rounded,
    stored,
    values,
)
from support.formats.packed_files import write
from support.verification.verifying import but_digests, serious

__all__ = ["device", "emulator"]

HEALTHY = [(V1, 4, True), (V1, 4, False), (V1, 8, True), (V1, 3, True), (V2, 4, False),
           (V2, 2, False), (AWQ, 4, False), (AWQ, 4, True)]  # fmt: skip


@pytest.mark.parametrize(("packing", "bits", "symmetric"), HEALTHY)
def test_healthy_ones_pass(packing: str, bits: int, symmetric: bool, tmp_path: Path) -> None:
    path, expected = folder(tmp_path / "out", packing, bits, symmetric)
    source = other.folder(tmp_path / "source", other.model(other.dense), {})
    verdict = verify_artifact(path, against=source, threads=1)
    assert not but_digests(verdict.findings) and len(verdict.layers) == 14
    found = dict(Artifact.open(path).dequantized())
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_few_weights_clipped_hard_are_no_folds(damaged: bool, tmp_path: Path) -> None:
    """As its search leaves a matrix of 8 bits whose columns do not count alike."""
    last = "model.layers.1.mlp.down_proj"

    def store(module: str, weight: NDArray[np.float32]) -> other.Tensors:
        weight = weight.copy()
        weight[:, ::64] *= 8  # the columns that are clipped
        kept = weight.copy()
        kept[::2, ::64] /= 1.7
        quant = rounded(kept, 8, True)
        wide = np.repeat(quant.scale.astype(np.float32), 128, 1)
        quant.codes[:] = np.clip(np.rint(weight / wide) + 128, 0, 255)
        if damaged and module == last:
            quant.scale[:] /= 2
        return stored(V1, module, quant)

    def source(module: str, weight: NDArray[np.float32]) -> other.Tensors:
        weight = weight.copy()
        weight[:, ::64] *= 8
        return {f"{module}.weight": ("F32", weight)}

    path = other.folder(tmp_path / "out", other.model(store), config(bits=8))
    of = other.folder(tmp_path / "source", other.model(source), {})
    verdict = verify_artifact(path, against=of, threads=1)
    assert {f.name for f in but_digests(verdict.findings)} == (
        {f"{last}.weight"} if damaged else set()
    )
    assert max(layer.relative_error for layer in verdict.layers) > 0.05


@pytest.mark.parametrize(("says", "holds"), [(V1, V2), (V2, V1)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_by_another_convention_are_found(
    says: str, holds: str, symmetric: bool, tmp_path: Path
) -> None:
    path, _ = folder(tmp_path, holds, 4, symmetric)
    file = path / "config.json"
    said = json.loads(file.read_text())
    said["quantization_config"]["packing_format"] = says
    file.write_text(json.dumps(said))
    found = [f for f in serious(path) if f.check == "zero-convention"]
    assert len(found) == 1 and f"set packing_format to {holds}" in found[0].message


def test_damage_is_found(tmp_path: Path) -> None:
    path, _ = folder(tmp_path / "out", V1, 4, True)
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    start, end = header["model.layers.1.mlp.up_proj.scales"]["data_offsets"]
    data[8 + length + start : 8 + length + end] = b"\0" * (end - start)
    file.write_bytes(data)
    assert {f.name for f in serious(path)} == {"model.layers.1.mlp.up_proj.weight"}


def test_the_config_against_the_tensors(tmp_path: Path) -> None:
    """A layer that is dense must stand in extra_config; one that is quantized must not."""
    left: dict[str, other.Store] = {"1.mlp.down_proj": other.dense}
    tensors = other.model(lambda m, w: stored(V1, m, rounded(w, 4, True)), left)
    silent = other.folder(tmp_path / "a", tensors, config())
    said = other.folder(
        tmp_path / "b", tensors, config(extra_config={r".*1\.mlp\.down.*": {"bits": 16}})
    )
    both = config(
        extra_config={r".*1\.mlp\.down.*": {"bits": 16}, r".*0\.mlp\.down.*": {"bits": 16}}
    )
    wrong = other.folder(tmp_path / "c", tensors, both)
    down = "model.layers.{}.mlp.down_proj"
    for engine in ("vllm", "sglang", "transformers"):
        checks = [(f.check, f.name) for f in serious(silent, engine)]
        assert checks == [("engine-skip-list", down.format(1))]
        assert not serious(said, engine)
        checks = [(f.check, f.name) for f in serious(wrong, engine)]
        assert checks == [("engine-skip-list", down.format(0))]
    for path, block in ((silent, 1), (wrong, 0)):
        assert [(f.check, f.name) for f in serious(path)] == [("dense-list", down.format(block))]


@pytest.mark.parametrize(
    ("engine", "packing", "bits", "symmetric", "more", "expected"),
    [
        ("vllm", V1, 4, True, {}, []),
        ("vllm", V1, 4, False, {}, ["error engine-scheme"]),
        ("vllm", V1, 3, True, {}, ["warning engine-slow"]),
        ("vllm", V2, 4, True, {}, ["error engine-format"]),
        ("vllm", AWQ, 4, False, {}, []),
        ("vllm", AWQ, 4, True, {}, ["warning engine-slow"]),
        ("vllm", V1, 4, True, {"backend": "auto_round:exllamav2"}, ["error engine-format"]),
        ("vllm", V1, 4, True, {"quant_method": "intel/auto-round"}, ["error engine-format"]),
        ("sglang", V1, 8, True, {}, []),
        ("sglang", V1, 4, False, {}, ["error engine-scheme"]),
        ("sglang", V1, 3, True, {}, ["error engine-scheme"]),
        ("sglang", AWQ, 4, False, {}, []),
        ("sglang", AWQ, 4, True, {}, ["warning engine-slow"]),
        ("sglang", "auto_round:gptqmodel", 4, True, {}, ["error engine-format"]),
        ("transformers", V2, 2, False, {}, ["note engine-route"]),
        ("transformers", V1, 4, False, {}, ["warning engine-route", "note engine-route"]),
        ("transformers", V1, 4, True, {}, ["note engine-route"]),
        ("transformers", AWQ, 4, True, {}, ["warning engine-route", "note engine-route"]),
        ("transformers", V1, 4, True, {"quant_method": "intel/auto-round"},
         ["error engine-format", "note engine-route"]),
        ("exllama", V1, 4, True, {}, ["error engine-format"]),
    ],
)  # fmt: skip
def test_engines(
    engine: str, packing: str, bits: int, symmetric: bool, more: Any, expected: list[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    path, _ = folder(tmp_path, packing, bits, symmetric, **more)
    found = engine_findings(Artifact.open(path), engine, 1)
    assert [f"{f.severity} {f.check}" for f in found] == expected


def test_sglang_wants_whole_names(tmp_path: Path) -> None:
    """An expression that means a part of a name leaves nothing dense there."""
    left: dict[str, other.Store] = {"mlp.down_proj": other.dense}
    tensors = other.model(lambda m, w: stored(V1, m, rounded(w, 4, True)), left)
    part = config(extra_config={r"mlp\.down_proj$": {"bits": 16}})
    path = other.folder(tmp_path, tensors, part)
    artifact = Artifact.open(path)
    assert not engine_findings(artifact, "vllm", 1)
    assert [f.check for f in engine_findings(artifact, "sglang", 1)] == ["engine-skip-list"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, NDArray[np.float32]]]:
    """A block of `tiny` in 4 bits with its tokenizer, and its weights."""
    root = tmp_path_factory.mktemp("tiny")
    checkpoint = Checkpoint.open(first_block(root / "model"))
    tensors, expected = {}, {}
    for name in checkpoint.tensors:
        weight = expected[name] = checkpoint.float32(name)
        if "_proj" in name:
            quant = rounded(weight, 4, True)
            tensors |= stored(V1, name.removesuffix(".weight"), quant)
            expected[name] = values(quant)
        else:
            tensors[name] = other.bfloat16(weight)
    path = root / "model"
    write(path, tensors, {})
    said = dict(checkpoint.config) | {"quantization_config": config()}
    (path / "config.json").write_text(json.dumps(said))
    return path, expected


@pytest.mark.parametrize("to", ["awq", "gptq", "compressed-tensors", "gguf", "hf"])
def test_conversion_changes_no_number(
    to: str, tiny: tuple[Path, dict[str, NDArray[np.float32]]], tmp_path: Path
) -> None:
    path, expected = tiny
    out = tmp_path / ("out.gguf" if to == "gguf" else "out")
    converted(path, to, out, dtype="float32" if to == "hf" else None)
    if to == "gguf":
        converted(out, "hf", out := tmp_path / "out", dtype="float32")
    found = dict(Artifact.open(out).dequantized())
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.slow
def test_a_gpu_reads_the_same_weights(device: Device, tmp_path: Path) -> None:
    """Zeros that borrow are left to the CPU."""
    module = "model.layers.0.mlp.up_proj"
    for least in (0, 1):
        quant = random_quant(4, 128, False, least)
        quant.zero[::3] = least
        path = write(tmp_path / str(least), stored(V1, module, quant), config(sym=False))
        with open_weights(path) as weights:
            np.testing.assert_array_equal(weights.float32(f"{module}.weight"), values(quant))
            found = OnDevice(weights, device).packed(f"{module}.weight")
            assert (found is None) == (least == 0)
            if found is not None:
                out = torch.empty(found.shape, device=device.place)
                device.launch(found.dense(out))
                np.testing.assert_array_equal(out.cpu().numpy(), values(quant))
