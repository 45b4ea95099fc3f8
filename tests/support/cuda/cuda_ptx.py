"""The CUDA kernels' PTX, run by a machine (ptx/): the third place where the tests of kernels
run, with QTOOL_TEST_DEVICE=ptx, for the architecture that QTOOL_TEST_ARCH names (sm_90)."""

import ctypes
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.cuda.tasks import FIELDS, Task
from support.cuda.cuda_emulation import Emulator
from support.kernels.packed_definitions import same
from support.ptx import building, machine
from support.ptx.arrays import begin_of, of_address
from support.ptx.spaces import NOBODY, SEVERAL

ARRAYS = [name.removesuffix("_bytes") for name in FIELDS if name.endswith("_bytes")]
WRITTEN = ("values", "sums", "done")


class OnPtx(Emulator):
    """Tasks by the machine, which writes into their arrays. What it finds is said in the words of
    the emulated grid."""

    own_nan = True

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self.arch = os.environ.get("QTOOL_TEST_ARCH", "sm_90")
        number = int(self.arch.removeprefix("sm_"))
        self.core = machine.HOPPER if number >= 90 else machine.AMPERE
        self.programmatic = number >= 90  # before, all launches are plain
        self.library.set_core(*self.core)
        self._early: set[int] = set()

    def compiled(self, kernel: str) -> machine.Compiled:
        return building.kernel_of(kernel, self.arch, len(ARRAYS))

    def fault(
        self,
        task: Task,
        elements: int,
        order: int = 0,
        written: NDArray[np.uint8] | None = None,
    ) -> str | None:
        """As of the emulated grid; races are looked for, so that the order of threads is not."""
        own = self.compiled(task.kernel)
        fields, arrays = dict(task.fields), []
        for number, name in enumerate(ARRAYS):
            size = fields.get(f"{name}_bytes", 0)
            address = fields.get(name, 0)
            may = name in WRITTEN
            arrays.append(of_address(name, address, size, may, own.grains["global"]))
            if address:
                fields[name] = begin_of(number)
        values = arrays[ARRAYS.index("values")]
        owner, _ = values.notes()
        each = len(values.bytes) // elements // values.grain
        if written is not None:
            owner[np.repeat(written != 0, each)] = SEVERAL
        waits = task.waits and self.programmatic
        grid = machine.Grid(task.blocks, task.threads, self.core, waits, task.shared)
        parameters = [0, *(fields.get(name, 0) for name in FIELDS)]
        said = machine.run(own, grid, [*arrays, *own.tables], parameters)
        self._early = {array.real for array in arrays if array.early}
        if said is not None:
            return f"{task.kernel}: {said}"
        missing = owner == NOBODY
        if missing.any():
            at = int(np.argmax(missing)) // max(each, 1)
            return f"{task.kernel}: element {at} of {elements} not written"
        return None

    def early(self) -> set[int]:
        return self._early

    def run(self, task: Task, out: NDArray[Any], order: int = 0) -> NDArray[Any]:
        """Products are compared with those of the emulated grid, whose tensor core is the same."""
        found = super().run(task, out, order)
        if task.kernel.startswith(("gemv", "tried")):
            made = found.copy()
            host = Emulator.fault(self, task, out.size, order)
            assert host is None, host
            same(made, out, task.kernel)
        return found
