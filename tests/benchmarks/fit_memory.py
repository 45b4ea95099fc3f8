r"""`qtool fit --max-ram` is kept: peaks of resident memory, of checkpoints and of GGUF files.

    python tests/benchmarks/fit_memory.py [--shape NAME]... [--model DIR]... \
        [--samples 8] [--threads 2]

Shapes of random weights as in max_ram.py, or models that are there. Of each, a recipe of GGUF and
one of compressed-tensors is fitted without a budget, and with the smallest one that is taken; last
the first of a GGUF file in bfloat16. The peak must stay below 1.05 times the budget, and the recipe
must be the same to the byte. Exit status 1 where it is not so.

With a budget a run is in a memory control group, as in max_ram.py; exit status 2 where none can be
made, unless --no-cgroup is given.
"""

import os
import sys
import tempfile
from pathlib import Path

import commands
import max_ram
from max_ram import MIB, MOST_OVER, smallest

CHECKPOINT = (("q4_k_m-awq-gptq", 4.5), ("w4a16-ct", 16.0))
FILE = (("q4_k_m", 4.5),)


def words_of(model: Path, recipe: str, bits: float, out: Path, more: list[object]) -> list[object]:
    words = [sys.executable, "-m", "qtool", "fit", model, "--recipe", recipe, "--bits", bits]
    return [*words, *more, "-o", out, "--json"]


def measure(
    name: str, model: Path, recipe: str, bits: float, work: Path, more: list[object],
    unlimited: list[str],
) -> bool:  # fmt: skip
    """Without a budget and with the smallest; whether both are as they should be."""
    good, recipes = True, []
    out = work / "fitted.yaml"
    words = words_of(model, recipe, bits, out, more)
    for budget in (None, smallest(words)):
        asked = [] if budget is None else ["--max-ram", f"{budget}MiB"]
        most = None if budget is None else int(budget * MIB * (1 + MOST_OVER))
        with max_ram.limited(most) as prefix:
            done = commands.run([*prefix, *words, *asked])
        recipes.append(out.read_bytes())
        out.unlink()
        peak = done.peak / MIB
        planned = done.out["memory"]
        fine = budget is None or peak <= budget * (1 + MOST_OVER)
        fine &= recipes[0] == recipes[-1]
        if budget is not None and not prefix:
            unlimited.append(f"{name} {recipe} {budget}")
        limit = "none" if budget is None else f"{budget}{' cgroup' if prefix else ''}"
        print(
            f"{name:12} {recipe:15} budget {limit:>11}, estimate "
            f"{planned['estimated_bytes'] / MIB:5.0f}, peak {peak:5.0f} MiB, "
            f"{planned['threads']} threads, {done.wall:.0f} s{'' if fine else '  MISSED'}",
            flush=True,
        )
        good &= fine
    return good


def main() -> None:
    """Measure every shape."""
    parser = max_ram.arguments(__doc__)
    parser.add_argument("--model", action="append", type=Path, help="a folder that is there")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    more = max_ram.words(given)
    good = True
    unlimited: list[str] = []
    shapes = given.shape or ([] if given.model else list(max_ram.SHAPES))
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        work = Path(folder)
        models = {str(path): path for path in given.model or ()}
        for name in [*models, *shapes]:
            model = models.get(name) or max_ram.made(name, work)
            for recipe, bits in CHECKPOINT:
                good &= measure(model.name, model, recipe, bits, work, more, unlimited)
            file = work / "bf16.gguf"
            commands.quantize(model, "bf16", file)
            for recipe, bits in FILE:
                good &= measure(f"{model.name}.gguf", file, recipe, bits, work, more, unlimited)
            file.unlink()
            max_ram.remove(model, work)
    if unlimited:
        print(f"not checked in a memory control group: {len(unlimited)} runs", flush=True)
    sys.exit(max_ram.status(good, unlimited, given.no_cgroup))


if __name__ == "__main__":
    main()
