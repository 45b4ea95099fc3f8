"""How long quantizing takes, in forward passes of the calibration tokens.

    python tests/benchmarks/speed.py MODEL TEXT [--rounds 3] [--recipe w4g64-gptq=2.0]...

Each round times, one after the other, two forward passes of the same tokens through the model's
blocks (transformers, float32, all in memory, no head), and `qtool quantize` with each recipe, each
in a process of its own. Medians over the rounds are compared: GPTQ may take 2.0 times as long as
the two passes, AWQ 4.0 times (exit status 1 where it takes longer). Run it on an idle machine.

    forward   seconds of the two passes alone, without starting Python and loading the model
    quantize  seconds of the whole command, from start to finished artifact

The tokens: TEXT cut into chunks of --length, sorted(default_rng(0).permutation(n)[:--samples]).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import commands

from qtool.native.library import default_threads

DEFAULTS = ["w4g64-gptq=2.0", "w4g64-awq=4.0"]


def forward(model: Path, text: Path, samples: int, length: int, threads: int, batch: int) -> None:
    """Two passes over the tokens; prints {"seconds": s}."""
    import torch
    from transformers import AutoModelForCausalLM

    from qtool.recipe.recipe import Calibration
    from qtool.texts.calibration import calibration_tokens

    torch.set_num_threads(threads)
    settings = Calibration(source=str(text), samples=samples, length=length)
    tokens = torch.from_numpy(calibration_tokens(settings, model).tokens)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    inner = loaded.base_model
    with torch.inference_mode():
        inner(tokens[:1, :8], use_cache=False)
        began = time.perf_counter()
        for _ in range(2):
            for some in tokens.split(batch):
                inner(some, use_cache=False)
        seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds}))


def main() -> None:
    """Alternate the passes and the recipes, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--recipe", action="append", help="NAME=RATIO that it may take at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="samples in a forward pass")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--forward", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = (given.samples, given.length, given.threads)
    if given.forward:
        forward(given.model, given.text, *sizes, given.batch)
        return
    bars = dict(item.split("=") for item in given.recipe or DEFAULTS)
    own = ["--samples", given.samples, "--length", given.length, "--threads", given.threads]
    passes: list[float] = []
    taken: dict[str, list[float]] = {recipe: [] for recipe in bars}
    with tempfile.TemporaryDirectory() as name:
        for number in range(given.rounds):
            done = commands.run([sys.executable, __file__, given.model, given.text, *own,
                                 "--batch", given.batch, "--forward"])  # fmt: skip
            passes.append(float(done.out["seconds"]))
            said = [f"two passes {passes[-1]:.2f} s"]
            for recipe in bars:
                out = Path(name) / f"{number}-{recipe}"
                done = commands.quantize(given.model, recipe, out, "--calibration", given.text,
                                         *own)  # fmt: skip
                taken[recipe].append(done.wall)
                said.append(f"{recipe} {done.wall:.2f} s ({done.cpu:.1f} CPU s, "
                            f"{done.peak / 1e6:.0f} MB)")  # fmt: skip
            print(f"round {number + 1}: {', '.join(said)}", flush=True)
    base = statistics.median(passes)
    good = True
    for recipe, bar in bars.items():
        ratio = statistics.median(taken[recipe]) / base
        good &= ratio <= float(bar)
        print(f"{recipe}: {ratio:.2f} times two forward passes (at most {bar})")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
