"""Every scheme of compressed-tensors, and random matrices of it."""

from dataclasses import replace

import numpy as np

from qtool.float_codes import TABLES, encode
from qtool.scheme import GroupQuant, Scheme
from support.formats.artifact_files import random_quant


def small_floats(scheme: Scheme, rows: int, columns: int, seed: int = 0) -> GroupQuant:
    """Random codes without NaN, and scales that the scheme's dtype holds."""
    rng = np.random.default_rng(seed)
    top = 16 if scheme.bits == 4 else 256
    codes = rng.integers(0, top, (rows, columns), dtype=np.uint8)
    codes[np.isnan(TABLES[scheme.book][codes])] = 0
    scale = rng.uniform(0.01, 1, scheme.grid((rows, columns))).astype(np.float32)
    if scheme.scale_dtype == "e8m0":
        scale = np.exp2(np.floor(np.log2(scale)))
    elif scheme.scale_dtype == "float8_e4m3":
        scale = TABLES["e4m3"][encode(scale * 100, "e4m3")]
    elif scheme.scale_dtype == "bfloat16":
        scale = (scale.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    outer = 1234.5 if scheme.outer else None
    return GroupQuant(scheme, codes, scale, np.zeros(scale.shape, np.uint8), None, outer)


SCHEMES = {
    **{f"w{b} {s} {z}": Scheme(b, s, z == "sym") for b in range(2, 9) for s in (-1, 32)
       for z in ("sym", "asym")},
    "w8 channel float32": Scheme(8, -1, True, "float32"),
    "w4 bfloat16": Scheme(4, 32, True, "bfloat16"),
    "fp8 tensor": Scheme(8, -1, True, "float32", "e4m3", -1),
    "fp8 channel": Scheme(8, -1, True, "bfloat16", "e4m3"),
    "fp8 group": Scheme(8, 32, True, "float32", "e4m3"),
    "fp8 block": Scheme(8, 128, True, "float32", "e4m3", 128),
    "mxfp8": Scheme(8, 32, True, "e8m0", "e4m3"),
    "mxfp4": Scheme(4, 32, True, "e8m0", "e2m1"),
    "nvfp4": Scheme(4, 16, True, "float8_e4m3", "e2m1", 1, "divides"),
}  # fmt: skip


def a_quant(scheme: Scheme, rows: int = 200, columns: int = 256) -> GroupQuant:
    if scheme.is_float:
        return small_floats(scheme, rows, columns)
    quant = random_quant(scheme, rows, columns, seed=scheme.bits)
    scale = quant.scale.astype(np.float32)
    if scheme.scale_dtype == "bfloat16":
        scale = (scale.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return quant if scheme.scale_dtype == "float16" else replace(quant, scale=scale)
