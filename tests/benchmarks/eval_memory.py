r"""Peak memory of `qtool eval` on synthetic Llamas that differ in the number of layers only.

    python tests/benchmarks/eval_memory.py [--recipe R]... [--layers 4 64] [--windows 4] \
        [--length 512]

Each recipe's artifact is evaluated alone and against the model it was made of; the peak resident
memory at the numbers of layers must differ by less than 10 % (exit status 1 where it does not).
What a layer weighs in float32, and so what keeping them would cost, is printed beside it.
"""

import argparse
import sys
import tempfile
from math import prod
from pathlib import Path

import commands
import memory

from qtool.texts.source import default_text

MOST_DIFFERENT = 0.10
RECIPES = ("w4g128-rtn", "q4_k_m")


def evaluate(artifact: Path, text: Path, *more: object) -> commands.Finished:
    """`qtool eval --json`, nothing kept."""
    command = [sys.executable, "-m", "qtool", "eval", artifact, "--text", text, "--no-cache"]
    return commands.run([*command, "--json", *more])


def main() -> None:
    """Print a line per evaluation and recipe."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", action="append")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    given = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.txt"
        text.write_text(default_text(), encoding="utf-8")
        models = {}
        for layers in given.layers:
            shape = memory.config(512, 1536, 8, 4, layers)
            models[layers] = memory.write_model(folder / f"model{layers}", shape)
        of_layer = sum(
            4 * prod(spec.shape) for spec in memory.specs(memory.config(512, 1536, 8, 4, 1))
            if ".layers." in spec.name
        )  # fmt: skip
        print(f"a layer in float32: {memory.mib(of_layer)}")
        options = ("--windows", given.windows, "--length", given.length)
        for recipe in given.recipe or RECIPES:
            peaks: dict[bool, list[int]] = {False: [], True: []}
            for layers, model in models.items():
                out = folder / f"{recipe}-{layers}{'.gguf' if recipe.startswith('q') else ''}"
                commands.quantize(model, recipe, out)
                for against, row in peaks.items():
                    more = ("--against", model) if against else ()
                    run = evaluate(out, text, *options, *more)
                    row.append(run.peak)
                    beside = ", against the model" if against else ""
                    print(f"{recipe}, {layers} layers{beside}: {memory.mib(run.peak)}, "
                          f"{run.wall:.0f} s", flush=True)  # fmt: skip
            for against, row in peaks.items():
                different = max(row) / min(row) - 1
                failed |= different >= MOST_DIFFERENT
                said = "with a reference" if against else "alone"
                print(f"{recipe} {said}: differ by {different:.1%} "
                      f"(bar: less than {MOST_DIFFERENT:.0%})")  # fmt: skip
    sys.exit(failed)


if __name__ == "__main__":
    main()
