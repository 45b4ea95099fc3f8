"""`fit --device cuda`: forward and backward passes of blocks are there."""

from pathlib import Path

import numpy as np
import pytest

from qtool.cuda.device import Device
from qtool.errors import ResumeError
from qtool.gradients import measure as sensitivities
from qtool.gradients.sensitivity import Sensitivities
from qtool.messages.progress import Progress
from qtool.streaming.skeleton import Skeleton
from qtool.workspaces.workspace import workspace
from support.cuda.cuda_device import device, emulator
from support.cuda.emulated_cuda import Cuda
from support.cuda.emulated_gpu import cuda, gpu
from support.fitting.fitting_runs import SMALL, fitted, tiny
from support.models.arch_models import VOCABULARY
from support.models.small_models import checkpoint
from support.runs.killed_runs import Died, dying
from support.runs.quantizing import Call

__all__ = ["cuda", "device", "emulator", "gpu", "tiny"]

TOKENS = np.random.default_rng(1).integers(3, VOCABULARY, (3, 40), dtype=np.int64)


def measured(models: Path, name: str, device: Device | None) -> Sensitivities:
    skeleton = Skeleton.open(checkpoint(models, name))
    with workspace(models / "out", is_folder=False, nbytes=0, fresh=True) as space:
        found = sensitivities.measure(
            skeleton, TOKENS, 0, space, 2, Progress(quiet=True), together=40, device=device
        )
        space.artifact.write_bytes(b"")
    (models / "out").unlink(missing_ok=True)
    return found


def check_alike(found: Sensitivities, expected: Sensitivities) -> None:
    """To the last digits of sums."""
    assert found.matrices.keys() == expected.matrices.keys()
    assert found.tables.keys() == expected.tables.keys()
    pairs = [(found.head, expected.head)]
    pairs += [(found.tables[name], one) for name, one in expected.tables.items()]
    for name, every in expected.matrices.items():
        pairs += [(found.matrices[name][number], one) for number, one in every.items()]
    for one, other in pairs:
        assert one is not None and other is not None and one.count == other.count
        for left, right in ((one.rows, other.rows), (one.columns, other.columns)):
            np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-4 * float(right.max()))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_sensitivities_are_those_of_the_cpu(name: str, tmp_path: Path, device: Device) -> None:
    check_alike(measured(tmp_path, name, device), measured(tmp_path, name, None))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3", "phi3"])
def test_on_the_emulated_gpu(name: str, cuda: Cuda, gpu: Device, tmp_path: Path) -> None:
    """In the order of streams, and with nothing of the host among what is there."""
    check_alike(measured(tmp_path, name, gpu), measured(tmp_path, name, None))
    assert cuda.ways_back


def test_a_run_of_the_cpu_is_not_continued_there(
    tiny: Path, tmp_path: Path, device: Device
) -> None:
    """Its recipe is made of other last digits; costs of either serve both."""
    out, costs = tmp_path / "a.yaml", tmp_path / "costs.json"
    with pytest.MonkeyPatch.context() as patched, pytest.raises(Died):
        dying(4, patched)
        fitted(tiny, out, bits=4.5)
    with pytest.raises(ResumeError, match=r"device was cpu, is "):
        fitted(tiny, out, bits=4.5, device=device)
    there = fitted(tiny, out, bits=4.5, device=device, costs=costs, fresh=True)
    here = fitted(tiny, tmp_path / "b.yaml", bits=4.5, costs=costs)
    assert here.loss == there.loss


def test_a_budget_of_the_cpus_memory_is_refused_with_it(
    tiny: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtool.runs.request.device_of", lambda asked: asked == "cuda" or None)
    asked = ("--bits", 5, "-o", tmp_path / "a.yaml", "--max-ram", "8GB", "--device", "cuda")
    found = call("fit", tiny, *asked, *SMALL)
    assert found.status == 1 and "leave it out with --device cuda" in found.err
    assert not list(tmp_path.iterdir())
