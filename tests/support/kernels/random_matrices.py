"""Random matrices as they are stored."""

import numpy as np
from numpy.typing import NDArray

from qtool.gguf_types import BlockType
from qtool.scheme import GroupQuant, Scheme


def random_blocks(block: BlockType, count: int, seed: int = 0) -> NDArray[np.uint8]:
    """[count, bytes] of random bits: all codes, all scales, infinities and NaNs among them."""
    raw = np.random.PCG64(seed + block.number).random_raw(count * block.nbytes)
    return raw.astype(np.uint8).reshape(count, block.nbytes)


def random_quant(
    bits: int, shape: tuple[int, int], size: int, symmetric: bool = False, ordered: bool = False
) -> GroupQuant:
    rng = np.random.default_rng(bits)
    scheme = Scheme(bits, size, symmetric)
    groups = scheme.groups(shape[1])
    codes = rng.integers(0, 1 << bits, shape, dtype=np.uint8)
    scale = rng.uniform(0.001, 0.1, (shape[0], groups)).astype(np.float16)
    zero = rng.integers(0, 1 << bits, (shape[0], groups), dtype=np.uint8)
    if symmetric:
        zero[:] = 1 << (bits - 1)
    index = np.arange(shape[1], dtype=np.int32) // np.int32(size if size > 0 else shape[1])
    return GroupQuant(scheme, codes, scale, zero, rng.permutation(index) if ordered else None)


def words_of(codes: NDArray[np.uint8], bits: int, padded: bool) -> NDArray[np.int32]:
    """Each row as one long integer, or `32 // bits` codes to a word."""
    each = 32 // bits if padded else codes.shape[1]
    rows = []
    for row in codes.tolist():
        words: list[int] = []
        for begin in range(0, len(row), each):
            run = row[begin : begin + each]
            number = sum(code << (bits * i) for i, code in enumerate(run))
            count = 1 if padded else -(-len(run) * bits // 32)
            words += [number >> (32 * i) & 0xFFFFFFFF for i in range(count)]
        rows.append(words)
    return np.array(rows, np.uint32).view(np.int32)
