"""The CUDA kernels on the host: compiled once a session, then run by the tasks of qtool.cuda."""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.cuda.staging import Host
from qtool.cuda.tasks import FIELDS, Task
from qtool.native.library import aligned
from support.places import ROOT, TESTS

_FOLDERS = (ROOT / "kernels" / "cuda", ROOT / "kernels", TESTS / "gpu")
_FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC"]
if os.environ.get("QTOOL_TEST_DEVICE") != "cuda":  # where any compiler has to do
    _FLAGS += ["-Wall", "-Wextra", "-Werror"]


def _sources() -> list[Path]:
    found = [*_FOLDERS[0].glob("*.h"), *_FOLDERS[1].glob("gguf_*.h"), *_FOLDERS[1].glob("*_body.h")]
    found += _FOLDERS[2].glob("*.h")
    return [TESTS / "cuda" / "emulate.cpp", *sorted(found)]


def build(folder: Path) -> ctypes.CDLL:
    """The library, compiled by the first process of a session that asks for it."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        # Where a GPU is at hand, checks that ran nothing would count as passed.
        assert os.environ.get("QTOOL_TEST_DEVICE") != "cuda", "no g++ or clang++ on PATH"
        pytest.skip("no C++ compiler on PATH (g++ or clang++)")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in _sources())).hexdigest()
    library = folder / f"emulate-{digest[:16]}.so"
    with (folder / "emulate.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            new = library.with_suffix(".new")
            include = [f"-I{path}" for path in _FOLDERS]
            command = [compiler, *_FLAGS, *include, str(_sources()[0]), "-o", str(new)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            new.rename(library)
    opened = ctypes.CDLL(str(library))
    opened.kernel_name.restype = ctypes.c_char_p
    opened.field_name.restype = ctypes.c_char_p
    opened.tensor_core.restype = ctypes.c_float
    opened.read_early.restype = ctypes.c_void_p
    return opened


class Emulator:
    """Runs tasks whose arrays are numpy's."""

    own_nan = False  # whether a NaN that arithmetic makes has other bits than the CPU's
    programmatic = True  # whether kernels wait for those before them

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.core = (25, 16)  # bits and columns of a tensor core (kernels/cuda/tensor.h)

    def tensor_core(
        self, fraction: int, columns: int, a: list[float], b: list[float], before: float
    ) -> float:
        """before + the sum of up to 16 products of float16, as such a tensor core makes it."""
        halves = [np.zeros(16, np.float16) for _ in range(2)]
        for half, numbers in zip(halves, (a, b), strict=True):
            half[: len(numbers)] = numbers
        at = [ctypes.c_void_p(half.ctypes.data) for half in halves]
        self.library.set_core(fraction, columns)
        try:
            return float(self.library.tensor_core(*at, ctypes.c_float(before)))
        finally:
            self.library.set_core(*self.core)

    @cache  # noqa: B019 (one emulator a session)
    def kernels(self) -> list[str]:
        names: list[str] = []
        while (name := self.library.kernel_name(ctypes.c_int64(len(names)))) is not None:
            names.append(name.decode())
        return names

    def fields(self) -> list[str]:
        names: list[str] = []
        while (name := self.library.field_name(ctypes.c_int64(len(names)))) is not None:
            names.append(name.decode())
        return names

    def fault(
        self,
        task: Task,
        elements: int,
        order: int = 0,
        written: NDArray[np.uint8] | None = None,
    ) -> str | None:
        """What the first access was that is not allowed; the kernel's result is in its arrays.

        order: 1 runs the threads of a block backwards. written: what counts as written before.
        """
        arguments = task.arguments()
        fields = (ctypes.c_int64 * len(arguments))(*arguments)
        written = np.zeros(elements, np.uint8) if written is None else written
        what, at, count = ctypes.c_char_p(), ctypes.c_int64(), ctypes.c_int64()
        code = self.library.emulate(
            task.kernel.encode(),
            fields,
            ctypes.c_int64(task.blocks[0]),
            ctypes.c_int64(task.blocks[1]),
            ctypes.c_int64(task.threads),
            order,
            int(task.waits),
            ctypes.c_void_p(written.ctypes.data),
            ctypes.byref(what),
            ctypes.byref(at),
            ctypes.byref(count),
        )
        assert code != 1, f"no kernel {task.kernel}"
        assert code != 3, f"{task.kernel}: {task.threads} threads a block are not the kernel's"
        if what.value is not None:
            return f"{task.kernel}: {what.value.decode()} {at.value} of {count.value}"
        if not written.all():
            return f"{task.kernel}: element {int(np.argmin(written))} of {elements} not written"
        return None

    def early(self) -> set[int]:
        """Where the arrays are that the last task read before it had waited for others."""
        found: set[int] = set()
        while (at := self.library.read_early(ctypes.c_int64(len(found)))) is not None:
            found.add(at)
        return found

    def run(self, task: Task, out: NDArray[Any], order: int = 0) -> NDArray[Any]:
        fault = self.fault(task, out.size, order)
        assert fault is None, fault
        return out


class OnGpu(Emulator):
    """The same tasks on the GPU: arrays go there and back, between bytes that must stay, as what is
    only read must, and counters, which are zero again. QTOOL_TEST_FENCE=0: with nothing around
    them, so that compute-sanitizer knows where they end."""

    own_nan = True
    FENCE = int(os.environ.get("QTOOL_TEST_FENCE", "256"))

    def run(self, task: Task, out: NDArray[Any], order: int = 0) -> NDArray[Any]:
        import torch

        from qtool.cuda.running import launch

        fields, kept, before = dict(task.fields), {}, {}
        place = torch.device("cuda", torch.cuda.current_device())
        for name in (name.removesuffix("_bytes") for name in FIELDS if name.endswith("_bytes")):
            size = fields.get(f"{name}_bytes", 0)
            if not size:
                continue
            raw = np.frombuffer((ctypes.c_uint8 * size).from_address(fields[name]), np.uint8)
            before[name] = np.full(size + 2 * self.FENCE, 0xA5, np.uint8)
            before[name][self.FENCE : self.FENCE + size] = raw
            kept[name] = torch.from_numpy(before[name]).to(place)
            fields[name] = kept[name].data_ptr() + self.FENCE
        launch(replace(task, fields=fields))
        for name, there in kept.items():
            after, end = there.cpu().numpy(), len(before[name]) - self.FENCE
            if name in ("values", "sums"):
                before[name][self.FENCE : end] = after[self.FENCE : end]
            np.testing.assert_array_equal(after, before[name], f"{task.kernel}: {name}")
        found = before["values"]
        made = found[self.FENCE : len(found) - self.FENCE].view(out.dtype).reshape(out.shape)
        if task.kernel.startswith("gemv"):
            # Sums are made in one order, here and on the host, whose tensor core is as published.
            self.core = (25, 16) if torch.cuda.get_device_capability(place) >= (9, 0) else (24, 8)
            self.library.set_core(*self.core)
            host = super().run(task, out, order)
            differ = int((made.view(np.uint8) != host.view(np.uint8)).sum())
            assert not differ or task.kernel != "gemv_sum", differ
            if differ:
                said = f"{task.kernel}: {differ} of {made.nbytes} bytes are not as published"
                warnings.warn(said, stacklevel=1)
        out[...] = made
        return out


class EmulatedPlace:
    """A place (qtool.cuda.staging) whose device is the emulator.

    Nothing is done before `finish`, so that whoever looks, or writes, too early is found out.
    """

    _ONE = Lock()  # the emulator's checks are of one task at a time

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator
        self._asked: list[Callable[[], None]] = []
        self.launched: list[str] = []

    def host(self, nbytes: int) -> Host:
        array = room((nbytes,), np.uint8)
        return Host(array, array)

    def room(self, nbytes: int) -> NDArray[np.uint8]:
        return room((nbytes,), np.uint8)

    def view(self, room: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        kind = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        return room[: kind.itemsize * int(np.prod(shape))].view(kind).reshape(shape)

    def put(self, room: NDArray[np.uint8], host: Host, nbytes: int) -> None:
        self._asked.append(lambda: np.copyto(room[:nbytes], host.handle[:nbytes]))

    def get(self, host: Host, room: NDArray[np.uint8], nbytes: int) -> None:
        self._asked.append(lambda: np.copyto(host.handle[:nbytes], room[:nbytes]))

    def launch(self, *tasks: Task) -> None:
        sizes = {"encode": 1, "measure_squares": 8}

        def run(task: Task) -> None:
            size = sizes.get(task.kernel, sizes.get(task.kernel.split("_")[0], 4))
            with self._ONE:
                fault = self._emulator.fault(task, task.fields["values_bytes"] // size)
            assert fault is None, fault
            self.launched.append(task.kernel)

        self._asked += [partial(run, task) for task in tasks]

    def finish(self) -> None:
        for do in self._asked:
            do()
        self._asked.clear()


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Emulator:
    """One library for all processes of a run; or of all runs that name a folder for it."""
    base = tmp_path_factory.getbasetemp()
    kept = os.environ.get("QTOOL_TEST_EMULATOR")
    library = build(Path(kept) if kept else base if worker_id == "master" else base.parent)
    device = os.environ.get("QTOOL_TEST_DEVICE")
    if device == "ptx":
        from support.cuda.cuda_ptx import OnPtx

        return OnPtx(library)
    return OnGpu(library) if device == "cuda" else Emulator(library)


def room(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array to write, at an address that a GPU's allocator could give."""
    array = aligned(shape, dtype)
    array.view(np.uint8)[:] = 0xA5
    return array


def placed(array: NDArray[Any]) -> NDArray[Any]:
    """A copy at such an address."""
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return copy
