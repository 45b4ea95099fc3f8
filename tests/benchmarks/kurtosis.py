r"""Kurtosis of what attention and MLP read, before and after a rotation.

    python tests/benchmarks/kurtosis.py MODEL TEXT [--kind hadamard|random] [--samples N] \
        [--length N]

Of each input that follows a norm of the stream (q/k/v, gate/up): the fourth moment of all its
numbers, over tokens and channels, by the square of the second. Numbers that are distributed
normally have 3; the bar is 3.0 +- 0.5 after rotation. Exit status 1 where it is missed. A Hadamard
matrix turns one large channel into numbers of one size, whose kurtosis is 1: where a single channel
dominates, it falls below 3, which is good for rounding; a random matrix makes them normal.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from qtool.calibrating.sites import Tracer
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.recipe.rotate import RotateOptions
from qtool.streaming.linears import Matrix, ObserveLinears, WeightIndex
from qtool.streaming.skeleton import Skeleton
from qtool.texts.calibration import chunks
from qtool.texts.source import read_text
from qtool.texts.tokenizing import tokenized
from qtool.transforms import rotate
from qtool.transforms.rotated import untied


def kurtosis(weights: Checkpoint, tokens: np.ndarray) -> dict[str, float]:
    """By the first reader of each input that a norm makes."""
    skeleton = Skeleton.open(weights)
    stream = skeleton.embed(tokens)
    tracer = Tracer()
    found: dict[str, float] = {}
    for index in range(skeleton.count):
        block = skeleton.block(index)
        sites = [s for s in tracer.sites(block, stream).sites if s.producer is not None]
        first = {site.matrix: site.id for site in sites}
        sums = {site.id: np.zeros(3) for site in sites}

        def observe(
            matrix: Matrix,
            x: torch.Tensor,
            _: object,
            first: dict[Matrix, str] = first,
            sums: dict[str, np.ndarray] = sums,
        ) -> None:
            if matrix in first:
                square = x.double().square()
                sums[first[matrix]] += [
                    square.numel(), float(square.sum()), float(square.square().sum())
                ]  # fmt: skip

        for number, hidden in enumerate(stream.hidden):
            with ObserveLinears(WeightIndex(block.module), observe):
                stream.hidden[number] = block.run(hidden, stream.calls[index][number])
        for name, (count, second, fourth) in sums.items():
            found[name] = (fourth / count) / (second / count) ** 2
    return found


def main() -> None:
    """Print the range before and after."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--kind", choices=["hadamard", "random"], default="hadamard")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    given = parser.parse_args()
    torch.set_num_threads(1)
    source = Checkpoint.open(given.model)
    ids = np.concatenate([*tokenized(read_text(given.text), given.model)])
    tokens = chunks(ids, given.samples, given.length, 0)
    view = untied(source)
    print(*rotate.prepare(view, RotateOptions(kind=given.kind), print).notes(), sep="\n")
    missed = False
    for title, weights in (("before", source), ("after", view)):
        found = kurtosis(weights, tokens)
        for kind in ("attn", "mlp"):
            some = {name: value for name, value in found.items() if kind in name}
            low, high = min(some, key=some.__getitem__), max(some, key=some.__getitem__)
            middle = float(np.median([*some.values()]))
            print(
                f"{title} {kind}: {len(some)} inputs, median {middle:.3f}, from {some[low]:.3f} "
                f"({low}) to {some[high]:.3f} ({high})"
            )
            missed |= weights is view and not 2.5 <= some[low] <= some[high] <= 3.5
    raise SystemExit("missed: 3.0 +- 0.5" if missed else None)


if __name__ == "__main__":
    main()
