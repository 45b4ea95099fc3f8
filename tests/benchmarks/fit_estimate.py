"""What `qtool fit` says that a file loses, against what `qtool eval` finds that it does.

    python tests/benchmarks/fit_estimate.py MODEL --text FILE [--type q3_k]... [--samples 16]
        [--length 512] [--windows 6]

Every matrix is rounded as one type has it, to nearest with importance, one type after another. Both
are of the same text; KL divergences are in nats a token.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import commands

TYPES = ["q6_k", "q5_k", "q4_k", "q3_k", "q2_k"]
PLAIN = ["--set", "method=rtn", "--set", "importance=true", "--set", "transforms=[]"]


def qtool(*words: object) -> dict[str, object]:
    return commands.run([sys.executable, "-m", "qtool", *words, "--json"]).out


def main() -> None:
    """A line for each type."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--type", action="append", help=f"default: {', '.join(TYPES)}")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--work", type=Path, help="where files are made; default: a temporary one")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    kinds = given.type or TYPES
    asked = [given.model, "--recipe", "q4_k_m", *PLAIN, "--calibration", given.text]
    asked += ["--samples", given.samples, "--length", given.length, "--bits", 32]
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        work = Path(folder)
        costs = ["--costs", work / "costs.json"]
        qtool("fit", *asked, *costs, "--types", ",".join(kinds), "-o", work / "all.yaml")
        for kind in kinds:
            recipe, file = work / f"{kind}.yaml", work / f"{kind}.gguf"
            found = qtool("fit", *asked, *costs, "--types", kind, "-o", recipe)
            each = found["chosen"]
            assert isinstance(each, list)
            text = ["--calibration", given.text, "--samples", given.samples]
            text += ["--length", given.length]
            qtool("quantize", given.model, "--recipe", recipe, "-o", file, *text)
            windows = ["--windows", given.windows, "--length", given.length]
            told = qtool("eval", file, "--against", given.model, "--text", given.text, *windows)
            divergence = told["kld"]
            assert isinstance(divergence, dict)
            print(
                f"{Path(given.model).name} {kind}: sum of losses "
                f"{sum(one['loss'] for one in each):.4f}, said {found['loss']:.4f}, measured "
                f"{divergence['mean']:.4f}; unrelated places {found['unrelated']:.3g}",
                flush=True,
            )
            file.unlink()


if __name__ == "__main__":
    main()
