"""Q4_0, Q4_1 and Q8_0 as integer codes with a scale for every 32 columns, and back; codes of MXFP4
and NVFP4 as they are.

    Q4_0   d:f16  q:u8[16]          w = (q - 8) * d      byte i holds weights i (low) and i + 16
    Q4_1   d:f16  m:f16  q:u8[16]   w = q * d + m        likewise
    Q8_0   d:f16  q:i8[32]          w = q * d
    MXFP4  e:u8   q:u8[16]          w = e2m1(q) * 2^(e - 127)   codes as in Q4_0
    NVFP4  d:u8[4]  q:u8[32]        w = e2m1(q) * e4m3(d)       64 weights: of each d 16 of them,
                                                                byte i holds i (low) and i + 8

So Q4_0 holds symmetric codes of up to four bits, Q8_0 whatever is at most 128 off its zero, and
Q4_1 asymmetric codes where -zero * d, which m has to be, is a float16, and MLX's up to four bits,
whose offset m is.

Source: ggml's definition of its block types (ggml-common.h).
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from qtool import native_gguf
from qtool.float_codes import encode
from qtool.gguf_types import BY_NAME, BlockType
from qtool.scheme import GroupQuant, Scheme

Bytes = NDArray[np.uint8]
BLOCK = 32
Q4_0, Q4_1, Q8_0 = (BY_NAME[name] for name in ("Q4_0", "Q4_1", "Q8_0"))
TYPES = {block.name: block for block in (Q4_0, Q4_1, Q8_0)}
MXFP4, NVFP4 = BY_NAME["MXFP4"], BY_NAME["NVFP4"]


@dataclass(frozen=True)
class BlockMatrix:
    """Rows of blocks, in a checkpoint's order."""

    raw: Bytes  # [out, bytes of a row]
    type: BlockType

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)"""
        return len(self.raw), self.raw.shape[1] // self.type.nbytes * self.type.weights

    def dequantize(self) -> NDArray[np.float32]:
        """float32 [out, in], as ggml computes it."""
        return native_gguf.dequantize(self.raw, self.type, self.shape[1])

    @cached_property
    def nearest(self) -> GroupQuant | None:
        """Codes and scales that give these numbers, or for Q4_1 the nearest to them."""
        if self.type.name not in TYPES:
            return None
        return unpack(self.raw, self.type)

    @cached_property
    def grouped(self) -> GroupQuant | None:
        """The same where it gives exactly these numbers."""
        found = self.nearest
        if found is None or self.type is not Q4_1:
            return found
        return found if np.array_equal(found.dequantize(), self.dequantize()) else None


def spread(quant: GroupQuant, values: NDArray[np.generic]) -> NDArray[np.generic]:
    """One of scale and zero, which are [out, groups], for every 32 columns."""
    columns = quant.shape[1]
    size = quant.scheme.group_size if quant.scheme.group_size > 0 else columns
    return np.repeat(values, size // BLOCK, axis=1)


def offsets(quant: GroupQuant) -> tuple[NDArray[np.float16], bool]:
    """-zero * scale, or MLX's offset, as Q4_1 has it, [out, groups], and whether that is exact."""
    wide = quant.row_offset() if quant.scheme.outer == "offset" else -quant.scaled_zeros()
    with np.errstate(over="ignore"):
        half = wide.astype(np.float16)
    return half, bool((half.astype(np.float32) == wide).all())


def fits_bytes(quant: GroupQuant) -> bool:
    """Whether every code is at most 128 below and 127 above its zero, as Q8_0 holds."""
    off = quant.codes.astype(np.int16) - quant.zero.astype(np.int16)[:, quant.group_index()]
    return not off.size or (int(off.min()) >= -128 and int(off.max()) <= 127)


def pack(quant: GroupQuant, block: BlockType) -> Bytes:
    """uint8 [out, bytes of a row]. The caller has seen to it that the type holds the codes; scales
    are rounded to float16 where they are wider."""
    rows, columns = quant.shape
    if block is NVFP4:
        return _pack_nvfp4(quant)
    count = columns // BLOCK
    out = np.empty((rows, count, block.nbytes), np.uint8)
    if block is MXFP4:
        _, exponents = np.frexp(quant.scale.astype(np.float32))  # of a half
        out[..., 0] = exponents + 126
        codes = quant.codes.reshape(rows, count, BLOCK)
        out[..., 1:] = codes[..., :16] | codes[..., 16:] << np.uint8(4)
        return out.reshape(rows, count * block.nbytes)
    scale = spread(quant, quant.scale).astype("<f2")
    out[..., :2] = scale[..., None].view(np.uint8)
    if block is Q8_0:
        zero = spread(quant, quant.zero).astype(np.int16)[..., None]
        off = quant.codes.reshape(rows, count, BLOCK).astype(np.int16) - zero
        out[..., 2:] = off.astype(np.int8).view(np.uint8)
        return out.reshape(rows, count * block.nbytes)
    codes = quant.codes.reshape(rows, count, BLOCK)
    if block is Q4_0:
        codes = codes + np.uint8(8 - (1 << (quant.scheme.bits - 1)))
    else:
        out[..., 2:4] = spread(quant, offsets(quant)[0]).astype("<f2")[..., None].view(np.uint8)
    out[..., block.nbytes - 16 :] = codes[..., :16] | codes[..., 16:] << np.uint8(4)
    return out.reshape(rows, count * block.nbytes)


def _pack_nvfp4(quant: GroupQuant) -> Bytes:
    """Its second scale, if there is one, is not in them."""
    rows, columns = quant.shape
    out = np.empty((rows, columns // NVFP4.weights, NVFP4.nbytes), np.uint8)
    scales = encode(quant.scale.astype(np.float32), "e4m3")
    out[..., :4] = scales.reshape(rows, -1, 4)
    codes = quant.codes.reshape(rows, -1, 4, 16)
    pairs = codes[..., :8] | codes[..., 8:] << np.uint8(4)
    out[..., 4:] = pairs.reshape(rows, -1, 32)
    return out.reshape(rows, -1)


def without_second(quant: GroupQuant) -> GroupQuant:
    """A matrix of NVFP4 as blocks have it: less its second scale."""
    return replace(quant, scheme=replace(quant.scheme, outer=""), outer=None)


def second_scale(quant: GroupQuant) -> np.float32 | None:
    """What the matrix is multiplied by in the end, as engines take it: float32, of a divisor its
    reciprocal; None where there is none."""
    if quant.outer is None:
        return None
    outer = np.float32(quant.outer)
    with np.errstate(divide="ignore", over="ignore"):
        return np.float32(1) / outer if quant.scheme.outer == "divides" else outer


def unpack(raw: Bytes, block: BlockType) -> GroupQuant | None:
    """The codes of rows [out, bytes of a row]; None where Q4_1's m is no multiple of its d, but for
    the rounding to float16."""
    rows = len(raw)
    blocks = np.ascontiguousarray(raw).reshape(rows, -1, block.nbytes)
    count = blocks.shape[1]
    scale = np.ascontiguousarray(blocks[..., :2]).view("<f2").reshape(rows, count)
    if block is Q8_0:
        codes = blocks[..., 2:] ^ np.uint8(128)  # q + 128
    else:
        packed = blocks[..., block.nbytes - 16 :]
        codes = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    bits = 8 if block is Q8_0 else 4
    zero = np.full((rows, count), 1 << (bits - 1), np.uint8)
    offset = np.zeros_like(scale)
    if block is Q4_1:
        offset = np.ascontiguousarray(blocks[..., 2:4]).view("<f2").reshape(rows, count)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.rint(-offset.astype(np.float32) / scale.astype(np.float32))
        whole = np.where(scale == 0, 8, ratio)
        if not (np.isfinite(whole).all() and (whole >= 0).all() and (whole <= 15).all()):
            return None
        zero = whole.astype(np.uint8)
    flat = scale == 0
    if flat.any():  # a scale of 0 is allowed here alone: one step up or down is the offset
        codes[flat] = (zero[flat] + np.sign(offset[flat]).astype(np.int8)).astype(np.uint8)[:, None]
        scale = np.where(flat, np.where(offset == 0, np.float16(1), np.abs(offset)), scale)
    scheme = Scheme(bits, BLOCK, block is not Q4_1)
    quant = GroupQuant(scheme, codes.reshape(rows, -1), scale, zero)
    if block is Q4_1 and not np.array_equal(offsets(quant)[0][~flat], offset[~flat]):
        return None
    return quant
