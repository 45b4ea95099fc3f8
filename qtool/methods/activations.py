"""What engines make of a matrix's input before they multiply: the numbers it is rounded to.

    q8 of 256   d = 1 / (127 / m), m the largest |x| of a block of 256; rint(x * 127 / m) * d
    q8 of 32    d = float16(m / 127), m of a block of 32; rint(x * 127 / m) * d
    f16, bf16   each number
    int         s = m / 127, m of a token or of a group; rint(x / s) * s
                asymmetric: s = (high - low) / 255, z = rint(-128 - low / s), low <= 0 <= high;
                (clamp(rint(x / s) + z, -128, 127) - z) * s; likewise where s and z are stored
    fp8         s = m / 448; e4m3(clamp(x / s, -448, 448)) * s; likewise where s is stored
    nvfp4       t = e4m3(m / 6 * g) / g, m of 16, g stored; e2m1(clamp(x / t, -6, 6)) * t
    mxfp8       s = 2^(floor(log2(m * 8 / 7)) - 8), m of 32; e4m3(clamp(x / s, -448, 448)) * s
    mxfp4       s = 2^(floor(log2(m * 8 / 7)) - 2), m of 32; e2m1(clamp(x / s, -6, 6)) * s
    llm.int8    columns in which some |x| of a sequence reaches 6 are float16, the others
                int8 with s = m / 127, m of what is left of a token
    kept        of keys and values as they come: s = float16((high - low) / 15) of a token and head,
                z = float16(-15 * low / (high - low)); (clamp(rint(x / s + z), 0, 15) - z) * s

rint is to even; 127, 128 and 255 are those of 8 bits. All in float32, as engines do it; products of
codes are exact there, so that only the rounding shows.

q8 is what llama.cpp does on a CPU: blocks of 256 for matrices of super-blocks, of 32 for those of
the older types (ggml-quants.c and ggml-cpu/arch/x86/quants.c of llama.cpp 0c1e57098; signs, and
the choice of -127 or 127, leave the numbers alone). kept is QServe's cache, with 255 for 15 where
it has 8 bits (its kernels' applyBiasRopeUpdateKVCache.h); llm.int8 is bitsandbytes' vectorwise
quantizing. The others are those of compressed-tensors 0.20 with the scales of vLLM 0.33, whose int8
divides by 127 where compressed-tensors' own emulation divides by 127.5.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_TINY = 1e-10  # of scales: an input of zeros stays one


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
    return ((blocks * _over(127.0, most)).round_() * half(most / _number(127.0, x))).view(x.shape)


def half(x: torch.Tensor) -> torch.Tensor:
    """Rounded to float16."""
    return x.to(torch.float16).to(torch.float32)


def brain(x: torch.Tensor) -> torch.Tensor:
    """Rounded to bfloat16."""
    return x.to(torch.bfloat16).to(torch.float32)


def _over(number: float, values: torch.Tensor) -> torch.Tensor:
    """number / values; 0 where that would be infinite."""
    # `number / values` would be number times the rounded reciprocal.
    return torch.where(values == 0, torch.tensor(0.0), torch.tensor(number) / values)


def _number(value: float, like: torch.Tensor) -> torch.Tensor:
    """A number to divide by, where numbers are: on a GPU torch multiplies by the rounded reciprocal
    of one that is Python's or the CPU's."""
    return torch.full((), float(value), device=like.device)


Q8_OF_256 = Rounding("q8", q8_of_256)
Q8_OF_32 = Rounding("q8", q8_of_32)
F16 = Rounding("f16", half)
BF16 = Rounding("bf16", brain)


def integers(bits: int, size: int, symmetric: bool) -> Rounding:
    """With scales as the input comes, for every `size` numbers; -1: for every token."""
    most = (1 << bits - 1) - 1

    def rounded(x: torch.Tensor) -> torch.Tensor:
        runs = _runs(x, size)
        if symmetric:
            scale = (runs.abs().amax(-1, keepdim=True) / _number(most, x)).clamp_min(_TINY)
            return ((runs / scale).round_() * scale).view(x.shape)
        low = runs.amin(-1, keepdim=True).clamp_max(0)
        high = runs.amax(-1, keepdim=True).clamp_min(0)
        scale = ((high - low) / _number(2 * most + 1, x)).clamp_min(_TINY)
        return _on_grid(runs, scale, (-most - 1 - low / scale).round_(), most).view(x.shape)

    return Rounding(f"int{bits}", rounded)


def whole_together(bits: int) -> Rounding:
    """With one scale for all tokens of a sequence, as they come."""
    most = (1 << bits - 1) - 1

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = (_together(x) / _number(most, x)).clamp_min(_TINY)
        return (x / scale).round_() * scale

    return Rounding(f"int{bits}", rounded)


def fp8_together() -> Rounding:
    """With one scale for all tokens of a sequence, as they come."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = (_together(x) / _number(448.0, x)).clamp_min(_TINY)
        return e4m3(x / scale) * scale

    return Rounding("fp8", rounded)


def _together(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax((-2, -1) if x.ndim > 1 else -1, keepdim=True)


def stored_integers(bits: int, scale: float, zero: float) -> Rounding:
    """With one scale and zero point for all inputs."""
    most = (1 << bits - 1) - 1
    return Rounding(
        f"int{bits}", lambda x: _on_grid(x, _number(scale, x), torch.tensor(zero), most)
    )


def fp8(size: int) -> Rounding:
    """With scales as the input comes, for every `size` numbers; -1: for every token."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        runs = _runs(x, size)
        scale = (runs.abs().amax(-1, keepdim=True) / _number(448.0, x)).clamp_min(_TINY)
        return (e4m3(runs / scale) * scale).view(x.shape)

    return Rounding("fp8", rounded)


def stored_fp8(scale: float) -> Rounding:
    """With one scale for all inputs."""
    return Rounding("fp8", lambda x: e4m3(x / _number(scale, x)) * torch.tensor(scale))


def nvfp4(outer: float) -> Rounding:
    """With float8 scales of 16 numbers, which `outer` has been multiplied into."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        runs, by = _runs(x, 16), _number(outer, x)
        scale = e4m3(runs.abs().amax(-1, keepdim=True) / _number(6.0, x) * by) / by
        # Runs too small for a float8 scale become zeros.
        return torch.where(scale > 0, e2m1(runs / scale) * scale, 0.0).view(x.shape)

    return Rounding("nvfp4", rounded)


def microscaling(bits: int) -> Rounding:
    """MX with 8 or 4 bits: scales of 32 numbers are powers of two."""
    number, largest = (e4m3, 8) if bits == 8 else (e2m1, 2)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        runs = _runs(x, 32)
        most = runs.abs().amax(-1, keepdim=True)
        fraction, exponent = torch.frexp(most)  # from 1/2 to 1; 7/8 is nearer to the next power
        exponent = exponent - 1 + (fraction >= 0.875)
        scale = torch.ldexp(torch.ones_like(most), (exponent - largest).clamp(-126, 127))
        return (number(runs / scale) * scale).view(x.shape)

    return Rounding(f"mxfp{bits}", rounded)


def llm_int8(threshold: float) -> Rounding:
    """bitsandbytes': inputs become float16, and int8 but for columns with outliers among the tokens
    of a sequence; it looks at all that come together. 0: no column has any.

    The largest number that a token's scale comes of is that below the threshold, in
    whichever column.
    """

    def rounded(x: torch.Tensor) -> torch.Tensor:
        rows = half(x if x.ndim > 1 else x[None])
        outliers = rows.abs() >= (threshold or float("inf"))
        left = torch.where(outliers, 0.0, rows)
        most = left.abs().amax(-1, keepdim=True).clamp_min(_TINY)
        codes = (left * (127.0 / most)).round_() * (most / _number(127.0, x))
        # Of a sequence, however many are computed together.
        return torch.where(outliers.any(-2, keepdim=True), rows, codes).view(x.shape)

    return Rounding("llm.int8", rounded)


def kept_of_heads(bits: int, kind: str, scales: Sequence[float]) -> Rounding:
    """Keys or values [..., heads, length, width] with stored scales: of each head, or one for all.

    Heads that were repeated for grouped queries share one.
    """
    most = (1 << bits - 1) - 1
    stored = torch.tensor(scales)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = stored.to(x.device)
        if len(scales) > 1:
            scale = scale.repeat_interleave(x.shape[-3] // len(scales), 0).view(-1, 1, 1)
        if kind == "float":
            return e4m3(x / scale) * scale
        return _on_grid(x, scale, torch.tensor(0.0), most)

    return Rounding("fp8" if kind == "float" else f"int{bits}", rounded)


def kept_as_it_comes(bits: int) -> Rounding:
    """Keys or values with a scale and a zero for each token and head, as QServe keeps them."""
    levels = float((1 << bits) - 1)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        span = high - low
        scale = half(span / _number(levels, x)).clamp_min(2.0**-24)
        zero = half(torch.where(span > 0, -levels * low / span, 0.0))
        codes = (x / scale + zero).round_().clamp_(0, levels)
        return torch.where(span > 0, (codes - zero) * scale, x)

    return Rounding(f"int{bits}", rounded)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest float8; the largest where that is too small."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32)


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest of 0, 1/2, 1, 3/2, 2, 3, 4, 6 with a sign; ties to the even code."""
    size = x.abs().clamp_max_(6)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign((size / step).round_() * step, x)


def _runs(x: torch.Tensor, size: int) -> torch.Tensor:
    """[..., in] -> [..., in / size, size]; size -1: all of a token."""
    return x.unsqueeze(-2) if size < 0 else x.reshape(*x.shape[:-1], -1, size)


def _on_grid(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, most: int) -> torch.Tensor:
    codes = ((x / scale).round_() + zero).clamp_(-most - 1, most)
    return (codes - zero) * scale
