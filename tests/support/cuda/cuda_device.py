"""A device whose place is the CPU and whose kernels run in the emulated grid; or the GPU itself,
where QTOOL_TEST_DEVICE=cuda."""

import json
import os
from itertools import count

import pytest
import torch

from qtool.cuda.device import Device, open_gpu
from qtool.cuda.tasks import Task
from support.cuda.cuda_emulation import Emulator, emulator

__all__ = ["device", "emulator"]


_SIZES = {"codes": 1, "f16": 2, "bf16": 2, "sum": 2}  # of what a kernel writes, by its name's end


def _size(task: Task) -> int:
    """Of a number that a kernel writes; products whose blocks share no rows, or count
    themselves, leave no sums."""
    if task.kernel.startswith("gemv") and (task.fields["splits"] == 1 or task.fields.get("done")):
        return 2
    return _SIZES.get(task.kernel.rsplit("_", 1)[-1], 4)


def emulated(emulator: Emulator) -> Device:
    """Every access is checked; every second task runs the threads of its blocks backwards."""
    launches = count()

    def launch(*tasks: Task, programmatic: bool = False) -> None:
        for task in tasks:
            elements = task.fields["values_bytes"] // _size(task)
            fault = emulator.fault(task, elements, order=next(launches) % 2)
            assert fault is None, fault

    return Device(torch.device("cpu"), launch, "emulated grid", 1 << 30)


def keep_divergences(recipe: str, here: float, there: float) -> None:
    """Where QTOOL_TEST_DIVERGENCES names a file, for who wants to know how near a bar is: sums of
    KL divergences of what the CPU made, and the GPU."""
    if name := os.environ.get("QTOOL_TEST_DIVERGENCES"):
        line = json.dumps({"recipe": recipe, "cpu": here, "gpu": there})
        with open(name, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")


@pytest.fixture(scope="session")
def device(emulator: Emulator) -> Device:
    if os.environ.get("QTOOL_TEST_DEVICE") == "cuda":
        return open_gpu()
    return emulated(emulator)
