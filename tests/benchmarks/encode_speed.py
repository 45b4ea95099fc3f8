"""How many times faster than libggml-base the GGUF encoders are, on one thread.

    QTOOL_ORACLE_GGML=libggml-base.so python tests/benchmarks/encode_speed.py [TYPE...]

Both encode the same rows of nearly normal weights in this process, in turns: ggml's encoder, then
ours on each instruction set. Printed are millions of weights a second and the ratio of the median
times, beside the bar; exit status 1 where an instruction set in --bar misses it. Run it on an idle
machine; ggml alone needs about --seconds for each turn.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from oracle import ggml_blocks

from qtool.gguf_types import BY_NAME, BlockType
from qtool.native import library as native
from support.kernels import gguf_data

COLUMNS = 4096
MOST_ROWS = 256  # rows and blocks fit in the cache, as the chunks of rows of a run do
# (without importance, with importance); None: no bar.
BARS: dict[str, tuple[float | None, float | None]] = {
    **dict.fromkeys(("Q2_K", "Q4_K", "Q5_K"), (10.0, 8.0)),
    "Q3_K": (5.0, 8.0),
    "Q6_K": (8.0, None),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), (10.0, 10.0)),
    **dict.fromkeys(
        ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"), (4.0, 4.0)
    ),
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), (None, 8.0)),
}

Turn = Callable[[NDArray[np.float32]], object]


def timed(turn: Turn, weight: NDArray[np.float32]) -> float:
    """CPU seconds of one turn: what else runs on the machine counts little."""
    began = time.thread_time()
    turn(weight)
    return time.thread_time() - began


def encoder(
    block: BlockType, factors: NDArray[np.float32] | None, blocks: NDArray[np.uint8]
) -> Turn:
    """The kernel alone, into memory that has been touched, as ggml gets it."""
    function = native.library().qt_gguf_encode
    function.argtypes = (c_int32, c_int64, c_int64, c_void_p, c_void_p, c_void_p)
    given = None if factors is None else factors.ctypes.data

    def run(weight: NDArray[np.float32]) -> object:
        at = weight.ctypes.data
        return function(block.number, *weight.shape, at, given, blocks.ctypes.data)

    return run


def measure(
    block: BlockType,
    factors: NDArray[np.float32] | None,
    isas: list[str],
    options: argparse.Namespace,
) -> tuple[float, dict[str, float]]:
    """Seconds a weight of ggml, and of each instruction set."""
    weight = gguf_data.weights("bell", MOST_ROWS, COLUMNS)
    blocks = np.zeros((MOST_ROWS, block.row_bytes(COLUMNS)), np.uint8)
    theirs = ggml_blocks.encoder(block, COLUMNS, factors, blocks)
    ours = encoder(block, factors, blocks)
    timed(theirs, weight[:4])
    one = timed(theirs, weight[:4]) / 4
    weight = weight[: max(4, min(MOST_ROWS, round(options.seconds / one)))]
    seconds: dict[str, list[float]] = {name: [] for name in ("ggml", *isas)}
    for _ in range(options.rounds):
        seconds["ggml"].append(timed(theirs, weight))
        for isa in isas:
            native.select(isa)
            # Shorter turns than ggml's are disturbed more: the best of two.
            seconds[isa].append(min(timed(ours, weight), timed(ours, weight)))
    medians = {name: statistics.median(some) / weight.size for name, some in seconds.items()}
    return medians.pop("ggml"), medians


def main() -> None:
    """Measure each type without and with importance, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("types", nargs="*", help="block types; all that have a bar unless told")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="of ggml's turns")
    parser.add_argument("--isa", action="append", help="instruction set, repeatable (default: all)")
    parser.add_argument("--bar", action="append", help="those that must reach it (default: best)")
    options = parser.parse_args()
    if ggml_blocks.path() is None:
        sys.exit("QTOOL_ORACLE_GGML does not name libggml-base")
    isas = options.isa or native.available()
    must = set(options.bar or [native.available()[-1]])
    missed = 0
    print(
        f"{'type':8} {'importance':10} {'ggml Mw/s':>9}", *(f"{isa:>16}" for isa in isas), "  bar"
    )
    for name in options.types or BARS:
        for importance in ("none", "spread"):
            if importance == "none" and BY_NAME[name].needs_importance:
                continue
            factors = gguf_data.importance(importance, COLUMNS)
            theirs, ours = measure(BY_NAME[name], factors, isas, options)
            bar = BARS.get(name, (None, None))[importance != "none"]
            cells = [f"{1e-6 / ours[isa]:8.1f} {theirs / ours[isa]:5.1f} x" for isa in isas]
            low = [isa for isa in isas if bar and isa in must and theirs / ours[isa] < bar]
            missed += len(low)
            print(f"{name:8} {importance:10} {1e-6 / theirs:9.2f}", *(f"{c:>16}" for c in cells),
                  f"{bar or '-':>5}", "BELOW" if low else "", flush=True)  # fmt: skip
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
