"""`--max-ram` is kept, and `qtool plan` knows what a run takes: peaks of resident memory.

    python tests/benchmarks/max_ram.py [--recipe R]... [--shape NAME]... [--samples 8] [--threads 2]
    python tests/benchmarks/max_ram.py --survey [--recipe R]... [--shape NAME]...

Five shapes: the shipped model, dense Llamas 1024 and 2048 wide, one with a wide vocabulary, and a
mixture of 32 experts; weights are random. Each is quantized without a budget, with the smallest one
that is taken, and with one in between. The peak must stay below 1.05 times the budget; without one
the estimate must be within 15 % of it. The bytes of the tensor files must be those that `qtool
plan` says, exactly. Exit status 1 where it is not so.

A run with a budget is in a memory control group whose limit is 1.05 times that: more would kill it.
Where none can be made (that takes Linux, root, /sys/fs/cgroup), this is told as not checked, and
the exit status is 2, unless --no-cgroup is given.

With --survey each is made once, without a budget, by recipes that differ in kind, GGUF among them,
and fitted once; a line says how the estimate and the peak differ, and the last ones sum up.
"""

import argparse
import contextlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import commands
import memory

from qtool.formats.safetensors_file import TensorSpec
from qtool.recipe.recipe import load

MOST_OVER = 0.05
MOST_WRONG = 0.15
MIB = 1 << 20


def mixture(folder: Path) -> Path:
    """A Qwen3 mixture of 32 experts, of which a token visits 4."""
    hidden, inner, heads, kv_heads, experts = 1024, 512, 16, 4, 32
    shape = memory.config(hidden, inner, heads, kv_heads, 2) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": inner,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "head_dim": hidden // heads,
    }
    wanted = [spec for spec in memory.specs(shape) if ".mlp." not in spec.name]
    for layer in range(2):
        block = f"model.layers.{layer}"
        norms = [(f"self_attn.{one}_norm", (hidden // heads,)) for one in "qk"]
        router = [("mlp.gate", (experts, hidden))]
        routed = [
            (f"mlp.experts.{expert}.{name}_proj", size)
            for expert in range(experts)
            for name, size in (
                ("gate", (inner, hidden)),
                ("up", (inner, hidden)),
                ("down", (hidden, inner)),
            )
        ]
        wanted += [
            TensorSpec(f"{block}.{name}.weight", "BF16", size)
            for name, size in (*norms, *router, *routed)
        ]
    return memory.write_model(folder, shape, wanted)


def dense(hidden: int, inner: int, heads: int, words: int | None = None) -> Callable[[Path], Path]:
    """Two layers of a Llama."""
    shape = memory.config(hidden, inner, heads, heads // 4, 2)
    if words is not None:
        shape["vocab_size"] = words
    return lambda folder: memory.write_model(folder, shape)


SHAPES: dict[str, Callable[[Path], Path]] = {
    "tiny": lambda _: memory.TINY,
    "1024": dense(1024, 2816, 16),
    "2048": dense(2048, 5632, 32),
    "vocabulary": dense(768, 2048, 12, 151_936),
    "experts": mixture,
}


PLAIN = ("w4g128-gptq", "w4g128-awq")
# Of each kind of recipe one: rounded to nearest, dense, calibrated, rotated, tuned, and into GGUF.
KINDS = (
    "w4g128-rtn", "fp8-dynamic", "fp8-block", "nvfp4", "int8-llmint8", "kv-fp8", "fp8-static",
    "w8a8-smoothquant-static", "w4g128-awq", "w4g128-gptq", "w4g64-mlx-rtn", "w4a4-rotated",
    "w4a8kv4-qserve", "w4-gptq-rotated", "w4g128-awq-gptq", "nvfp4-awq-gptq",
    "w4g128-awq-gptq-tune", "bf16", "q4_k_m", "iq2_m", "q4_k_m-awq-gptq", "iq2_m-awq-gptq", "fit",
)  # fmt: skip


def smallest(words: list[object]) -> int:
    """The least budget, in MiB, that a command's refusal of a smaller one names."""
    told = subprocess.run(
        [*map(str, words), "--max-ram", "1MiB"], capture_output=True, text=True, check=False
    )
    found = re.search(r"the least that would do is (\d+)MiB", told.stderr)
    if found is None:
        sys.exit(f"no refusal: {told.stderr}")
    return int(found[1])


def made(name: str, work: Path) -> Path:
    """The model of a shape."""
    # In a process of its own: what this one has held counts among a child's peak.
    maker = multiprocessing.get_context("fork").Process(target=SHAPES[name], args=(work / name,))
    maker.start()
    maker.join()
    return memory.TINY if name == "tiny" else work / name


def remove(model: Path, work: Path) -> None:
    """Of made()."""
    if model.parent == work:
        shutil.rmtree(model)


@contextlib.contextmanager
def limited(nbytes: int | None) -> Iterator[list[str]]:
    """Words before a command that has no more than so much memory; none where that cannot be."""
    group = Path(f"/sys/fs/cgroup/memory/qtool-{os.getpid()}")
    limit = "memory.limit_in_bytes"
    if not group.parent.is_dir():
        group, limit = Path(f"/sys/fs/cgroup/qtool-{os.getpid()}"), "memory.max"
    if nbytes is None:
        yield []
        return
    try:
        group.mkdir()
        (group / limit).write_text(str(nbytes))
    except OSError:
        yield []
        return
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()


def measure(
    name: str, model: Path, recipe: str, work: Path, more: list[object], unlimited: list[str]
) -> bool:
    """Three runs of one shape; whether all are as they should be. unlimited: gets the names of
    those that should have had a limit and had none."""
    least = smallest([sys.executable, "-m", "qtool", "plan", model, "--recipe", recipe, *more])
    good = True
    budgets: list[int | None] = [None]
    for number in range(3):
        budget = budgets[number]
        asked = [] if budget is None else ["--max-ram", f"{budget}MiB"]
        most = None if budget is None else int(budget * MIB * (1 + MOST_OVER))
        with limited(most) as prefix:
            done = commands.quantize(model, recipe, work / "out", *more, *asked, prefix=prefix)
        written = sum(path.stat().st_size for path in (work / "out").glob("*.safetensors"))
        shutil.rmtree(work / "out")
        planned = done.out["memory"]
        estimate, peak = planned["estimated_bytes"] / MIB, done.peak / MIB
        if budget is None:
            budgets += [(least + int(estimate)) // 2, least]
            words = [sys.executable, "-m", "qtool", "plan", model, "--recipe", recipe, *more]
            size = commands.run([*words, "--json"]).out["size_bytes"]
            fine = abs(estimate / peak - 1) <= MOST_WRONG and size == written
            limit = "none"
        else:
            fine = peak <= budget * (1 + MOST_OVER)
            limit = f"{budget}{' cgroup' if prefix else ''}"
            if not prefix:
                unlimited.append(f"{name} {recipe} {budget}")
        good &= fine
        print(
            f"{name:10} {recipe:12} budget {limit:>11}, estimate {estimate:5.0f}, "
            f"peak {peak:5.0f} MiB, {planned['threads']} threads, states "
            f"{'on disk' if planned['states_on_disk'] else 'in memory'}, Gram matrices "
            f"{planned['gram_bytes'] // MIB} MiB, {done.wall:.0f} s{'' if fine else '  MISSED'}",
            flush=True,
        )
    return good


def survey(name: str, model: Path, recipe: str, work: Path, given: argparse.Namespace) -> float:
    """How much more than the peak of a run the estimate is, as a share of it; prints a line."""
    out, threads = work / "out", ["--threads", given.threads]
    if recipe == "fit":
        out = out.with_suffix(".yaml")
        command = [sys.executable, "-m", "qtool", "fit", model, "--bits", 4.5, *words(given)]
        done = commands.run([*command, "-o", out, "--json"])
    else:
        loaded = load(recipe)
        out = out.with_suffix(".gguf") if loaded.format == "gguf" else out
        done = commands.quantize(
            model, recipe, out, *(words(given) if loaded.calibrates else threads)
        )
    memory.remove(out)
    estimate = done.out["memory"]["estimated_bytes"]
    wrong = float(estimate / done.peak - 1)
    print(
        f"{name:10} {recipe:23} estimate {estimate / MIB:5.0f}, peak {done.peak / MIB:5.0f} MiB, "
        f"{wrong:+6.1%}, {done.wall:.0f} s{'' if abs(wrong) <= MOST_WRONG else '  MISSED'}",
        flush=True,
    )
    return wrong


def surveyed(found: dict[str, float]) -> bool:
    """Print what a survey comes to, by shape and recipe; whether no estimate is too far off."""
    missed = {name: wrong for name, wrong in found.items() if abs(wrong) > MOST_WRONG}
    least, most = min(found.values()), max(found.values())
    print(
        f"{len(found)} runs, estimates {least:+.1%} to {most:+.1%} of the peak, {len(missed)} "
        f"beyond {MOST_WRONG:.0%}; lower than the peak by more than {MOST_OVER:.0%}: "
        f"{sum(wrong < -MOST_OVER for wrong in found.values())}"
    )
    return not missed


def arguments(description: str) -> argparse.ArgumentParser:
    """What this and `fit_memory.py` can be told."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="default: all")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, help="where models are made; default: a temporary one")
    parser.add_argument(
        "--no-cgroup", action="store_true", help="do without the limit that kills where none can be"
    )
    return parser


def words(given: argparse.Namespace) -> list[object]:
    """The same for a command of qtool."""
    settings = {"--samples": given.samples, "--length": given.length, "--threads": given.threads}
    return [word for pair in settings.items() for word in pair]


def main() -> None:
    """Measure every shape."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--recipe", action="append",
        help="default: w4g128-gptq and w4g128-awq; of a survey those that differ in kind, and fit",
    )  # fmt: skip
    parser.add_argument("--survey", action="store_true", help="no budgets, and more recipes")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    more = words(given)
    good = True
    unlimited: list[str] = []
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        work = Path(folder)
        for name in given.shape or SHAPES:
            model = made(name, work)
            for recipe in given.recipe or (KINDS if given.survey else PLAIN):
                if given.survey:
                    found[f"{name} {recipe}"] = survey(name, model, recipe, work, given)
                    continue
                good &= measure(name, model, recipe, work, more, unlimited)
            remove(model, work)
    if found:
        good = surveyed(found)
    if unlimited:
        print(f"not checked in a memory control group: {len(unlimited)} runs", flush=True)
    sys.exit(status(good, unlimited, given.no_cgroup))


def status(good: bool, unlimited: list[str], no_cgroup: bool) -> int:
    """0 means that all was good, and killed if it had not been."""
    if not good:
        return 1
    return 2 if unlimited and not no_cgroup else 0


if __name__ == "__main__":
    main()
