"""`matrix --device cuda` and `calibrate --device cuda`: measured, quantized and evaluated there."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool.artifacts.artifact import Artifact
from qtool.calibrating import groups
from qtool.calibrating.stats_file import StatsFile
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cuda.device import Device
from qtool.gguf.importance.imatrix import read_importance
from qtool.matrix import shared
from qtool.quality import evaluate as evaluating
from qtool.quantizing.gguf import quantize as gguf_quantize
from support.cuda.cuda_device import emulator
from support.cuda.emulated_cuda import Cuda
from support.cuda.emulated_gpu import cuda, gpu
from support.gguf import gguf_from_hf
from support.models.small_models import checkpoint
from support.runs import quantizing
from support.runs.quantizing import Call

__all__ = ["cuda", "emulator", "gpu"]

GPU = "Emulated (sm_90)"
MINE = """method: gptq
format: gptq
weights: {bits: 4, group_size: 32, symmetric: true}
gptq: {mse: false}
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a command about a small model and text."""
    model = checkpoint(tmp_path, "llama", "bfloat16").path
    text = quantizing.text_file(tmp_path / "text.txt")
    gguf_from_hf.no_vocabulary(monkeypatch)
    return [str(model), "--calibration", str(text), "--samples", "6", "--length", "64"]


def projections(model: Checkpoint) -> list[str]:
    return [name for name in model.tensors if name.endswith("_proj.weight")]


def said(page: Path, beginning: str) -> str:
    """A line of the page."""
    lines = re.sub("<[^>]*>", "\n", page.read_text()).splitlines()
    return next(line for line in lines if line.startswith(beginning))


@pytest.mark.slow
def test_a_matrix(
    words: list[str], cuda: Cuda, gpu: Device, call: Call, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One pass there, codes but for a few those of the CPU; what needs no data is the CPU's; what a
    GPU has calibrated is not taken for the CPU's."""
    mine = tmp_path / "w4.yaml"
    mine.write_text(MINE)
    passes: list[Device | None] = []
    staged: list[bool] = []
    measure, evaluate, run_gguf = shared.measure, evaluating.evaluate, gguf_quantize.run_gguf

    def measured(*given: Any) -> Any:
        passes.append(given[-1])
        return measure(*given)

    def evaluated(*given: Any, device: Device | None = None) -> Any:
        passes.append(device)
        return evaluate(*given, device=device)

    def encoded(request: Any, progress: Any) -> Any:
        staged.append(request.places is not None)
        return run_gguf(request, progress)

    monkeypatch.setattr(shared, "measure", measured)
    monkeypatch.setattr(evaluating, "evaluate", evaluated)
    monkeypatch.setattr(gguf_quantize, "run_gguf", encoded)
    asked = ["matrix", *words, "--recipes", f"{mine},w8-rtn,q4_0"]
    asked += ["--eval", words[2], "--windows", "1"]
    there, here = [*asked, "--device", "cuda", "-o", str(tmp_path / "there")], tmp_path / "here"
    found = call(*there, "--json")
    assert found.status == 0, [one["error"] for one in json.loads(found.out)["artifacts"]]
    made = json.loads(found.out)
    assert [one["status"] for one in made["artifacts"]] == ["made"] * 3
    assert sum(one["kld"] is not None for one in made["artifacts"]) == 2  # the file has no words
    assert {one and one.name for one in passes} == {GPU} and len(passes) == 4 and staged == [True]
    assert made["gpu"] == GPU and cuda.devices == {1}
    assert "--device cuda" in said(tmp_path / "there" / "report.html", "qtool calibrate")
    assert "quantize_sweep" in " ".join(cuda.launched)
    assert GPU in (tmp_path / "there" / "w4" / "qtool.json").read_text()
    again = json.loads(call(*there, "--json").out)
    assert [one["status"] for one in again["artifacts"]] == ["kept"] * 3
    launched = len(cuda.launched)
    passes.clear()
    assert call(*asked, "-o", str(here)).status == 0
    assert len(cuda.launched) == launched and set(passes) == {None} and staged == [True, False]
    for name in ("w8-rtn/model.safetensors", "q4_0.gguf"):
        assert (here / name).read_bytes() == (tmp_path / "there" / name).read_bytes()
    artifacts = [Artifact.open(folder / "w4") for folder in (here, tmp_path / "there")]
    for name in projections(Checkpoint.open(Path(words[0]))):
        one, other = (artifact.read(name) for artifact in artifacts)
        assert np.mean(one.codes != other.codes) < 0.02, name  # type: ignore[union-attr]
    made = json.loads(call(*asked, "-o", str(tmp_path / "there"), "--json").out)
    (failed,) = (one for one in made["artifacts"] if one["status"] == "failed")
    assert failed["recipe"] == "w4" and failed["error"].endswith(
        f"was calibrated on {GPU}, and this run is on the CPU; give --device cuda, or choose "
        "another -o"
    )


def test_statistics(
    words: list[str], cuda: Cuda, gpu: Device, call: Call, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Those of the CPU, to last digits of sums, also where inputs are measured one at a time; the
    files name the GPU."""
    asked = ["calibrate", *words, "--recipe", "w8-gptq"]
    call(*asked, "-o", str(tmp_path / "here"))
    assert not cuda.launched
    paths = tmp_path / "there", tmp_path / "apart"
    call(*asked, "--device", "cuda", "-o", str(paths[0]))
    with monkeypatch.context() as patched:
        patched.setattr(groups, "gram_sum_bytes", lambda width: gpu.sums_bytes)
        call(*asked, "--device", "cuda", "-o", str(paths[1]))
    wanted, *found = (StatsFile.open(path) for path in (tmp_path / "here", *paths))
    assert "gpu" not in wanted.metadata
    for one, name in product(found, projections(Checkpoint.open(Path(words[0])))):
        assert one.metadata["gpu"] == GPU and one.fields == wanted.fields
        stats, expected = (file.read(name, wanted.fields) for file in (one, wanted))
        assert stats.count == expected.count > 0
        for need in wanted.fields:
            array = getattr(expected, need)
            rough = 1e-5 * float(np.abs(array).max())
            np.testing.assert_allclose(getattr(stats, need), array, rtol=1e-4, atol=rough)
    made = call(*asked[:-2], "--device", "cuda", "--imatrix", tmp_path / "imatrix.gguf")
    assert made.status == 0, made.err
    assert GPU in str(read_importance(tmp_path / "imatrix.gguf").calibration)
