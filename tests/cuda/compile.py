"""Compiles every CUDA kernel with nvcc for every architecture: `make cuda-kernels`.

Warnings are errors. ptxas tells the registers and spills of each kernel; a spill fails. Arrays that
a kernel indexes as it runs lie in local memory by design and are no spills: the largest are told.
Where cuda-core is installed, they are compiled with NVRTC as well, each as it will be on a GPU
machine, and launched by a driver that has no GPU. Needs nvcc and no GPU.
"""

import importlib.util
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ARCHS = ["75", "80", "86", "89", "90", "100", "120"]
FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Werror", "all-warnings", "-Xptxas", "-v"]
_KERNEL = re.compile(
    r"Compiling entry function '(\w+)' for '(sm_\w+)'"
    r".*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


class Kernel(NamedTuple):
    """What ptxas says of a kernel for an architecture; bytes are of each thread."""

    name: str
    arch: str
    local: int
    spilled: int
    registers: int


def kernels(said: str) -> Iterator[Kernel]:
    """All that ptxas speaks of."""
    for name, arch, frame, stores, loads, registers in _KERNEL.findall(said):
        yield Kernel(name, arch, int(frame), int(stores) + int(loads), int(registers))


def command(source: Path, archs: list[str], out: str) -> list[str]:
    code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    threads = ["--threads", str(min(len(archs), os.cpu_count() or 1))]
    include = f"-I{ROOT / 'kernels'}"
    return ["nvcc", *FLAGS, *code, *threads, include, "-c", str(source), "-o", out]


def nvcc(archs: list[str]) -> list[Kernel]:
    found: list[Kernel] = []
    with tempfile.TemporaryDirectory() as folder:
        for source in sorted((ROOT / "kernels" / "cuda").glob("*.cu")):
            line = command(source, archs, f"{folder}/out.o")
            done = subprocess.run(line, capture_output=True, text=True)
            said = done.stdout + done.stderr
            if done.returncode != 0:
                sys.exit(f"{' '.join(line)}\n{said}")
            # Several architectures at once write to one stream, a kernel's lines together.
            found += kernels(said)
            print(f"{source.name}: compiled for sm_{', sm_'.join(archs)}", flush=True)
    return found


def nvrtc(names: list[str]) -> None:
    """Every kernel as it is compiled on a GPU machine, for one architecture, and launched as there
    but for the driver (launching.py), where cuda-core can be imported from here."""
    if not importlib.util.find_spec("cuda") or not importlib.util.find_spec("cuda.core"):
        print("NVRTC: not checked (cuda-core is not installed)")
        return
    from qtool.cuda import compiling

    units: dict[str, list[str]] = {}
    for name in names:
        units.setdefault(compiling.unit_of(name)[0], []).append(name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["QTOOL_CACHE"] = folder
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
            made = pool.map(compiling.cubin, [own[0] for own in units.values()], repeat("sm_90"))
            for own, code in zip(units.values(), made, strict=True):
                missing = [name for name in own if f".text.{name}\0".encode() not in code]
                if missing:
                    sys.exit(f"NVRTC made no {', '.join(missing)}")
        print(f"NVRTC {compiling.compiler_version()}: {len(names)} kernels in {len(units)} units")
        driver = [os.environ.get("CC", "gcc"), "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared"]
        driver += ["-fPIC", str(HERE / "driver.c"), "-ldl", "-o", f"{folder}/libcuda.so.1"]
        environment = {**os.environ, "LD_LIBRARY_PATH": folder}
        for line in (driver, [sys.executable, str(HERE / "launching.py")]):
            if subprocess.run(line, env=environment).returncode != 0:
                sys.exit(
                    "what a driver is given at a launch was not checked, or is not what was asked"
                )


def main() -> None:
    archs = sys.argv[1:] or ARCHS
    found = nvcc(archs)
    for arch in archs:
        own = [kernel for kernel in found if kernel.arch == f"sm_{arch}"]
        if not own:
            sys.exit(f"sm_{arch}: ptxas said nothing about its kernels")
        most = max(own, key=lambda kernel: kernel.registers)
        middle = sorted(kernel.registers for kernel in own)[len(own) // 2]
        print(
            f"sm_{arch}: {len(own)} kernels, {middle} registers, at most {most.registers} "
            f"({most.name})"
        )
        wide = max(own, key=lambda kernel: kernel.local)
        print(f"    local arrays: {wide.local} bytes at most ({wide.name})")
    counts = {sum(kernel.arch == f"sm_{arch}" for kernel in found) for arch in archs}
    if len(counts) != 1:
        sys.exit(f"numbers of kernels differ between architectures: {sorted(counts)}")
    spilled = [kernel for kernel in found if kernel.spilled]
    for kernel in spilled:
        print(f"{kernel.name} for {kernel.arch} spills {kernel.spilled} bytes")
    nvrtc([kernel.name for kernel in found if kernel.arch == f"sm_{archs[0]}"])
    if spilled:
        sys.exit(f"{len(spilled)} kernels spill registers")


if __name__ == "__main__":
    main()
