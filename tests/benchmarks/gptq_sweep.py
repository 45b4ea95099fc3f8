"""The GPTQ column sweep of a 4096 x 4096 matrix, in matrix products of that size.

    python tests/benchmarks/gptq_sweep.py [--threads 1 2] [--rounds 5] [--bar 1.5] [--type Q4_K]

Times, in turns on the same threads, one float32 torch.matmul of 4096 x 4096 matrices and the sweep
of one at 4 bits in groups of 128 (float32, symmetric, the Cholesky factor not counted), or with
--type onto the levels that blocks of GGUF fix (and once, how long the levels and the new codes of
blocks take). Prints the medians and their ratio on each instruction set; exit status 1 where the
best one's is above the bar. Run it on an idle machine.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from qtool import native_gguf
from qtool.gguf.gptq.levels import levels, put_codes
from qtool.gguf_types import BY_NAME
from qtool.native import gptq_sweep, gptq_sweep_levels
from qtool.native import library as native

SIZE = 4096


def seconds(turn: Callable[[], object]) -> float:
    """Of one turn."""
    began = time.perf_counter()
    turn()
    return time.perf_counter() - began


def main() -> None:
    """Alternate products and sweeps, and print one line for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[native.default_threads()])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--isa", nargs="+", default=[native.selected()])
    parser.add_argument("--bar", type=float, default=1.5)
    parser.add_argument("--type", choices=BY_NAME)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(SIZE, SIZE, generator=generator)
    inputs = torch.randn(SIZE, SIZE, generator=generator)
    gram = inputs.T @ inputs / SIZE + 0.01 * torch.eye(SIZE)
    root = torch.linalg.cholesky(torch.linalg.inv(gram.double()), upper=True)
    factor = np.ascontiguousarray(root.float().numpy())
    matrix = weight.numpy()
    block = BY_NAME.get(options.type)
    if block is not None:
        blocks = native_gguf.encode(matrix, block, np.ones(SIZE, np.float32))
        fixed = levels(blocks, block, SIZE)
        codes = gptq_sweep_levels(matrix, factor, levels=fixed)
        told = seconds(lambda: levels(blocks, block, SIZE))
        put = seconds(lambda: put_codes(blocks, block, codes))
        print(f"{block.name}: levels {told:.3f} s, put_codes {put:.3f} s, one thread")
    worst = 0.0
    for threads in options.threads:
        torch.set_num_threads(threads)
        times: dict[str, list[float]] = {name: [] for name in ("matmul", *options.isa)}
        torch.matmul(weight, inputs)
        for _ in range(options.rounds):
            times["matmul"].append(seconds(lambda: torch.matmul(weight, inputs)))
            for isa in options.isa:
                native.select(isa)

                def sweep(count: int = threads) -> object:
                    if block is not None:
                        return gptq_sweep_levels(matrix, factor, levels=fixed, threads=count)
                    return gptq_sweep(
                        matrix, factor, bits=4, group_size=128, symmetric=True, threads=count
                    )

                times[isa].append(seconds(sweep))
        middle = {name: statistics.median(some) for name, some in times.items()}
        cells = [f"{isa} {middle[isa]:.2f} s = {middle[isa] / middle['matmul']:.2f}"
                 for isa in options.isa]  # fmt: skip
        print(f"{threads} threads: matmul {middle['matmul']:.2f} s; sweep {'; '.join(cells)}")
        worst = max(worst, middle[options.isa[-1]] / middle["matmul"])
    sys.exit(1 if worst > options.bar else 0)


if __name__ == "__main__":
    main()
