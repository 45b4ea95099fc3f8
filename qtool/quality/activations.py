"""What engines make of a matrix's input before they multiply: the numbers it is rounded to.

    q8 of 256   d = 1 / (127 / m), m the largest |x| of a block of 256; rint(x * 127 / m) * d
    q8 of 32    d = float16(m / 127), m of a block of 32; rint(x * 127 / m) * d
    f16, bf16   each number
    int8        s = max(m, eps) / 127, m of a token; clamp(rint(x / s), -128, 127) * s; or s as
                stored, with a zero point z: (clamp(rint(x / s) + z, -128, 127) - z) * s
    fp8         s = max(m, eps) / 448; e4m3(clamp(x / s, -448, 448)) * s; or s as stored

rint is to even. All in float32, as engines do it; of two operands whose product is exact in int32
or float32, only the rounding shows. q8 is what llama.cpp does on a CPU: blocks of 256 for matrices
of super-blocks, of 32 for those of the older types (ggml-quants.c and ggml-cpu/arch/x86/quants.c
of llama.cpp 0c1e57098; signs and the choice of -127 or 127 leave the numbers alone). int8 and fp8
are those of compressed-tensors 0.19 as vLLM runs them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

_E4M3 = 448.0


@dataclass(frozen=True)
class Rounding:
    """A name for people, and the function: [..., in_features] float32 -> the same."""

    name: str
    apply: Callable[[torch.Tensor], torch.Tensor]


def q8_of_256(x: torch.Tensor) -> torch.Tensor:
    """Blocks of 256 with a float32 scale."""
    blocks = x.reshape(*x.shape[:-1], -1, 256)
    inverse = _over(127.0, blocks.abs().amax(-1, keepdim=True))
    return ((blocks * inverse).round_() * _over(1.0, inverse)).view(x.shape)


def q8_of_32(x: torch.Tensor) -> torch.Tensor:
    """Blocks of 32 with a float16 scale."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    most = blocks.abs().amax(-1, keepdim=True)
    return ((blocks * _over(127.0, most)).round_() * half(most / 127.0)).view(x.shape)


def half(x: torch.Tensor) -> torch.Tensor:
    """Rounded to float16."""
    return x.to(torch.float16).to(torch.float32)


def brain(x: torch.Tensor) -> torch.Tensor:
    """Rounded to bfloat16."""
    return x.to(torch.bfloat16).to(torch.float32)


def _over(number: float, values: torch.Tensor) -> torch.Tensor:
    """number / values; 0 where that would be infinite."""
    # `number / values` would be number times the rounded reciprocal.
    return torch.where(values == 0, 0.0, torch.tensor(number) / values)


Q8_OF_256 = Rounding("q8", q8_of_256)
Q8_OF_32 = Rounding("q8", q8_of_32)
F16 = Rounding("f16", half)
BF16 = Rounding("bf16", brain)
