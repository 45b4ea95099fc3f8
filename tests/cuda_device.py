"""A device whose place is the CPU and whose kernels run in the emulated grid; or the GPU itself,
where QTOOL_TEST_DEVICE=cuda."""

import os
from itertools import count

import pytest
import torch
from cuda_emulation import Emulator, emulator

from qtool.calibrating.device import Device, open_gpu
from qtool.cuda.tasks import Task

__all__ = ["device", "emulator"]


def emulated(emulator: Emulator) -> Device:
    """Every access is checked; every second task runs the threads of its blocks backwards."""
    launches = count()

    def launch(*tasks: Task) -> None:
        for task in tasks:
            size = 1 if task.kernel == "quantize_codes" else 4
            elements = task.fields["values_bytes"] // size
            fault = emulator.fault(task, elements, order=next(launches) % 2)
            assert fault is None, fault

    return Device(torch.device("cpu"), launch, "emulated grid", 1 << 30)


@pytest.fixture(scope="session")
def device(emulator: Emulator) -> Device:
    if os.environ.get("QTOOL_TEST_DEVICE") == "cuda":
        return open_gpu()
    return emulated(emulator)
