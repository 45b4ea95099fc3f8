"""What the machine code of the kernels asks of a GPU: an estimate, not a measurement.

`make cuda-sass`. Kernels are compiled for sm_90 and disassembled; one warp in the middle of a grid
is run through the code (sass_machine.py) with the very fields that `qtool bench` would launch it
with. Printed for each:

    regs, local   registers, and bytes of local memory, of a thread
    thrds         threads that an SM holds at once, by registers, shared memory and blocks
    ins           instructions issued for each weight, times 32 (a thread's share)
    slots, alu    share of all issue slots that take the bar's bandwidth on an H200: ins * weights a
                  second / (132 SMs * 4 * 32 * 1.98 GHz), and the same of the integer units, which
                  start an instruction every other cycle. Above 1 the bar is out of reach
    read, wrote   bytes for each weight in sectors of 32, as warps ask for them, and how much of the
                  sectors is used: what is missing, neighbours find in a cache, or it is read again
    trp           how often a warp waits for memory, one time after the other
    flight        bytes that the threads of an SM have asked for, at most, of what hides 700 ns at
                  the bar's bandwidth (Little's law)
    wave          bandwidth of the bar's, if resident blocks took their turns together: all of their
                  bytes over trp * 700 ns, 500 ns to start, and their issue slots
    early         bytes that resident blocks of all SMs have asked for, in millions, before they
                  wait for other kernels (programmatic launches)
    LDG.16, ...   accesses of a thread by their width in bytes; passes over the banks of shared
                  memory, of the fewest possible

The bar is 85 % of a copy of 4.3 TB/s (read and written) for dequantizing, 70 % for products. Of
encoders: instructions and bytes of local memory for each weight, and seconds for 10^9 weights if
nothing but issue slots counted, nothing but local memory through the L2 cache, or nothing but waits
for it, 40 cycles each, one after the other.

Nothing is known here of DRAM pages, of what the L2 cache keeps, of the last wave's tail, or of a
launch's own time, which at 2 to 4 microseconds is most of what a small matrix takes.
"""

import argparse
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import numpy as np  # noqa: E402
from sass_machine import Seen, Warp, read  # noqa: E402

from qtool.cuda import bench_cases, compiling  # noqa: E402
from qtool.cuda.tasks import Task  # noqa: E402

SMS, CLOCK, COPY = 132, 1.98e9, 4.3e12
ISSUES = SMS * 4 * 32 * CLOCK  # instructions of threads a second
LATENCY, START = 700e-9, 500e-9
LATENCY_L1, L2 = 40, 5.5e12  # cycles; bytes a second
SHARED = 227 << 10
# Instructions of the integer units, which take 16 threads a cycle of a scheduler instead of 32.
ALU = {"LOP3", "SHF", "IADD3", "PRMT", "ISETP", "LEA", "SEL", "VIADD", "F2FP", "FSETP", "FMNMX"}
ALU |= {"FSEL", "IABS", "IMNMX", "VIMNMX", "VIADDMNMX", "PLOP3", "P2R", "R2P", "I2FP"}
DEQUANTIZED = """awq gemm float16, gptq 4 bits float16, gptq 4 bits bfloat16, gptq 4 bits float32,
gptq 2 bits float16, gptq 3 bits float16, gptq 8 bits float16, pack-quantized 4 bits float16,
gguf-Q4_0 float16, gguf-Q4_1 float16, gguf-Q4_K float16, gguf-Q4_K bfloat16, gguf-Q4_K float32,
gguf-IQ4_NL float16, gguf-IQ4_XS float16, gguf-MXFP4 float16, gguf-NVFP4 float16, mxfp4 float16,
nvfp4 float16, gguf-Q2_K float16, gguf-Q3_K float16, gguf-Q5_K float16, gguf-Q6_K float16,
gguf-Q8_0 float16, fp8 e4m3fn channel float16, fp8 e4m3fn 128x128 float16, int8 channel float16"""
ENCODED = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
BARS = {"dequantize": 0.85, "gemv": 0.70}
COLUMNS = "regs local thrds    ins"
HEAD = f"{'':42} {COLUMNS} slots   alu   read used  wrote used trp flight   wave early"
HEAD_ENCODED = f"{'':42} {COLUMNS}     bytes    by slots       by L2    by waits"


class Fake:
    """An array that is nowhere."""

    def __init__(self, shape: tuple[int, ...], dtype: str, number: int) -> None:
        self.shape, self.dtype = shape, dtype
        size = {"bfloat16": 2}.get(dtype) or np.dtype(dtype).itemsize
        self.nbytes = size * math.prod(shape)
        self._at = (number + 1) << 36

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return self._at


def fakes() -> bench_cases.Arrays:
    made: list[Fake] = []

    def make(shape: tuple[int, ...], dtype: str) -> Fake:
        made.append(Fake(shape, dtype, len(made)))
        return made[-1]

    def copy(array: Any) -> Fake:
        return make(tuple(array.shape), str(array.dtype))

    return bench_cases.Arrays(make, make, make, make, copy)


@dataclass(frozen=True)
class Compiled:
    text: str
    registers: int
    local: int
    shared: int


def tool(name: str) -> str:
    """On PATH, in the toolkit of CUDA_HOME, or beside an installed Triton."""
    home = os.environ.get("CUDA_HOME", "")
    places = [shutil.which(name), shutil.which(name, path=f"{home}/bin")]
    for entry in sys.path:
        places.append(shutil.which(name, path=f"{entry}/triton/backends/nvidia/bin"))
    found = next((place for place in places if place), None)
    if found is None:
        sys.exit(f"no {name} was found: make cuda-sass needs nvcc and cuobjdump of a CUDA toolkit")
    return found


def compiled(kernel: str, folder: Path) -> Compiled:
    unit, source = compiling.unit_of(kernel)
    code, said = folder / f"{unit}.cubin", folder / f"{unit}.txt"
    if not code.exists():
        (folder / "unit.cu").write_text(source)
        line = [tool("nvcc"), "-std=c++17", "-O3", "-fmad=false", "-arch=sm_90", "-Xptxas", "-v"]
        line += [f"-I{path}" for path in compiling.folders()]
        line += ["-cubin", str(folder / "unit.cu"), "-o", str(code)]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        said.write_text(done.stderr)
    found = re.search(
        rf"function '{kernel}'.*?(\d+) bytes stack.*?Used (\d+) registers([^\n]*)",
        said.read_text(),
        re.S,
    )
    assert found, said.read_text()
    shared = re.search(r"(\d+) bytes smem", found[3])
    command = [tool("cuobjdump"), "-sass", "-fun", kernel, str(code)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Compiled(text, int(found[2]), int(found[1]), int(shared[1]) if shared else 0)


def resident(made: Compiled, threads: int) -> int:
    """Blocks that an SM holds at once."""
    warps = math.ceil(threads / 32)
    by_registers = 4 * (16384 // (32 * math.ceil(made.registers / 8) * 8)) // warps
    limits = [2048 // threads, 32, by_registers]
    if made.shared:
        limits.append(SHARED // (made.shared + 1024))
    return min(limits)


def run(made: Compiled, task: Task, memory: Callable[..., Any] = lambda *_: None) -> Seen:
    """A warp of a block in the middle of the grid."""
    fields = struct.pack("<ii", 0, 0) + struct.pack(f"<{len(task.arguments())}q", *task.arguments())
    special = {"SR_TID.X": np.arange(32) + 32 * (task.threads // 64)}
    special |= {f"SR_CTAID.{axis}": n // 2 for axis, n in zip("XY", task.blocks, strict=True)}
    return Warp(read(made.text), fields, special, memory).run()


def line(
    name: str, made: Compiled, task: Task, seen: Seen, weights: int, nbytes: int, bar: float
) -> str:
    blocks = resident(made, task.threads)
    warps = math.ceil(task.threads / 32)
    own = weights / (task.blocks[0] * task.blocks[1])  # of a block
    of_warp = own / warps
    issued = sum(seen.issued.values())
    each, rate = 32 * issued / of_warp, bar * COPY / (nbytes / weights)
    slots = each * rate / ISSUES
    integers = sum(count for name, count in seen.issued.items() if name in ALU)
    alu = 32 * integers / of_warp * rate * 2 / ISSUES
    kinds: dict[tuple[str, int], int] = {}
    for access in seen.accesses:
        kinds[access.kind, access.width] = kinds.get((access.kind, access.width), 0) + 1
    traffic = {kind: [a for a in seen.accesses if a.kind == kind] for kind in ("LDG", "STG")}
    sectors = {kind: sum(a.sectors for a in found) * 32 for kind, found in traffic.items()}
    used = {kind: sum(a.distinct for a in found) for kind, found in traffic.items()}
    moved = nbytes / weights * own * blocks
    busy = issued * warps * blocks / (4 * CLOCK)
    wave = SMS * moved / (seen.trips * LATENCY + START + busy)
    flight = seen.in_flight * warps * blocks
    early = seen.early * warps * min(blocks * SMS, task.blocks[0] * task.blocks[1]) / 1e6
    read_share = sectors["LDG"] / max(1, sectors["LDG"] + sectors["STG"])
    wanted = bar * COPY * (read_share if sectors["STG"] * 4 > sectors["LDG"] else 1) / SMS * LATENCY
    shared = [a for a in seen.accesses if a.kind in ("LDS", "STS")]
    best = sum(max(1, math.ceil(a.distinct / 128)) for a in shared)
    said = "  ".join(f"{n} {kind}.{width}" for (kind, width), n in kinds.items())
    return (
        f"{name:42} {made.registers:4} {made.local:5} {blocks * task.threads:5} "
        f"{each:6.2f} {slots:5.0%} {alu:5.0%} {sectors['LDG'] / of_warp:6.3f} "
        f"{used['LDG'] / max(1, sectors['LDG']):4.0%} {sectors['STG'] / of_warp:6.3f} "
        f"{used['STG'] / max(1, sectors['STG']):4.0%} {seen.trips:3} {flight / wanted:5.1f}x "
        f"{wave / (bar * COPY):5.1f}x {early:5.1f}  {said}"
        + (f"  banks {sum(a.passes for a in shared)}/{best}" if shared else "")
    )


def encoder(name: str, made: Compiled, task: Task, seen: Seen, weights: int) -> str:
    """Of an encoder; see above."""
    blocks, warps = resident(made, task.threads), task.threads // 32
    of_warp = weights / task.blocks[0] / warps
    each = 32 * sum(seen.issued.values()) / of_warp
    own = [access for access in seen.accesses if access.kind in ("LDL", "STL")]
    nbytes = sum(access.width * access.threads for access in own) / of_warp
    waits = len(own) * LATENCY_L1 / CLOCK / of_warp * 1e9 / (SMS * blocks * warps)
    return (
        f"{name:42} {made.registers:4} {made.local:5} {blocks * task.threads:5} {each:6.0f} "
        f"{nbytes:9.0f} {each * 1e9 / ISSUES:9.3f} s {nbytes * 1e9 / L2:9.3f} s {waits:9.3f} s"
    )


def memory_of(task: Task) -> Callable[..., Any]:
    """Weights of a normal distribution as float16, importance as float32."""
    random = np.random.default_rng(1)
    begin, size = task.fields.get("index", 0), task.fields.get("index_bytes", 0)

    def words(where: Any, _: int) -> Any:
        if size and begin <= int(where[0]) < begin + size:
            return random.uniform(0.5, 2, (4, 32)).astype(np.float32).view(np.uint32)
        return random.standard_normal((4, 64)).astype(np.float16).view(np.uint32)

    return words


def cases(pattern: str) -> Iterator[bench_cases.Case]:
    """Those of the bars whose names have it, in the order of `qtool bench`."""
    wanted = {f"dequantize {name.strip()}" for name in DEQUANTIZED.replace("\n", " ").split(",")}
    plain = {f"encode gguf-{name} float16" for name in ENCODED}
    wanted |= plain | {f"{name} importance" for name in plain}
    for case in bench_cases.all_cases():
        known = case.name in wanted or case.name.startswith("gemv")
        if known and pattern in case.name.lower():
            yield case


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pattern", nargs="?", default="", help="only names that have it")
    pattern, before = parser.parse_args().pattern.lower(), ""
    with tempfile.TemporaryDirectory() as where:
        for case in cases(pattern):
            family, (rows, cols) = case.name.split()[0], case.shape
            if (family == "encode") != (before == "encode") or not before:
                print(HEAD_ENCODED if family == "encode" else HEAD)
            before = family
            work = case.prepare(fakes(), rows, cols)
            task = work.tasks[0]
            made = compiled(task.kernel, Path(where))
            if family == "encode":
                seen = run(made, task, memory_of(task))
                said = encoder(case.name, made, task, seen, rows * cols)
            else:
                seen, bar = run(made, task), BARS[family]
                said = line(case.name, made, task, seen, rows * cols, work.nbytes, bar)
            print(said, flush=True)


if __name__ == "__main__":
    main()
