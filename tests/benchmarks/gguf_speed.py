r"""How long quantizing to GGUF takes beside llama-quantize, and how much memory.

    python tests/benchmarks/gguf_speed.py LLAMA_BIN FOLDER [--rounds 3] \
        [--job q4_k_m=8 ...] [--depth]

FOLDER gets a Llama of 1.1 billion random weights in f16 (16 layers, 147 tensors, 2.2 GB), and an
importance matrix for it, unless they are there. Each round runs, one after the other, with as many
threads as there are processors and the model in the page cache, both programs on each job; medians
are compared. Exit status 1 where qtool is not as many times faster as a job says, where it takes
more memory than llama-quantize, or more than 1.3 times the time of `cp` and of the kernels alone.

    JOB      recipe=times, or recipe+imatrix=times
    cp       copies the model's file
    kernels  the planned tensors' weights over the rates of dequantize and encode on weights in the
             cache, on all threads at once
    --depth  only the memory: the model of 16 layers beside one of 4
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import commands
import numpy as np
from numpy.typing import NDArray

from qtool import native, native_gguf
from qtool.formats.gguf_values import f32, string, u32
from qtool.formats.gguf_writer import GgufWriter, TensorSpec, lay_out
from qtool.gguf.importance.imatrix import Importance, read_importance, write_importance
from qtool.gguf.open import open_source
from qtool.gguf_types import BY_NAME, F16, F32, BlockType
from qtool.native.library import default_threads
from qtool.planning.gguf.plan import make_gguf_plan
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import load

JOBS = ["q4_k_m=8", "q4_k_m+imatrix=7", "q6_k=6", "iq4_xs=8", "q8_0=1"]
WIDTH, FEED, HEADS, KV_HEADS, VOCABULARY = 2048, 8192, 32, 8, 32000
_SLACK = 1.3  # times copying and kernels
_ROWS = 256  # made at a time


def specs(layers: int) -> list[TensorSpec]:
    """The tensors of the model, in llama.cpp's names."""
    kv = WIDTH // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, WIDTH)}
    for block in range(layers):
        b = f"blk.{block}."
        shapes |= {
            f"{b}attn_norm.weight": (WIDTH,),
            f"{b}attn_q.weight": (WIDTH, WIDTH),
            f"{b}attn_k.weight": (kv, WIDTH),
            f"{b}attn_v.weight": (kv, WIDTH),
            f"{b}attn_output.weight": (WIDTH, WIDTH),
            f"{b}ffn_norm.weight": (WIDTH,),
            f"{b}ffn_gate.weight": (FEED, WIDTH),
            f"{b}ffn_up.weight": (FEED, WIDTH),
            f"{b}ffn_down.weight": (WIDTH, FEED),
        }
    shapes |= {"output_norm.weight": (WIDTH,), "output.weight": (VOCABULARY, WIDTH)}
    return [TensorSpec(n, shape, F32 if len(shape) == 1 else F16) for n, shape in shapes.items()]


def make_model(path: Path, layers: int) -> Path:
    """A model of normally distributed weights, written as it is made."""
    if path.exists():
        return path
    sizes = {
        "block_count": layers, "context_length": 2048, "embedding_length": WIDTH,
        "feed_forward_length": FEED, "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS, "vocab_size": VOCABULARY,
    }  # fmt: skip
    metadata = {
        "general.architecture": string("llama"),
        **{f"llama.{key}": u32(value) for key, value in sizes.items()},
        "llama.attention.layer_norm_rms_epsilon": f32(1e-5),
        "tokenizer.ggml.model": string("no_vocab"),
    }
    tensors = specs(layers)
    draw = np.random.default_rng(1)
    partial = path.with_suffix(".part")
    with partial.open("wb") as file:
        writer = GgufWriter(file.fileno(), lay_out(metadata, tensors))
        for number, tensor in enumerate(tensors):
            for first in range(0, tensor.rows, _ROWS):
                shape = (min(_ROWS, tensor.rows - first), tensor.shape[-1])
                values = draw.standard_normal(shape, np.float32) * np.float32(0.02)
                kept = values if tensor.type == F32 else values.astype(np.float16)
                writer.rows(number, first, kept.view(np.uint8))
        writer.finish()
    partial.rename(path)
    return path


def make_imatrix(path: Path, layers: int) -> Path:
    """Importance that differs from column to column."""
    if not path.exists():
        draw = np.random.default_rng(2)
        sums = {
            tensor.name: np.exp(draw.standard_normal((1, tensor.shape[-1]), np.float32))
            for tensor in specs(layers)
            if tensor.name.startswith("blk.") and len(tensor.shape) == 2
        }
        counts = {name: np.array([1], np.int64) for name in sums}
        write_importance(path, Importance(sums, counts, ("made up",), 1, 512))
    return path


def kernel_seconds(model: Path, recipe: str, imatrix: Path | None, threads: int) -> float:
    """What encoding takes alone, on all threads at once, of weights that are in the cache."""
    loaded = load(recipe)
    assert isinstance(loaded, GgufRecipe)
    importance = None if imatrix is None else read_importance(imatrix)
    plan = make_gguf_plan(loaded, open_source(model), importance)
    weights: Counter[tuple[BlockType, bool]] = Counter()
    for tensor in plan.tensors:
        if tensor.type.name in BY_NAME:
            weights[tensor.type, tensor.importance] += tensor.parameters
    with ThreadPoolExecutor(threads) as pool:
        return sum(
            count / sum(pool.map(_rate, [block] * threads, [weighed] * threads))
            for (block, weighed), count in weights.items()
        )


def _rate(block: BlockType, weighed: bool) -> float:
    """Weights a second of one thread: from float16 to blocks."""
    draw = np.random.default_rng(3)
    half = (draw.standard_normal((64, WIDTH), np.float32) * 0.02).astype(np.float16)
    factors: NDArray[np.float32] | None = None
    if weighed:
        factors = np.exp(draw.standard_normal(WIDTH, np.float32))
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < 0.5:
        native_gguf.encode(native.from_float16(half, 1), block, factors, threads=1)
        done += half.size
    return done / (time.perf_counter() - began)


def depth(folder: Path) -> bool:
    """Whether the peak of 16 layers is that of 4."""
    peaks = []
    for layers in (4, 16):
        # By a process of its own: what this one has used would count as its children's.
        commands.measure([sys.executable, __file__, "-", folder, "--make", layers])
        model = folder / f"synth-{layers}-f16.gguf"
        done = commands.quantize(model, "q4_k_m", folder / "depth.gguf")
        (folder / "depth.gguf").unlink()
        peaks.append(done.peak)
        print(f"{layers} layers: peak {done.peak / 2**20:.1f} MiB, {done.wall:.2f} s", flush=True)
    return peaks[1] < peaks[0] * 1.05


def compare(
    tools: Path,
    folder: Path,
    place: Path,
    jobs: list[str],
    rounds: int,
    theirs_rounds: int | None = None,
) -> bool:
    """Run every job in turn, and print a table; whether every bar holds."""
    threads = default_threads()
    model = make_model(folder / "synth-16-f16.gguf", 16)
    imatrix = make_imatrix(folder / "synth-imatrix.gguf", 16)
    out = place / "out.gguf"
    os.environ["LD_LIBRARY_PATH"] = str(tools)
    copies = []
    for _ in range(rounds):
        copies.append(commands.measure(["cp", model, out]).wall)
        out.unlink()
    copy = statistics.median(copies)
    print(f"cp: {copy:.2f} s; {threads} threads", flush=True)
    good = True
    for job in jobs:
        name, times = job.split("=")
        recipe, _, with_imatrix = name.partition("+")
        more = ["--imatrix", imatrix] if with_imatrix else []
        kernels = kernel_seconds(model, recipe, imatrix if with_imatrix else None, threads)
        mine, theirs = [], []
        for number in range(rounds):
            if theirs_rounds is None or number < theirs_rounds:
                words = [tools / "llama-quantize", *more, model, out, recipe, threads]
                theirs.append(commands.measure(words))
                out.unlink()
            mine.append(commands.quantize(model, recipe, out, "--threads", threads, *more))
            out.unlink()
        wall = statistics.median(run.wall for run in mine)
        other = statistics.median(run.wall for run in theirs) if theirs else float("nan")
        peak = max(run.peak for run in mine)
        other_peak = min((run.peak for run in theirs), default=1 << 40)
        floor = copy + kernels
        cpu = statistics.median(run.cpu for run in mine)
        other_cpu = statistics.median(run.cpu for run in theirs) if theirs else float("nan")
        holds = not other / wall < float(times) and wall <= _SLACK * floor and peak <= other_peak
        good &= holds
        print(
            f"{name:>15}: {wall:6.2f} s ({', '.join(f'{run.wall:.2f}' for run in mine)}), "
            f"CPU {cpu:6.2f} s, {peak / 2**20:4.0f} MiB; "
            f"llama-quantize {other:6.2f} s, CPU {other_cpu:6.2f} s, "
            f"{other_peak / 2**20:4.0f} MiB; "
            f"{other / wall:5.1f} times faster (at least {times}), {other_cpu / cpu:.1f} by CPU; "
            f"kernels {kernels:.2f} s, "
            f"{wall / floor:.2f} times cp + kernels (at most {_SLACK}) "
            f"{'' if holds else ' FAILS'} {json.dumps(mine[-1].out['seconds'])}",
            flush=True,
        )
    return good


def main() -> None:
    """Parse the options; exit status 0 when all bars hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tools", type=Path, help="folder of llama-quantize")
    parser.add_argument("folder", type=Path, help="for the models and what is made of them")
    parser.add_argument("--job", action="append", help="recipe=times, or recipe+imatrix=times")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--theirs", type=int, help="rounds in which llama-quantize runs too")
    parser.add_argument("--out", type=Path, help="folder for what is made, such as /dev/shm")
    parser.add_argument("--depth", action="store_true")
    parser.add_argument("--make", type=int, help="only make the model of so many layers")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(given.folder).free
    if free < 8e9:
        sys.exit(f"{given.folder}: {free / 1e9:.0f} GB left on the disk, 8 are needed")
    if given.make:
        make_model(given.folder / f"synth-{given.make}-f16.gguf", given.make)
        good = True
    elif given.depth:
        good = depth(given.folder)
    else:
        good = compare(
            given.tools,
            given.folder,
            given.out or given.folder,
            given.job or JOBS,
            given.rounds,
            given.theirs,
        )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
