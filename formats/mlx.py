"""MLX's quantization, which mlx-lm and LM Studio run on Apple's machines; in mode affine:

    weight   uint32 [out, in * bits / 32]   codes along the input, a little-endian bitstream
    scales   [out, groups]                  float16, bfloat16 or float32
    biases   [out, groups]                  of the same dtype

    w = q * scale + bias        in float32: of scales of 16 bits the product is exact

A bias is minus the zero times the scale, rounded to its dtype. Files of mlx-lm itself have biases,
and scales below zero, that no whole zero gives: these are read as they are, and kept.

config: the table `quantization` of config.json, which mlx-lm repeats as quantization_config:

    group_size 32, 64 or 128, bits 2, 3, 4, 5, 6 or 8, mode affine, and by module where they differ

It names no method. `symmetric` is ours: all zeros are 2^(bits-1). Modules without scales are dense.
The other modes are those of small floats (mlx_floats): mxfp4, nvfp4 and mxfp8. A module's own table
without a mode is affine, whatever that of the others. Experts: see mlx_experts.

Source: mlx (mx.quantize, mx.dequantize) and mlx-lm (utils.py), 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError
from qtool.formats import bits, mlx_floats, stored_codes
from qtool.formats.facts import (
    ArtifactScheme,
    Facts,
    Look,
    Options,
    check_shape,
    find,
    find_floats,
    read_all,
    whole,
)
from qtool.formats.mlx_experts import stack_of
from qtool.formats.mlx_floats import MODES, mode_of
from qtool.formats.safetensors_header import TensorSpec
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np


NAME = "mlx"
CODES = ("weight",)
CONFIG_KEYS = ("quantization", "quantization_config")
WIDTHS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
_WORDS = ("U32", "uint32")


def is_mlx(config: Mapping[str, Any]) -> bool:
    """Whether a table is that of mlx-lm: `bits` and `group_size`, and no method."""
    method = str(config.get("quant_method") or "unknown").lower()
    return method == "unknown" and all(type(config.get(k)) is int for k in ("bits", "group_size"))


def detect(config: Mapping[str, Any]) -> ArtifactScheme | None:
    """The scheme that a table tells, or None. What mlx itself has not is not decoded."""
    if not is_mlx(config):
        return None
    mode, width, size = str(config.get("mode") or "affine"), config["bits"], config["group_size"]
    scheme = MODES.get(mode) or _affine(width, size, config.get("symmetric") is True)
    known = (width, size) == (scheme.bits, scheme.group_size) if mode in MODES else mode == "affine"
    if not known or (mode == "affine" and (width not in WIDTHS or size not in GROUPS)):
        return ArtifactScheme(NAME, NAME, None, f"{width} bits")
    own = {name: table for name, table in config.items() if isinstance(table, Mapping)}
    return ArtifactScheme(
        NAME,
        NAME,
        scheme,
        mode,
        tuple(name for name, table in config.items() if table is False),
        tuple(own.items()),
    )  # fmt: skip


def _affine(width: int, size: int, symmetric: bool) -> Scheme:
    return Scheme(width, size, symmetric, "bfloat16", outer="offset")


def choose(schemes: Iterable[Scheme], layout: str | None = None) -> Options:
    """The mode of all; affine where they differ, or are integers."""
    modes = {mode_of(scheme) for scheme in schemes}
    return Options(modes.pop() if len(modes) == 1 else "affine")


def supports(scheme: Scheme, shape: tuple[int, ...], options: Options) -> str | None:
    """Why a matrix [out, in] cannot be stored, or None."""
    columns = shape[1]
    if scheme.is_float:
        if scheme not in MODES.values():
            which = f"{scheme} with one" if scheme.outer else scheme
            return f"mlx has mxfp4, mxfp8 and nvfp4 without a scale of the whole matrix: no {which}"
        size = scheme.group_size
        return f"in_features {columns} is not divisible by {size}" if columns % size else None
    if scheme.rows != 1 or scheme.outer != "offset":
        return f"mlx stores integers with a scale for each row and group, not {scheme}"
    if scheme.bits not in WIDTHS:
        return f"mlx holds 2, 3, 4, 5, 6 or 8 bits, not {scheme.bits}"
    if scheme.group_size not in GROUPS:
        return f"mlx has groups of 32, 64 or 128, not {scheme.group_size}"
    if columns % scheme.group_size:
        return f"in_features {columns} is not divisible by the group size {scheme.group_size}"
    return None


def supports_together(schemes: Iterable[Scheme]) -> str | None:
    """Widths and groups may differ by module; symmetric is said once."""
    if len({scheme.symmetric for scheme in schemes if not scheme.is_float}) > 1:
        return "mlx's config says for all modules at once whether weights are symmetric"
    return None


def specs(
    module: str, scheme: Scheme, shape: tuple[int, ...], options: Options
) -> list[TensorSpec]:
    """The tensors that store a matrix [out, in]."""
    rows, columns = shape
    dtype = "U8" if scheme.is_float else stored_codes.STORED_DTYPES[scheme.scale_dtype]
    grid = scheme.grid((rows, columns))
    words = TensorSpec(f"{module}.weight", "U32", (rows, bits.word_count(columns, scheme.bits)))
    scales = TensorSpec(f"{module}.scales", dtype, grid)
    if scheme.is_float:
        return [words, scales]
    return [words, scales, TensorSpec(f"{module}.biases", dtype, grid)]


def pack(module: str, quant: GroupQuant, options: Options) -> dict[str, NDArray[Any]]:
    """The stored tensors of one matrix; FormatError where it cannot be stored exactly."""
    reason = supports(quant.scheme, quant.shape, options)
    if reason or quant.g_idx is not None:
        raise FormatError(f"{module}: {reason or 'mlx has no order of columns (g_idx)'}")
    check_shape(f"{module}: scale", quant.scale.shape, quant.scheme.grid(quant.shape))
    stored: dict[str, NDArray[Any]] = {
        f"{module}.weight": bits.pack(quant.codes, quant.scheme.bits).view("<u4"),
        f"{module}.scales": stored_codes.stored_scale(module, quant),
    }
    if quant.scheme.is_float:
        return stored
    offsets = replace(quant, scale=quant.row_offset())
    if not np.isfinite(offsets.scale).all():
        raise FormatError(f"{module}: zero * scale is too large for {quant.scheme.scale_dtype}")
    return stored | {f"{module}.biases": stored_codes.stored_scale(module, offsets)}


def scheme_in(module: str, look: Look, found: ArtifactScheme) -> tuple[Scheme, tuple[int, int]]:
    """The scheme and shape [out, in] of a stored matrix; FormatError where shapes disagree."""
    scheme = _scheme_of(module, found)
    weight = find(look, f"{module}.weight")
    if str(weight.dtype) not in _WORDS:
        raise FormatError(f"{module}.weight: the dtype is {weight.dtype}; expected uint32 words")
    mlx_floats.check_mode(module, look, scheme)
    if scheme.is_float:
        return mlx_floats.scheme_in(module, look, scheme)
    scales = find_floats(look, f"{module}.scales")
    biases = find_floats(look, f"{module}.biases")
    rows, words = weight.shape
    shape = (rows, words * bits.WORD // scheme.bits)
    scheme = replace(
        scheme,
        scale_dtype=stored_codes.scale_dtype(f"{module}.scales", scales, scheme.scale_dtype),
    )
    reason = "it is empty" if 0 in shape else supports(scheme, shape, Options("affine"))
    if reason:
        raise FormatError(f"{module}: {reason}")
    check_shape(f"{module}.weight", weight.shape, (rows, bits.word_count(shape[1], scheme.bits)))
    for name, stored in ((f"{module}.scales", scales), (f"{module}.biases", biases)):
        check_shape(name, stored.shape, scheme.grid(shape))
    if str(scales.dtype) != str(biases.dtype):
        raise FormatError(f"{module}: scales are {scales.dtype}, biases {biases.dtype}")
    return scheme, shape


def _scheme_of(module: str, found: ArtifactScheme) -> Scheme:
    """What the config says of a module. Of a table of its own, what is missing is mlx's default."""
    assert found.scheme is not None
    stack, tables = stack_of(module), dict(found.overrides)
    stacks = ("", "") if stack is None else (stack[0], stack[0].replace("switch_mlp", "experts"))
    table = next((tables[name] for name in (module, *stacks) if name in tables), None)
    if table is None:
        return found.scheme
    mode = str(table.get("mode") or "affine")
    if mode not in ("affine", *MODES):
        raise FormatError(f"{module}: its mode is {mode}; expected affine, {', '.join(MODES)}")
    usual = MODES.get(mode) or _affine(4, 64, found.scheme.symmetric and not found.scheme.is_float)
    width = whole(table.get("bits") or usual.bits, f"{module}: bits", 2, 8)
    size = whole(table.get("group_size") or usual.group_size, f"{module}: group_size", 1, 1024)
    if mode in MODES and (width, size) != (usual.bits, usual.group_size):
        raise FormatError(
            f"{module}: mode {mode} has {usual.bits} bits and groups of {usual.group_size}, and "
            f"the config says {width} and {size}"
        )
    return replace(usual, bits=width, group_size=size)


def unpack(module: str, get: Callable[[str], NDArray[Any]], found: ArtifactScheme) -> GroupQuant:
    """Read one matrix; `get` gives a stored tensor by name, KeyError where there is none."""
    tensors = read_all(module, get, ("weight", "scales", "biases", "global_scale"))
    scheme, (_, columns) = scheme_in(module, tensors.get, found)
    if scheme.is_float:
        return mlx_floats.unpack(module, tensors.__getitem__, scheme)
    codes = bits.unpack(tensors[f"{module}.weight"], scheme.bits, columns)
    scale, offset = tensors[f"{module}.scales"], tensors[f"{module}.biases"].astype(np.float32)
    wide = scale.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        zero = np.rint(-offset / wide)
    nearest = np.clip(np.nan_to_num(zero), 0, (1 << scheme.bits) - 1).astype(np.uint8)
    quant = GroupQuant(scheme, codes, scale, nearest)
    if (wide > 0).all() and np.array_equal(quant.row_offset(), offset):
        return quant
    return replace(quant, offset=offset)


def config(facts: Facts, options: Options) -> dict[str, Any]:
    """The table of config.json, under both of its keys."""
    reason = supports_together(facts.quantized.values())
    if reason:
        raise FormatError(reason)
    table: dict[str, Any] = _table(facts.default)
    if facts.default.symmetric and not facts.default.is_float:
        table["symmetric"] = True
    for name, scheme in facts.overrides.items():
        stack = stack_of(name)  # mlx-lm asks by the names of its own modules
        table[name if stack is None else stack[0]] = _table(scheme)
    return table


def _table(scheme: Scheme) -> dict[str, Any]:
    return {"group_size": scheme.group_size, "bits": scheme.bits, "mode": mode_of(scheme)}


def side_files(facts: Facts, options: Options) -> dict[str, dict[str, Any]]:
    """No further files."""
    return {}
