"""What llama.cpp stores in place of a checkpoint's numbers, and back.

Selective state spaces and gated delta nets learn the logarithm of how fast they forget, and
llama.cpp has the rate itself:

    gguf = -exp(A_log)        A_log = log(-gguf)

or, of Ling 3.0, exp(A_log).

Powers and logarithms are those of float64, rounded once: the same on every machine. Of a hundred
numbers, about one differs in its last bit from torch's, which convert_hf_to_gguf.py writes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class ValueMap:
    """What is stored of each number, and the number of what is stored."""

    forward: Callable[[Floats], Floats]
    inverse: Callable[[Floats], Floats]


def _minus_exp(values: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return (-np.exp(values.astype(np.float64))).astype(np.float32)


def _log_of_minus(values: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(-values.astype(np.float64)).astype(np.float32)


MINUS_EXP = ValueMap(_minus_exp, _log_of_minus)


def _exp(values: Floats) -> Floats:
    return -_minus_exp(values)


def _log(values: Floats) -> Floats:
    return _log_of_minus(-values)


EXP = ValueMap(_exp, _log)
