"""What bfloat16 products gain where the CPU has them: calibration.precision, side by side.

    python tests/benchmarks/precision.py [--recipe R]... [--width 4096] [--layers 1] [--samples 64]
    python tests/benchmarks/precision.py --model MODEL --calibration TEXT [--recipe R]...

Each round quantizes with both, in processes of their own, the first one in turn; medians of seconds
and of peak memory, and of the ratio of the two in each round. Without a model: layers of a Llama so
wide, of random weights, with the tokenizer of the shipped model. Run it on an idle machine.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import commands
import memory

from qtool.recipe.file import PRECISIONS
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import load
from qtool.streaming.precision import has_bfloat16


def wide(folder: Path, width: int, layers: int) -> Path:
    """Layers in the proportions of Llama 7B."""
    inner = width * 11008 // 4096 // 128 * 128
    heads = width // 128
    return memory.write_model(folder, memory.config(width, inner, heads, heads, layers))


def main() -> None:
    """Alternate both, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", action="append")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if not has_bfloat16():
        sys.exit("this CPU multiplies no matrices in bfloat16")
    own = ["--samples", given.samples]
    if given.calibration is not None:
        own += ["--calibration", given.calibration]
    with tempfile.TemporaryDirectory() as name:
        model = given.model or wide(Path(name) / "model", given.width, given.layers)
        for recipe in given.recipe or ["w4g128-gptq"]:
            is_gguf = isinstance(load(recipe), GgufRecipe)
            taken: dict[str, list[commands.Finished]] = {one: [] for one in PRECISIONS}
            for number in range(given.rounds):
                for precision in PRECISIONS[:: -1 if number % 2 else 1]:
                    out = Path(name) / ("out.gguf" if is_gguf else "out")
                    asked = f"calibration.precision={precision}"
                    done = commands.quantize(model, recipe, out, *own, "--set", asked)
                    out.unlink() if is_gguf else shutil.rmtree(out)
                    taken[precision].append(done)
                    print(f"{recipe} {precision}: {done.wall:.1f} s", flush=True)
            for precision, runs in taken.items():
                seconds = statistics.median(one.wall for one in runs)
                peak = statistics.median(one.peak for one in runs) / 2**20
                print(f"{recipe} {precision}: median {seconds:.1f} s, {peak:.0f} MiB")
            both = zip(taken["float32"], taken["bfloat16"], strict=True)
            ratios = [first.wall / second.wall for first, second in both]
            print(
                f"{recipe}: {statistics.median(ratios):.2f} times as fast "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
