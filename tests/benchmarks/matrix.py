"""How long `qtool matrix` takes, beside a `qtool quantize` for each of its recipes.

    python tests/benchmarks/matrix.py MODEL TEXT [--samples 32] [--length 256]
    python tests/benchmarks/matrix.py MODEL TEXT --state times.json --only w4g128-awq    (and so on)
    python tests/benchmarks/matrix.py MODEL TEXT --state times.json --only matrix

Each run is a process of its own, timed from start to finished artifact; the matrix with its report.
Together the eight recipes may take 45 % of the time of the eight runs (exit status 1 where they
take more). With --state each piece can be timed when the machine is idle; the last one sums up.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import commands

RECIPES = (
    "w4g128-awq",
    "w4g128-gptq",
    "w3g128-gptq",
    "w8-gptq",
    "w4a16-ct-awq",
    "w8a8-static",
    "q4_k_m-importance",
    "q5_k_m",
)
WRITTEN = {"q4_k_m-importance": "format: gguf\ntype: q4_k_m\nimportance: true\n"}
DATA_FREE = ("q5_k_m",)
BAR = 0.45


def main() -> None:
    """Time what is asked for, and compare where all is known."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--only", help="one of the recipes, or matrix")
    parser.add_argument("--state", type=Path, help="JSON file of times, read and written")
    given = parser.parse_args()
    times = {}
    if given.state is not None and given.state.is_file():
        times = json.loads(given.state.read_text())
    own = ["--calibration", given.text, "--samples", given.samples, "--length", given.length]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {one: str(folder / f"{one}.yaml") for one in WRITTEN}
        for one, text in WRITTEN.items():
            Path(files[one]).write_text(text)
        named = [files.get(one, one) for one in RECIPES]
        for one, recipe in zip(RECIPES, named, strict=True):
            if given.only in (None, one):
                more = [] if one in DATA_FREE else own
                done = commands.quantize(given.model, recipe, folder / f"one-{one}", *more)
                times[one] = [done.wall, done.cpu]
        if given.only in (None, "matrix"):
            command = [sys.executable, "-m", "qtool", "matrix", given.model, "--json"]
            command += ["--recipes", ",".join(named), "-o", str(folder / "matrix")]
            done = commands.run([*command, *own])
            assert not done.out["failed"], done.out
            times["matrix"] = [done.wall, done.cpu]
            for one in done.out["artifacts"]:
                print(f"  {one['recipe']}: {one['seconds']:.1f} s ({one['calibrated']})")
            for one in done.out["passes"]:
                print(f"  pass: {one['seconds']:.1f} s, {one['size_bytes'] / 1e6:.0f} MB")
    if given.state is not None:
        given.state.write_text(json.dumps(times))
    for one, (wall, cpu) in times.items():
        print(f"{one}: {wall:.1f} s ({cpu:.1f} CPU s)")
    if not {*RECIPES, "matrix"} <= times.keys():
        return
    sums = [sum(times[one][which] for one in RECIPES) for which in (0, 1)]
    ratios = [times["matrix"][which] / sums[which] for which in (0, 1)]
    print(
        f"matrix: {ratios[0]:.1%} of the time of {len(RECIPES)} runs ({sums[0]:.1f} s), "
        f"{ratios[1]:.1%} of their CPU time; at most {BAR:.0%}"
    )
    sys.exit(0 if ratios[0] <= BAR else 1)


if __name__ == "__main__":
    main()
