"""Words of every layout, and what they stand for."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.native.packing import dequantize, words_shape
from support.kernels import packed_definitions as define

WORDS = [
    *(("columns", bits) for bits in (2, 3, 4, 8)),
    *(("rows", bits) for bits in range(2, 9)),
    *(("padded", bits) for bits in range(2, 9)),
    ("across", 4),
    ("strips", 4),
]
# (rows, columns, group size): one group and one block, odd numbers, several tiles.
SHAPES = [(8, 64, 64), (24, 192, 32), (72, 1088, 64), (16, 320, -1)]
ODD_SHAPES = [(1, 1, 1), (7, 33, 5), (19, 1100, 100), (3, 997, -1), (33, 160, 48)]


def any_float(seed: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """float32 of every kind: zero, subnormal, ordinary, largest, infinite, NaN of many bits."""
    kinds = np.array(
        [0, 1, 0x80000000, 0x807FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0x7FFFFFFF, 0xFFBFFFFF],
        np.uint32,
    )
    bits = define.random_bits(seed, shape, np.uint32)
    common = (bits & 0x007FFFFF) | np.uint32(0x3C000000)
    rare = kinds[(bits >> 8 & 0xFF) % len(kinds)]
    choice = bits >> 28
    chosen = np.where(choice < 8, common, np.where(choice < 12, bits, rare))
    return chosen.astype(np.uint32).view(np.float32)


def zero_of(seed: int, shape: tuple[int, ...], bits: int) -> NDArray[np.uint8]:
    return (define.random_bits(seed, shape, np.uint8) & ((1 << bits) - 1)).astype(np.uint8)


class Packed:
    """A random matrix in words, with what it stands for."""

    def __init__(
        self, layout: str, bits: int, shape: tuple[int, int, int], ordered: bool = False
    ) -> None:
        rows, columns, size = shape
        self.shape, self.bits, self.layout = (rows, columns), bits, layout
        groups = 1 if size == -1 else -(-columns // size)
        self.words = define.random_bits(bits, words_shape(self.shape, bits, layout), np.int32)
        self.scale = any_float(bits + 1, (rows, groups))
        self.zero = zero_of(bits + 2, (rows, groups), bits)
        index = np.zeros(columns, np.int32) if size == -1 else np.arange(columns) // size
        self.index = index.astype(np.int32)
        self.g_idx = None
        if ordered:
            self.index = np.random.default_rng(bits).permutation(self.index)
            self.g_idx = self.index
        self.options: dict[str, Any] = {
            "scale": self.scale,
            "zero": self.zero,
            "group_size": size,
            "g_idx": self.g_idx,
        }
        codes = define.codes(self.words, self.shape, bits, layout).astype(np.float32)
        with np.errstate(all="ignore"):
            exact = (codes - self.zero[:, self.index]) * self.scale[:, self.index]
        self.exact = exact.astype(np.float32)

    def found(self, dtype: str, **more: Any) -> NDArray[Any]:
        options = {**self.options, "dtype": dtype, **more}
        words = options.pop("words", self.words)
        return dequantize(words, self.shape, self.bits, self.layout, **options)


def fits(layout: str, shape: tuple[int, int, int]) -> bool:
    rows, columns, _ = shape
    return (layout != "across" or rows % 8 == 0) and (
        layout != "strips" or (rows % 4 == 0 and columns % 64 == 0)
    )


KINDS = ["int8", "uint8", "float8_e4m3fn", "float8_e5m2"]
