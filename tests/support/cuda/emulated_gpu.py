"""A GPU that is emulated, with the order of its streams."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qtool.cuda.device import Device, open_gpu
from qtool.messages.progress import Progress
from qtool.quantizing import pipeline
from qtool.recipe.recipe import load
from qtool.runs.request import Request
from support.cuda.cuda_emulation import Emulator, OnGpu
from support.cuda.emulated_cuda import Cuda, emulated


@pytest.fixture
def cuda(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """At the end, nothing was found to be wrong."""
    if isinstance(emulator, OnGpu) or torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with emulated(monkeypatch, emulator) as cuda:
        yield cuda
    assert not cuda.order.faults, "\n".join(cuda.order.faults[:20])


@pytest.fixture
def gpu(cuda: Cuda) -> Iterator[Device]:
    """The second one, asked for on a stream of the caller's: in other threads neither is so."""
    cuda.set_device(1)
    with torch.cuda.stream(torch.cuda.Stream()):
        yield replace(open_gpu(), alone=threading.RLock())
    assert not torch.backends.cuda.mem_efficient_sdp_enabled()  # its gradients differ run by run


def quantized(recipe: str, out: Path, gpu: Device | None, source: Path, *sets: str) -> None:
    loaded = load(recipe, ["calibration.samples=4", "calibration.length=64", *sets])
    asked = Request("m", source, loaded, out, None, 2, 1 << 30, device=gpu)
    pipeline.run(asked, Progress(quiet=True))
