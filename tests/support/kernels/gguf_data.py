"""Weights and importance for the GGUF encoders, the same on every machine.

Only raw bits of PCG64 and exact or correctly rounded arithmetic, so that digests of what ggml makes
of them can be kept.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

KINDS = (
    "bell", "heavy", "sparse", "constant", "zero", "steps", "positive", "level", "tiny", "mixed",
    "large", "powers",
)  # fmt: skip
IMPORTANCE = ("none", "spread", "holes", "zeros", "huge")


def _uniform(bits: np.random.PCG64, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Multiples of 2^-32 in [0, 1)."""
    raw = bits.random_raw(int(np.prod(shape))) >> np.uint64(32)
    return np.ldexp(raw.astype(np.float64), -32).reshape(shape)


def _bell(bits: np.random.PCG64, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Sums of twelve uniform numbers, less six: nearly normal, variance one."""
    total = _uniform(bits, shape)
    for _ in range(11):
        total += _uniform(bits, shape)
    return total - 6.0


def _scales(bits: np.random.PCG64, shape: tuple[int, ...], low: int, high: int) -> NDArray:
    """Powers of two from 2^low to 2^(high - 1)."""
    return np.ldexp(1.0, (low + _uniform(bits, shape) * (high - low)).astype(np.int64))


def weights(kind: str, rows: int, columns: int, seed: int = 0) -> Floats:
    """[rows, columns] float32 of one kind."""
    bits = np.random.PCG64(1000 * seed + KINDS.index(kind))
    shape = (rows, columns)
    if kind == "bell":
        x = _bell(bits, shape) / 64
    elif kind == "heavy":
        x = _bell(bits, shape) / (_uniform(bits, shape) + 2.0**-10)
    elif kind == "sparse":
        x = _bell(bits, shape) * (_uniform(bits, shape) < 0.05)
    elif kind == "constant":
        x = np.repeat(_bell(bits, (rows, 1)), columns, 1)
    elif kind == "zero":
        x = np.zeros(shape)
    elif kind == "steps":
        x = np.floor(_uniform(bits, shape) * 7 - 3) / 8
    elif kind == "positive":
        x = np.abs(_bell(bits, shape)) + 0.5
    elif kind == "level":
        x = _bell(bits, shape) * _scales(bits, (rows, 1), -20, 4) - 100
    elif kind == "tiny":
        x = _bell(bits, shape) * _scales(bits, (rows, 1), -146, -20)
    elif kind == "mixed":
        x = _bell(bits, shape) * _scales(bits, (rows, columns // 16), -30, 12).repeat(16, 1)
    elif kind == "large":
        x = _bell(bits, shape) * _scales(bits, (rows, 1), 10, 55)
    else:  # a few last places around powers of two, where a logarithm may round up
        exponent = (np.arange(rows * columns // 32) % 250 - 124).reshape(rows, -1).repeat(32, 1)
        near = 1 - np.floor(_uniform(bits, shape) * 64) * 2.0**-24
        x = np.ldexp(near, exponent) * np.where(_uniform(bits, shape) < 0.5, -1, 1)
    with np.errstate(under="ignore"):
        return x.astype(np.float32)


# Each kind, and once more those whose sums overflow in some draws only.
DIGESTED = (*KINDS, "large 9", "tiny 9", "mixed 9")


def digested(kind: str) -> Floats:
    """[rows, 1280]: the weights of gguf_digests.json; a number is the seed of another draw."""
    name, _, seed = kind.partition(" ")
    return weights(name, 2 if seed else 3, 1280, seed=int(seed or 0))


def importance(kind: str, columns: int, seed: int = 0) -> Floats | None:
    """[columns] float32 of one kind, None for "none"."""
    bits = np.random.PCG64(77 + 1000 * seed + IMPORTANCE.index(kind))
    if kind == "none":
        return None
    w = (_uniform(bits, (columns,)) + 2.0**-6) * _scales(bits, (columns,), -3, 4)
    if kind == "holes":
        w *= _uniform(bits, (columns,)) < 0.5
    elif kind == "zeros":
        w *= 0
    elif kind == "huge":
        w *= _scales(bits, (columns,), -30, 60)
    return w.astype(np.float32)
