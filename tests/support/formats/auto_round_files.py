"""Codes under AutoRound's config, packed by hand as GPTQ's or AWQ's are."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.scheme import GroupQuant, Scheme
from support.formats import other_tools as other

ROWS, COLUMNS = 64, 256
V1, V2, AWQ = "auto_round:auto_gptq", "auto_round", "auto_round:auto_awq"
Words = NDArray[np.int32]


def config(packing: str | None = V1, bits: int = 4, size: int = 128, **more: Any) -> dict[str, Any]:
    """As AutoRound 0.16 writes it."""
    found = {
        "autoround_version": "0.16.1", "bits": bits, "block_name_to_quantize": "model.layers",
        "data_type": "int", "enable_quanted_input": False, "group_size": size,
        "packing_format": packing, "quant_method": "auto-round", "sym": True,
    } | more  # fmt: skip
    return {key: value for key, value in found.items() if value is not None}


def stream(fields: NDArray[Any], bits: int) -> Words:
    """Fields along the last axis as one number of so many bits each, the first lowest; words of
    it. A field that is negative borrows from those above it."""
    digits = fields.astype(np.int64)
    borrowed = np.zeros(fields.shape[:-1], np.int64)
    for place in range(fields.shape[-1]):
        borrowed += digits[..., place]
        digits[..., place] = borrowed & ((1 << bits) - 1)
        borrowed >>= bits
    each = ((digits[..., None] >> np.arange(bits)) & 1).astype(np.uint8)
    packed = np.packbits(each.reshape(*fields.shape[:-1], -1), axis=-1, bitorder="little")
    return packed.view("<i4")


def gptq(module: str, quant: GroupQuant, less: int) -> other.Tensors:
    """`less`: what is taken from every zero, of each word apart."""
    bits = quant.scheme.bits
    zeros = quant.zero.T.astype(np.int64) - less
    if 32 % bits == 0:
        zeros = zeros.reshape(len(zeros), -1, 32 // bits)
    words = stream(zeros, bits).reshape(quant.zero.shape[1], -1)
    return {
        f"{module}.qweight": ("I32", np.ascontiguousarray(stream(quant.codes, bits).T)),
        f"{module}.qzeros": ("I32", words),
        f"{module}.scales": ("F16", np.ascontiguousarray(quant.scale.T)),
    }


def awq(module: str, quant: GroupQuant) -> other.Tensors:
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])

    def words(fields: NDArray[Any]) -> tuple[str, Words]:
        eights = fields.T.reshape(fields.shape[1], -1, 8)[:, :, order]
        return "I32", stream(eights, 4).reshape(fields.shape[1], -1)

    return {
        f"{module}.qweight": words(quant.codes),
        f"{module}.qzeros": words(quant.zero),
        f"{module}.scales": ("F16", np.ascontiguousarray(quant.scale.T)),
    }


def stored(packing: str, module: str, quant: GroupQuant) -> other.Tensors:
    if "awq" in packing:
        return awq(module, quant)
    return gptq(module, quant, 0 if packing in (V2, "auto_round:gptqmodel") else 1)


def random_quant(bits: int, size: int, symmetric: bool, least: int = 1) -> GroupQuant:
    rng = np.random.default_rng(bits)
    groups = COLUMNS // size if size > 0 else 1
    zero = rng.integers(least, 1 << bits, (ROWS, groups)).astype(np.uint8)
    if symmetric:
        zero[:] = 1 << (bits - 1)
    return GroupQuant(
        Scheme(bits, size, symmetric),
        rng.integers(0, 1 << bits, (ROWS, COLUMNS)).astype(np.uint8),
        rng.uniform(0.01, 0.1, (ROWS, groups)).astype(np.float16),
        zero,
    )


def rounded(weight: NDArray[np.float32], bits: int, symmetric: bool, size: int = 128) -> GroupQuant:
    """To nearest, as AutoRound does without iterations."""
    groups = weight.reshape(len(weight), -1, size)
    top = (1 << bits) - 1
    if symmetric:
        scale = (np.abs(groups).max(axis=2) / (top / 2)).astype(np.float16)
        zero = np.full(scale.shape, 1 << (bits - 1), np.uint8)
    else:
        low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
        scale = ((high - low) / top).astype(np.float16)
        zero = np.clip(np.rint(-low / scale.astype(np.float32)), 1, top).astype(np.uint8)
    codes = np.rint(groups / scale.astype(np.float32)[..., None]) + zero[..., None]
    codes = np.clip(codes, 0, top).astype(np.uint8).reshape(weight.shape)
    return GroupQuant(Scheme(bits, size, symmetric), codes, scale, zero)


def values(quant: GroupQuant) -> NDArray[np.float32]:
    steps = quant.codes.astype(np.float32) - np.repeat(quant.zero, 128, 1)
    return steps * np.repeat(quant.scale.astype(np.float32), 128, 1)


def folder(
    path: Path, packing: str, bits: int, symmetric: bool, **more: Any
) -> tuple[Path, dict[str, NDArray[np.float32]]]:
    """A whole model; and its weights, as float32."""
    expected = {}

    def store(module: str, weight: NDArray[np.float32]) -> other.Tensors:
        quant = rounded(weight, bits, symmetric)
        expected[f"{module}.weight"] = values(quant)
        return stored(packing, module, quant)

    tensors = other.model(store)
    said = config(packing, bits, sym=symmetric, **more)
    return other.folder(path, tensors, said), expected
