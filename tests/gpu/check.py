"""Everything that needs a GPU, in one command: `make gpu-check`. Under eight minutes.

Compiles every kernel for the GPU at hand; runs the tests of the kernels on it, where the emulated
grid is replaced by the real one (QTOOL_TEST_DEVICE=cuda) and results must equal the CPU's bit for
bit, but products with vectors float64's within what tensor cores may lose; times every kernel that
a bar names; runs a part of the tests under compute-sanitizer, where that is found. What was found
is printed as a short table last; in out/gpu-check all that was timed is kept (times.json), and all
that each check said. The exit status is 1 where anything failed.

Needs what `pip install '.[test,cuda]'` installs, of any version that pyproject.toml allows. Without
a package index: `make kernels WERROR=OFF`, then `PYTHONPATH=. python3 tests/gpu/check.py`.
"""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
TESTS = ["dequantize", "gemv", "encode", "gguf", "quantize", "run"]
TESTS = [f"tests/test_cuda_{name}.py" for name in TESTS]
WORKERS = str(min(8, os.cpu_count() or 1))
RUNS = ["tests/test_cuda_eval.py", "tests/test_generate.py", "-k"]
RUNS.append(
    "test_the_same or test_on_a_device or test_packed_words or test_experts or test_a_dense"
)
# For compute-sanitizer.
FEW = ["tests/test_cuda_dequantize.py", "tests/test_cuda_gemv.py", "tests/test_cuda_encode.py"]
FEW += ["tests/test_cuda_quantize.py", "-k"]
FEW.append(
    "test_awq or test_gptq_times or test_gptq[4 or test_four_bit_floats or test_pack[ or Q4_K or "
    "Q6_K or IQ3_S or test_groups[4"
)
# What the tests start themselves is no part of it. A process may take its time before it uses CUDA.
# Calls that fail are asked for by cuda-core and PyTorch, which try what a driver has; arrays have
# memory of their own, with nothing around them, so that what is read past their ends is found.
SANITIZER = ["--target-processes", "application-only", "--launch-timeout", "0"]
SANITIZER += ["--error-exitcode", "9"]
TOOLS = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}
ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "QTOOL_TEST_FENCE": "0"}
KEPT = ROOT / "out" / "gpu-check"
# Artifacts of the shipped model by many recipes: the CPU's bytes, or its KL divergence within 2 %.
RECIPES = ["tests/test_cuda_run.py", "-m", "slow", "-k", "as_good"]
TIMED = ["awq gemm float16", "gptq 4 bits float16", "gguf-Q4_K float16", "gguf-Q6_K float16"]
TIMED += ["mxfp4 float16", "fp8 e4m3fn channel float16", "quantize 4 bits", "gemv"]
TIMED += ["pack-quantized 4 bits float16", "gguf-Q4_0 float16", "gguf-IQ4_XS float16"]
TIMED += [f"encode gguf-{name}" for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")]


def run(
    command: list[str], seconds: float, log: Path, more: Mapping[str, str] | None = None
) -> tuple[bool, str]:
    """Whether it went well, and what it said, also where it was ended; more: of its environment."""
    environment = {**os.environ, "QTOOL_TEST_DEVICE": "cuda", **(more or {})}
    good, ended = False, ""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=out, process_group=0
        )
        try:
            good = process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            ended = f"\ntook more than {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and all that it has started
            process.wait()
    return good, log.read_text(encoding="utf-8", errors="replace") + ended


def compiled() -> None:
    """Every kernel into the cache: tests and timings find them there."""
    import torch

    sys.path.insert(0, str(ROOT / "tests"))
    from cuda_emulation import Emulator, build

    from qtool.cuda import compiling

    with tempfile.TemporaryDirectory() as folder:
        names = Emulator(build(Path(folder))).kernels()
    units = {compiling.unit_of(name): name for name in names}
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(compiling.cubin, units.values(), repeat(arch)):
            pass
    print(f"{len(names)} kernels for {arch}, {torch.cuda.get_device_name()}")


def timed() -> None:
    """The kernels that bars name, one after the other, each as a line of JSON. One that fails does
    not keep others from it."""
    from qtool.cuda.bench import bench, cases_named

    failed = False
    for case in {case.name: case for pattern in TIMED for case in cases_named(pattern)}.values():
        try:
            for result in bench([case]):
                print(json.dumps(result.json()), flush=True)
        except Exception:
            failed = True
            print(f"{case.name}: {traceback.format_exc()}", flush=True)
    sys.exit(failed)


def results_of(said: str) -> list[dict[str, Any]]:
    """What `timed` has printed, however it ended."""
    return [json.loads(line) for line in said.splitlines() if line.startswith('{"kernel"')]


def main() -> None:
    began = time.monotonic()
    rows: list[tuple[str, bool | None, str]] = []
    itself = [sys.executable, str(Path(__file__))]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    many = ["-n", WORKERS, "--dist", "worksteal"]

    def check(
        name: str, command: list[str], seconds: float, more: Mapping[str, str] | None = None
    ) -> str:
        left = 480 - (time.monotonic() - began)
        before = time.monotonic()
        log = KEPT / f"{len(rows)} {name}.txt".replace(" ", "-").replace("'", "")
        good, said = run(command, max(1.0, min(seconds, left)), log, more)
        if not good:
            print(f"-- {name}\n{said[-6000:]}\n", flush=True)
        last = said.strip().splitlines()[-1] if said.strip() else ""
        rows.append((name, good, f"{time.monotonic() - before:.0f} s  {last[:70]}"))
        print(f"{name}: {'ok' if good else 'FAILED'}", flush=True)
        return said

    KEPT.mkdir(parents=True, exist_ok=True)
    check("every kernel compiles", [*itself, "--compile"], 120)
    check("the same bits as the CPU", [*pytest, *many, *TESTS], 150)
    results = results_of(check("times", [*itself, "--time"], 150))
    rows[-1] = (*rows[-1][:2], f"{rows[-1][2].split('  ')[0]}  {len(results)} kernels")
    (KEPT / "times.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    check("eval and generate as on the CPU", [*pytest, *many, *RUNS], 100)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "qtool", "quantize", "tiny", "--recipe", "w4g128-awq-gptq"]
        check("quantize --device cuda", [*command, "--device", "cuda", "-o", f"{folder}/out"], 60)
        command = [sys.executable, "-m", "qtool", "generate", f"{folder}/out", "--device", "cuda"]
        check("generate --device cuda", command, 60)
    sanitizer = shutil.which("compute-sanitizer")
    for tool, more in TOOLS.items():
        name = f"compute-sanitizer {tool}"
        if sanitizer is None:
            rows.append((name, None, "not found"))
            continue
        line = [sanitizer, "--tool", tool, *SANITIZER, *more]
        check(name, [*line, *pytest, *FEW], 90, ALONE)
    check("recipes as good as the CPU's", [*pytest, *many, *RECIPES], 150)
    print(f"\n{'check':44} {'':8} {time.monotonic() - began:.0f} s in all")
    for name, good, note in rows:
        print(f"{name:44} {'skipped' if good is None else 'ok' if good else 'FAILED':8} {note}")
    for result in results:
        share = f"{result['fraction']:.0%} of a copy's {result['copy_gb_per_s']} GB/s"
        seconds = result.get("seconds_per_1e9_weights")
        share = share if seconds is None else f"{seconds:.3f} s for 10^9 weights"
        print(f"{result['kernel']:44} {result['gb_per_s']:8.1f} GB/s  {share}")
    sys.exit(any(good is False for _, good, _ in rows))


if __name__ == "__main__":
    {"--compile": compiled, "--time": timed}.get("".join(sys.argv[1:]), main)()
