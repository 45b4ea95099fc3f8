"""How CUDA kernels are found, compiled and refused where there is no GPU."""

import builtins
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from qtool.cli.main import app
from qtool.cuda import compiling, running
from qtool.errors import UnsupportedError, UsageError
from support.cuda.cuda_emulation import Emulator, emulator
from support.places import ROOT

__all__ = ["emulator"]

NVRTC = all(importlib.util.find_spec(n) for n in ("cuda",)) and all(
    importlib.util.find_spec(n) for n in ("cuda.core", "cuda.bindings")
)


def no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def test_sources_include_nothing_else() -> None:
    """NVRTC has no standard headers: only the package's own, and stdint and string of the host."""
    names = {path.name for path in compiling.sources()}
    assert {"base.h", "dequantize.h", "gguf_grids_iq2.h", "gguf_search.h"} <= names
    for path in compiling.sources():
        text = path.read_text(encoding="utf-8")
        included = {Path(name).name for name in re.findall(r'#include "([^"]+)"', text)}
        assert included <= names | {"gguf_panel.h", "gguf_book_lanes.h"}, path.name  # of the CPU
        system = set(re.findall(r"#include <([^>]+)>", text))
        on_the_host = {"base.h": {"stdint.h", "string.h"}, "gguf_lattice.h": {"stdint.h"}}
        assert system <= on_the_host.get(path.name, set()), path.name


def test_what_the_cpu_shares_is_installed() -> None:
    installed = re.search(
        r"install\(FILES ([^)]*) DESTINATION qtool/kernels\)",
        (ROOT / "CMakeLists.txt").read_text(),
    )
    assert installed is not None
    assert installed[1].split() == [f"kernels/{name}" for name in compiling.SHARED]


def test_every_kernel_has_a_unit(emulator: Emulator) -> None:
    units = {compiling.unit_of(name) for name in emulator.kernels()}
    assert ("dequantize_q4_k_f16", '#include "dequantize.h"\nQT_DEQUANTIZE(q4_k, f16)\n') in units
    assert ("gemv", '#include "gemv.h"\nQT_GEMV_KERNELS(QT_KERNEL)\n') in units
    alone = [n for n in emulator.kernels() if n.startswith(("dequantize_", "encode_"))]
    assert len(units) == len(alone) + 5
    with pytest.raises(ValueError, match="no kernel is called 'other'"):
        compiling.unit_of("other")


@pytest.mark.parametrize(
    "kernel", ["dequantize_q4_k_f16", "encode_q4_k", "measure_squares", "pack_rows_4", "gemv_sum",
               "quantize_sweep_levels", "round_search"],
)  # fmt: skip
def test_a_unit_includes_all_it_needs(kernel: str, tmp_path: Path) -> None:
    """Each is compiled by itself where there is a GPU; here a host's compiler reads it, and takes
    CUDA's words for plain C++."""
    words = tmp_path / "words.h"
    words.write_text(
        "#include <string.h>\n#define __CUDACC__\n"
        "#define __global__\n#define __device__\n#define __host__\n"
        "#define __shared__ static\n#define __forceinline__ inline\n"
        "#define __launch_bounds__(...)\n"
        "struct Three { unsigned x, y, z; };\nextern Three blockIdx, threadIdx;\n"
        "void __syncthreads();\n"
    )
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on PATH (g++ or clang++)")
    folders = [f"-I{folder}" for folder in compiling.folders()]
    command = [compiler, "-std=c++17", "-fsyntax-only", "-x", "c++", *folders]
    name, source = compiling.unit_of(kernel)
    done = subprocess.run(
        [*command, "-include", str(words), "-"], input=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert kernel.startswith(name)


def test_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []

    def compile_source(unit: str, source: str, arch: str) -> bytes:
        made.append((unit, arch))
        return f"\x7fELF {unit} {arch}".encode()

    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "compile_source", compile_source)
    monkeypatch.setattr(compiling, "compiler_version", lambda: "13.0")
    for _ in range(2):
        assert compiling.cubin("pack_rows_4", "sm_90") == b"\x7fELF pack sm_90"
        assert compiling.cubin("pack_rows_8", "sm_90") == b"\x7fELF pack sm_90"
        assert compiling.cubin("pack_rows_4", "sm_80") == b"\x7fELF pack sm_80"
    assert made == [("pack", "sm_90"), ("pack", "sm_80")]
    monkeypatch.setattr(compiling, "compiler_version", lambda: "13.1")
    compiling.cubin("pack_rows_4", "sm_90")
    assert len(made) == 3
    kept = sorted(path.name.split("-", 1)[1] for path in (tmp_path / "cuda").iterdir())
    assert kept == ["sm_80-pack.cubin", "sm_90-pack.cubin", "sm_90-pack.cubin"]
    mask = os.umask(0o022)
    os.umask(mask)
    for damage in (b"", b"not what NVRTC makes", None):
        path = next((tmp_path / "cuda").glob("*sm_80-pack.cubin"))
        assert path.stat().st_mode & 0o777 == 0o666 & ~mask  # for others, too, where there are any
        path.unlink() if damage is None else path.write_bytes(damage)
        path.mkdir() if damage is None else None  # which cannot be read, nor written over
        monkeypatch.setattr(compiling, "compiler_version", lambda: "13.0")
        assert compiling.cubin("pack_rows_4", "sm_80") == b"\x7fELF pack sm_80"
    assert len(made) == 6 and len([*(tmp_path / "cuda").iterdir()]) == 3
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "file"))
    assert compiling.cubin("gemv_sum", "sm_90") == b"\x7fELF gemv sm_90"


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    before = builtins.__import__

    def refused(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == "cuda":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return before(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refused)
    with pytest.raises(
        UnsupportedError, match=r"cuda.bindings.nvrtc is not installed: pip install"
    ):
        compiling.core()


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that are there, and no libnvrtc.so that they find."""

    def missing() -> Any:
        raise RuntimeError('Failure finding "libnvrtc.so.13":\n no such file')

    bindings = SimpleNamespace(nvrtc=SimpleNamespace(nvrtcVersion=missing))
    monkeypatch.setattr(compiling, "core", lambda: None)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    with pytest.raises(UnsupportedError, match=r"NVRTC cannot be loaded \(.*no such file\): pip"):
        compiling.compiler_version()


def test_without_a_gpu() -> None:
    if not no_gpu():
        pytest.skip("there is a GPU")
    with pytest.raises(UnsupportedError, match=r"no NVIDIA GPU is here that PyTorch .* can use"):
        running.require()
    said = CliRunner().invoke(app, ["bench", "--device", "cuda"])
    assert isinstance(said.exception, UnsupportedError)
    assert "no NVIDIA GPU is here" in str(said.exception)
    said = CliRunner().invoke(app, ["bench", "--device", "tpu"])
    assert isinstance(said.exception, UsageError)
    assert "tpu: expected cpu or cuda" in str(said.exception)


@pytest.mark.parametrize(
    ("capability", "driver", "nvrtc", "said"),
    [
        ((9, 0), 13000, "13.0", None),
        ((9, 0), 13000, "13.3", None),  # of one major version any driver takes
        ((7, 5), 12040, "12.9", None),
        ((7, 0), 13000, "13.0", "7.0.: the kernels need 7.5 .Turing. or later; leave --device out"),
        ((12, 3), 13000, "13.0", "NVRTC 13.0 compiles for none such; install a later one: pip"),
        ((9, 0), 12080, "13.0", "knows CUDA 12.8, and NVRTC 13.0 makes .* 'cuda-bindings==12.*'"),
    ],
)
def test_a_gpu_and_a_driver_that_take_no_kernels(
    capability: tuple[int, int],
    driver: int,
    nvrtc: str,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Told in a sentence, before anything is begun."""
    fakes = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda _: capability,
        "get_device_name": lambda _: "a GPU",
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(f"torch.cuda.{name}", fake)
    bindings = SimpleNamespace(driver=SimpleNamespace(cuDriverGetVersion=lambda: (0, driver)))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(compiling, "core", lambda: None)
    monkeypatch.setattr(compiling, "compiler_version", lambda: nvrtc)
    monkeypatch.setattr(compiling, "architectures", lambda: (75, 80, 90, 120))
    monkeypatch.setattr(running, "_check_gpu", running._check_gpu.__wrapped__)
    if said is None:
        return running.require()
    with pytest.raises(UnsupportedError, match=said):
        running.require()


@pytest.mark.skipif(not NVRTC, reason="cuda-core is not installed (extra cuda)")
def test_what_nvrtc_compiles_for() -> None:
    assert {75, 80, 86, 89, 90, 100, 120} <= {*compiling.architectures()}


@pytest.mark.parametrize("refused", [0, 1, 2, 9])
def test_memory_that_torch_keeps_is_given_back(
    refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a driver has none for a kernel's own arrays; what helps nothing is torch's own error,
    and a sentence for who encodes. Other errors stay as they are."""
    import torch

    from qtool.cuda.staging import CudaPlace
    from qtool.cuda.tasks import Task

    said: list[str] = []

    def launch(*_: Any) -> None:
        said.append("asked")
        if refused == 9:
            raise ValueError("CUDA_ERROR_INVALID_VALUE: no such grid")
        if said.count("asked") <= refused:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: unable to allocate enough memory")

    core = SimpleNamespace(
        Device=lambda _: SimpleNamespace(set_current=lambda: None),
        Stream=SimpleNamespace(from_handle=lambda handle: handle),
        LaunchConfig=SimpleNamespace,
        launch=launch,
    )
    fakes = {
        "current_device": lambda: 0,
        "current_stream": lambda: SimpleNamespace(cuda_stream=7),
        "empty_cache": lambda: said.append("given back"),
        "Stream": lambda index: index,
        "stream": nullcontext,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(compiling, "core", lambda: core)
    monkeypatch.setattr(running, "_kernel", lambda name, _: name)
    task, place = Task("encode_q3_k", (1, 1)), CudaPlace(0)
    if refused < 2:
        place.launch(task)
        assert said == ["asked", "given back", "asked"][: 1 + 2 * refused]
    elif refused == 9:
        with pytest.raises(ValueError, match="no such grid"):
            place.launch(task)
        assert said == ["asked"]
    else:
        with pytest.raises(torch.OutOfMemoryError, match="launch of encode_q3_k: CUDA_ERROR_OUT"):
            running.launch(task)
        assert said == ["asked", "given back", "asked"]
        del said[:]
        with pytest.raises(UnsupportedError, match=r"no memory left .* encode_q3_k.* --device out"):
            place.launch(task)


@pytest.mark.skipif(not NVRTC, reason="cuda-core is not installed (extra cuda)")
@pytest.mark.parametrize(
    "kernel", ["dequantize_columns_3_bf16", "encode_q8_0", "gemv_sum", "measure_squares"]
)
def test_nvrtc_compiles(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path))
    code = compiling.cubin(kernel, "sm_90")
    assert code[:4] == b"\x7fELF"
    assert kernel.encode() in code
    assert compiling.cubin(kernel, "sm_90") == code


def test_what_bench_times_runs(emulator: Emulator) -> None:
    """Every case on small arrays of numpy: its tasks are whole, and its bytes are counted."""
    import numpy as np

    from qtool.benching import cuda as bench
    from qtool.benching import cuda_cases as bench_cases
    from support.cuda.cuda_emulation import placed, room

    def kind(dtype: str) -> Any:
        return np.uint16 if dtype == "bfloat16" else np.dtype(dtype)

    def filled(value: int) -> Any:
        def make(shape: tuple[int, ...], dtype: str) -> Any:
            array = room(shape, kind(dtype))
            array[...] = value
            return array

        return make

    arrays = bench_cases.Arrays(filled(3), filled(1), filled(0), filled(1), placed)
    cases = bench.cases_named(None)
    assert len({case.name for case in cases}) == len(cases) > 100
    shapes = [f" {rows}x{cols}" for rows, cols in (*bench_cases.LLAMA[1:], *bench_cases.TOGETHER)]
    for case in cases:
        if case.name.endswith(tuple(shapes)) and "batch 1" in case.name:
            continue  # the same, larger
        work = case.prepare(arrays, 128, 256)
        assert 0 < work.nbytes <= sum(array.nbytes for array in work.arrays)
        encoded = {"encode": 256, "quantize": 128 if "sweep" in case.name else 256}
        assert work.encoded == 128 * encoded.get(case.name.split()[0], 0)
        kept = {array.ctypes.data for array in work.arrays}  # others are gone when they are timed
        for task in work.tasks:
            named = [name for name in task.fields if task.fields.get(f"{name}_bytes")]
            assert {task.fields[name] for name in named} <= kept, case.name
            place = task.fields["values"]
            size = next(array.itemsize for array in work.arrays if array.ctypes.data == place)
            assert emulator.fault(task, task.fields["values_bytes"] // size) is None
    named = bench.cases_named("gptq 4 bits float16")
    name = "dequantize gptq 4 bits float16"
    assert [case.name for case in named] == [name, f"{name} 28672x8192"]
    with pytest.raises(UnsupportedError, match="no CUDA kernel matches 'q9_k'"):
        bench.cases_named("q9_k")
    result = bench.Result("x", 80e9, 100e9)
    assert result.json() == {
        "kernel": "x", "gb_per_s": 80.0, "copy_gb_per_s": 100.0, "fraction": 0.8,
    }  # fmt: skip
    assert bench.Result("x", 1.0, 1.0, 2e9).json()["seconds_per_1e9_weights"] == 0.5


HANDED_OVER = 2e-5  # seconds from when a graph is asked for to when a GPU begins with it


@pytest.mark.parametrize(("seconds", "replays"), [(2e-4, 177), (0.3, 8), (6.0, 4)])
def test_what_is_timed(seconds: float, replays: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the replays take, on a machine with a clock and a GPU of its own; not how long a GPU
    with nothing to do waits for one. The first count for nothing: 30 ms of them, in which it comes
    to its clocks. What takes long is timed fewer times."""
    import torch

    from qtool.benching import cuda as bench

    replayed: list[int] = []
    machine = {"now": 0.0, "done": 0.0}  # of the program, and when the GPU has nothing left to do

    class Graph:
        def replay(self) -> None:
            replayed.append(1)
            machine["now"] += HANDED_OVER
            machine["done"] = max(machine["done"], machine["now"]) + seconds

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = max(machine["done"], machine["now"])

        def synchronize(self) -> None:
            machine["now"] = max(machine["now"], self.at)

        def elapsed_time(self, after: "Event") -> float:
            return 1e3 * (after.at - self.at)

    fakes = {"CUDAGraph": Graph, "Event": Event, "synchronize": lambda: None}
    fakes["graph"] = lambda graph, capture_error_mode: nullcontext()
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    assert bench._median_seconds(lambda: None, 20) == pytest.approx(seconds, rel=1e-3)
    assert len(replayed) == pytest.approx(replays, abs=int(seconds < 0.01))
    plain = bench._median_seconds(Graph().replay, 3, recorded=False)
    assert plain == pytest.approx(seconds, rel=1e-3)
