"""Everything that needs a GPU, in one command: `make gpu-check`. Under eight minutes.

Compiles every kernel for the GPU at hand; runs the tests of the kernels on it, where the emulated
grid is replaced by the real one (QTOOL_TEST_DEVICE=cuda) and results must equal the CPU's bit for
bit, but GEMV float64's within what tensor cores may lose; times every kernel that
a bar names; makes artifacts by the shipped recipes there and by the CPU; runs a part of the tests
under compute-sanitizer, where that is found. What was found is printed as a short table last; in
out/gpu-check all that was timed is kept (times.json), and all that each check said. The exit status
is 1 where anything failed; speed below a bar is told, and fails nothing.

A check that takes too long, or a kernel that breaks its process, does not take the rest with it.

Needs what `pip install '.[test,cuda]'` installs, of any version that pyproject.toml allows. Without
a package index: `make kernels WERROR=OFF`, then `PYTHONPATH=. python3 tests/gpu/check.py`.
"""

import gc
import json
import multiprocessing
import os
import platform
import re
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
from importlib.metadata import PackageNotFoundError, version
from itertools import repeat
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
TESTS = ["dequantize", "gemv", "programmatic", "encode", "gguf", "quantize", "round", "run"]
TESTS += ["streaming", "swept", "big"]
TESTS = [f"tests/cuda/test_cuda_{name}.py" for name in TESTS]
WORKERS = str(min(12, os.cpu_count() or 1))
RUNS = ["tests/cuda/test_cuda_eval.py", "tests/quality/test_generate.py", "-k"]
RUNS.append(
    "test_the_same or test_on_a_device or test_packed_words or test_experts or test_a_dense"
)
# For compute-sanitizer, under which a launch takes many times as long. Kernels that share memory:
# one vector and eight, and rings that are filled again.
SHARING = "test_awq[ or vectors[1- or vectors[8- or test_gptq[ or test_pack[ or test_sums_are or "
SHARING += "test_turns_after_turns"
RACES = ["dequantize", "gemv", "encode"]
RACES = [*(f"tests/cuda/test_cuda_{name}.py" for name in RACES), "-k", SHARING]
# And some of the others.
FEW = [*RACES[:3], "tests/cuda/test_cuda_quantize.py", "tests/cuda/test_cuda_round.py", "-k"]
FEW.append(
    f"{SHARING} or test_four_bit_floats or Q4_K] or Q6_K] or IQ3_S] or test_groups[4 or "
    "test_any_levels[shuffled or what_they_stand_for or grids_of_gptq"
)
# What the tests start themselves is no part of it. A process may take its time before it uses CUDA.
# Calls that fail are asked for by cuda-core and PyTorch, which try what a driver has; arrays have
# memory of their own, with nothing around them, so that what is read past their ends is found.
SANITIZER = ["--target-processes", "application-only", "--launch-timeout", "0"]
FOUND = 9  # the exit status
SANITIZER += ["--error-exitcode", str(FOUND)]
# Our kernels alone: those of torch's libraries are not ours to mend, and take most of the time.
OURS = "regex=^(dequantize|encode|gemv|measure|pack|quantize|round)_"
SHARED = "regex=^(dequantize_(across|columns)|gemv|measure|pack)_"
# Of each tool what it is given, its tests, and for how many seconds.
TOOLS = {
    "racecheck": (["--kernel-name", SHARED], RACES, 90),
    "memcheck": (["--report-api-errors", "no", "--kernel-name", OURS], FEW, 90),
}
ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "QTOOL_TEST_FENCE": "0"}
# As many threads as processors in each of the processes would stand in each other's way.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
KEPT = ROOT / "out" / "gpu-check"
MOST = 480.0  # seconds of all checks
MOST_PROCESSES = 12  # that time, one after the other, where kernels break them
# Artifacts by many recipes: the CPU's bytes (others of these are among TESTS), or its KL divergence
# within 2 %.
RECIPES = [
    "tests/cuda/test_cuda_run.py",
    "tests/cuda/test_cuda_gguf.py",
    "tests/cuda/test_cuda_swept.py",
]
RECIPES += ["-m", "slow", "-k"]
RECIPES.append("as_good or every_recipe")
TIMED = ["awq gemm float16", "gptq 4 bits float16", "gguf-Q4_K float16", "gguf-Q6_K float16"]
TIMED += ["mxfp4 float16", "fp8 e4m3fn channel float16", "quantize 4 bits", "quantize gguf-*"]
TIMED += ["quantize nvfp4", "quantize fp8"]
TIMED += ["pack-quantized 4 bits float16", "gguf-Q4_0 float16", "gguf-IQ4_XS float16"]
TIMED += ["nvfp4 float16", "gguf-Q4_1 float16", "gguf-IQ4_NL float16"]
TIMED += [f"encode gguf-{name}" for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")]
TIMED += ["gemv"]  # the most by far
# The least share of a copy: of types of four bits to float16, and of products.
FOUR_BITS = r"awq gemm|gptq 4 bits|pack-quantized 4 bits|mxfp4|nvfp4|gguf-(I?Q4_\w+|MXFP4|NVFP4)"
LEAST = {rf"dequantize ({FOUR_BITS}) float16( 28672x8192)?": 0.85, "gemv .*": 0.70}
MOST_SECONDS = 2.0  # for an encoder and 10^9 weights


def run(
    command: list[str],
    seconds: float,
    log: Path,
    more: Mapping[str, str] | None = None,
    status: int = 0,
) -> tuple[bool, str]:
    """Whether it went well, which `status` says, and what it said, also where it was ended; more:
    of its environment."""
    environment = {**os.environ, "QTOOL_TEST_DEVICE": "cuda", **(more or {})}
    good, ended = False, ""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of jobs in the background: theirs, too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=out, process_group=0
        )
        try:
            good = process.wait(seconds) == status
        except subprocess.TimeoutExpired:
            ended = f"\ntook more than {seconds:.0f} s"
            with suppress(ProcessLookupError):  # pytest, whoever started it, tells what has failed
                os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and all that it has started
            process.wait()
    return good, log.read_text(encoding="utf-8", errors="replace") + ended


def compiled() -> None:
    """Every kernel into the cache: tests and timings find them there."""
    import torch

    sys.path.insert(0, str(ROOT / "tests"))
    from qtool.cuda import compiling
    from support.cuda.cuda_emulation import Emulator, build

    names = Emulator(build(Path(os.environ["QTOOL_TEST_EMULATOR"]))).kernels()
    units = {compiling.unit_of(name): name for name in names}
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(compiling.cubin, units.values(), repeat(arch)):
            pass
    print(f"{len(names)} kernels for {arch}, {torch.cuda.get_device_name()}")


def timed(first: int = 0, before: int = 0) -> None:
    """The kernels that bars name, one after the other, each as a line of JSON; from number `first`
    on, the one before it having failed. What is wrong with a GPU's memory stays with a process, so
    that then the others are timed by another one; where so many were before, none are."""
    import torch

    from qtool.benching.cuda import bench, cases_named

    failed = first > 0
    named = {case.name: case for pattern in TIMED for case in cases_named(pattern)}
    gc.freeze()  # recording a graph looks for garbage first
    for number, case in enumerate([*named.values()][first:], first):
        try:
            for result in bench([case]):
                print(json.dumps(result.json()), flush=True)
        except Exception:
            failed = True
            print(f"{case.name}: {traceback.format_exc()}", flush=True)
            try:
                torch.cuda.synchronize()
            except Exception:
                if before == MOST_PROCESSES:
                    break
                again = ["--time", str(number + 1), str(before + 1)]
                os.execv(sys.executable, [sys.executable, str(Path(__file__)), *again])
    sys.exit(failed)


def results_of(said: str) -> list[dict[str, Any]]:
    """What `timed` has printed, however it ended: the last line may have none."""
    lines = [line for line in said.splitlines() if line.startswith('{"kernel"')]
    return [json.loads(line) for line in lines if line.endswith("}")]


def missed(result: Mapping[str, Any]) -> str:
    """The bar that a figure misses, or nothing."""
    name, share = result["kernel"], result["fraction"]
    if name.startswith("encode"):
        more = result["seconds_per_1e9_weights"] >= MOST_SECONDS
        return f"MORE THAN {MOST_SECONDS} s" if more else ""
    least = next((least for names, least in LEAST.items() if re.fullmatch(names, name)), 0.0)
    return f"BELOW {least:.0%}" if share < least else ""


def line_of(result: Mapping[str, Any]) -> str:
    """Of the table."""
    said = f"{result['fraction']:.0%} of a copy's {result['copy_gb_per_s']} GB/s"
    seconds = result.get("seconds_per_1e9_weights")
    said = said if seconds is None else f"{seconds:.3f} s for 10^9 weights"
    line = f"{result['kernel']:50} {result['gb_per_s']:8.1f} GB/s  {said}  {missed(result)}"
    return line.rstrip()


def surroundings() -> str:
    """What figures are of: the time, and what the driver says of the GPU."""
    what = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,compute_mode"
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        said = f"nvidia-smi: {error}"
    for name in ("torch", "cuda-core", "cuda-bindings"):
        with suppress(PackageNotFoundError):
            said += f"\n{name} {version(name)}"
    return f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}  {said}  {platform.release()}"


def main() -> None:
    began = time.monotonic()
    # Else whoever started this may have had it ignored, and what is started here would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows: list[tuple[str, bool | None, str]] = []
    around = surroundings()
    itself = [sys.executable, str(Path(__file__))]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    many = ["-n", "1" if "Exclusive" in around else WORKERS, "--dist", "worksteal"]
    emulator = Path(os.environ.setdefault("QTOOL_TEST_EMULATOR", str(ROOT / "build" / "emulator")))

    def check(
        name: str,
        command: list[str],
        seconds: float,
        more: Mapping[str, str] | None = None,
        status: int = 0,
    ) -> str:
        before = time.monotonic()
        left = MOST - (before - began)
        if left < 1:
            rows.append((name, False, "no time was left"))
            return ""
        log = KEPT / (re.sub("[^0-9A-Za-z]+", "-", f"{len(rows)} {name}") + ".txt")
        good, said = run(command, min(seconds, left), log, more, status)
        if not good:
            print(f"-- {name}\n{said[-6000:]}\n", flush=True)
        last = said.strip().splitlines()[-1] if said.strip() else ""
        rows.append((name, good, f"{time.monotonic() - before:.0f} s  {last[:70]}"))
        print(f"{name}: {'ok' if good else 'FAILED'}", flush=True)
        return said

    for folder in (KEPT, emulator):
        folder.mkdir(parents=True, exist_ok=True)
    ratios = KEPT / "divergences.jsonl"
    ratios.unlink(missing_ok=True)
    check("every kernel compiles", [*itself, "--compile"], 120)
    check("the same bits as the CPU", [*pytest, *many, *TESTS], 150, ONE_THREAD)
    beside = "/usr/local/cuda/bin"  # where it is, if PATH does not say
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=beside)
    planted = [sys.executable, str(Path(__file__).with_name("planted.py"))]
    for tool, (more, tests, seconds) in TOOLS.items():
        name = f"compute-sanitizer {tool}"
        if sanitizer is None:
            rows.append((name, None, "not found"))
            continue
        line = [sanitizer, "--tool", tool, *SANITIZER, *more]
        check(f"{name}: what is planted", [*line, *planted, tool], 60, ALONE | ONE_THREAD, FOUND)
        check(name, [*line, *pytest, *tests], seconds, ALONE | ONE_THREAD)
    kept = {**ONE_THREAD, "QTOOL_TEST_DIVERGENCES": str(ratios)}
    check("recipes' bytes, or as good", [*pytest, *many, *RECIPES], 240, kept)
    results = results_of(check("times", [*itself, "--time"], 150))
    if results:
        rows[-1] = (*rows[-1][:2], f"{rows[-1][2].split('  ')[0]}  {len(results)} kernels")
    (KEPT / "times.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    check("eval and generate as on the CPU", [*pytest, *many, *RUNS], 100, ONE_THREAD)
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "qtool", "quantize", "tiny", "--recipe", "w4g128-awq-gptq"]
        check("quantize --device cuda", [*command, "--device", "cuda", "-o", f"{out}/out"], 60)
        swept = [*command[:-1], "q4_k_m-awq-gptq", "--device", "cuda", "-o", f"{out}/x.gguf"]
        check("quantize --device cuda, GGUF", swept, 60)
        command = [sys.executable, "-m", "qtool", "generate", f"{out}/out", "--device", "cuda"]
        check("generate --device cuda", command, 60)
    print()
    for result in results:
        print(line_of(result))
    for text in ratios.read_text(encoding="utf-8").splitlines() if ratios.is_file() else ():
        one = json.loads(text)
        said = f"{one['gpu'] / one['cpu'] - 1:+.2%} of the CPU's KL divergence"
        print(f"{one['recipe']:50} {said}")
    print(f"\n{around}")
    print(f"{'check':44} {'':8} {time.monotonic() - began:.0f} s in all")
    for name, good, note in rows:
        print(f"{name:44} {'skipped' if good is None else 'ok' if good else 'FAILED':8} {note}")
    print(f"{sum(map(bool, map(missed, results)))} of {len(results)} figures miss a bar")
    sys.exit(any(good is False for _, good, _ in rows))


if __name__ == "__main__":
    parts = {"--compile": compiled, "--time": timed}
    parts.get("".join(sys.argv[1:2]), main)(*map(int, sys.argv[2:]))
