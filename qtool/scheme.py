"""How a tensor is stored: quantized under a Scheme, left dense, or dropped, with the reason.

`GroupQuant` is the in-memory form of every integer quantization here:

    w[o, k] = (codes[o, k] - zero[o, g_idx[k]]) * scale[o, g_idx[k]]        in float32

AWQ and GPTQ files are packings of it. With codes of at most 8 bits and a float16 scale the
product is exact in float32, so every reader must agree with `dequantize` bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np


@dataclass(frozen=True)
class Scheme:
    """Integer weights. group_size counts input features; -1 is one group per output channel."""

    bits: int
    group_size: int
    symmetric: bool
    scale_dtype: str = "float16"

    def groups(self, in_features: int) -> int:
        """Number of groups in a row of in_features."""
        size = self.group_size if self.group_size > 0 else in_features
        return -(-in_features // size)

    def __str__(self) -> str:
        group = f"g{self.group_size}" if self.group_size > 0 else "channel"
        return f"w{self.bits} {group} {'sym' if self.symmetric else 'asym'}"


@dataclass(frozen=True)
class Dense:
    """Copied in its own dtype; its values change only where a transform folds a scale into it."""

    reason: str


@dataclass(frozen=True)
class Dropped:
    """Not in the artifact."""

    reason: str


@dataclass(frozen=True)
class GroupQuant:
    """One quantized matrix. `g_idx` is None where column k belongs to group k // group_size."""

    scheme: Scheme
    codes: NDArray[np.uint8]  # [out, in]
    scale: NDArray[np.floating]  # [out, groups], in the stored dtype
    zero: NDArray[np.uint8]  # [out, groups], 0 .. 2^bits - 1
    g_idx: NDArray[np.int32] | None = None  # [in]

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)"""
        return self.codes.shape[0], self.codes.shape[1]

    def group_index(self) -> NDArray[np.int32]:
        """The group of each column, int32 [in]."""
        if self.g_idx is not None:
            return self.g_idx
        columns = self.codes.shape[1]
        size = self.scheme.group_size if self.scheme.group_size > 0 else columns
        return np.arange(columns, dtype=np.int32) // np.int32(size)

    def dequantize(self) -> NDArray[np.float32]:
        """The definition: float32 [out, in]."""
        index = self.group_index()
        difference = self.codes.astype(np.float32) - self.zero.astype(np.float32)[:, index]
        return difference * self.scale.astype(np.float32)[:, index]
