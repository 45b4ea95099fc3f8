"""How far quantized artifacts are from their original, on windows chosen in one of two ways.

    python tests/benchmarks/quality.py MODEL TEXT ARTIFACT... [--protocol first|rng] [--windows N]

`first` is what `qtool compare` does: the first N of the text's windows (default 20). Published
comparisons draw theirs: `rng` takes sorted(default_rng(0).permutation(n)[:N]) of the n windows
(default 16). All positions count; the figures are those of qtool.quality.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qtool.messages.progress import Progress
from qtool.native.library import default_threads
from qtool.quality import metrics
from qtool.quality.engine_inputs import activations
from qtool.quality.evaluate import size_of
from qtool.quality.forward import Forward, forward
from qtool.quality.weights import open_weights
from qtool.streaming.skeleton import Skeleton
from qtool.texts.source import read_text
from qtool.texts.tokenizing import tokenized


def windows(
    model: Path, text: Path, protocol: str, count: int, length: int
) -> NDArray[np.int64]:  # [count, length]
    """The evaluated tokens."""
    ids = np.concatenate([*tokenized(read_text(text), model)])
    n = len(ids) // length
    if n < count:
        raise SystemExit(f"{text}: {len(ids)} tokens, {count} windows of {length} are asked for")
    cut = ids[: n * length].reshape(n, length)
    if protocol == "first":
        return cut[:count]
    return cut[np.sort(np.random.default_rng(0).permutation(n)[:count])]


def main() -> None:
    """Print a line per artifact."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--protocol", choices=("first", "rng"), default="first")
    parser.add_argument("--windows", type=int, help="default: 20 first, 16 rng")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--json", action="store_true", help="one object a line")
    given = parser.parse_args()
    count = given.windows or {"first": 20, "rng": 16}[given.protocol]
    tokens = windows(given.model, given.text, given.protocol, count, given.length)
    quiet = Progress(quiet=True)

    def run(path: Path, reference: Forward | None) -> Forward | dict[str, object]:
        with open_weights(path) as weights:
            rounded = activations(weights, "plain")
            found = forward(
                Skeleton.open(weights),
                rounded,
                tokens,
                given.threads,
                quiet,
                keep=reference is None,
            )
            if reference is None:
                return found
            measured = metrics.measure(tokens, range(given.length), found, reference, quiet)
            return metrics.summary(measured, size_of(path) / size_of(given.model))

    reference = run(given.model, None)
    assert isinstance(reference, Forward)
    for path in given.artifacts:
        row = run(path, reference)
        assert isinstance(row, dict)
        if given.json:
            print(json.dumps({"name": str(path), **row, "bytes": size_of(path)}), flush=True)
            continue
        kld = row["kld"]
        assert isinstance(kld, dict)
        low, high = kld["interval"] or (kld["mean"], kld["mean"])
        print(
            f"{path}: KLD {kld['mean']:.5f} +- {(high - low) / 2:.5f} (95 %), perplexity "
            f"{row['perplexity']:.4f} (reference {row['reference_perplexity']:.4f}), top-1 "
            f"{row['top1_agreement']:.4f}, {size_of(path) / 1e6:.1f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
