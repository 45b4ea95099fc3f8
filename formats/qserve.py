"""QServe's W4A8: four-bit codes in the order of its kernels, and scales of one or two levels.

    qweight      int8 [out, in / 2]      two codes a byte, reordered
    s1_scales    float16 [out]
    s2_scales    int8 [groups, out]      integers, reordered;  with groups
    s2_zeros     int8 [groups, out]      -(zero * s2) modulo 256, reordered
    s1_szeros    float16 [out]           zero * s1;  with one group a row, in the place of s2

    w = ((q - zero) * s2) * s1          w = (q - zero) * s1

qweight is made of tiles of 32 rows and 32 columns. In a tile row o is 16 a + 8 b + c and column k
is 16 d + 4 e + f; its 512 bytes are in the order [c, e, d, b, f], and each holds the code of a = 0
in its low and that of a = 1 in its high bits. Tiles follow each other along a row of tiles. In the
rows of s2 the 32 numbers of a tile stand in the order 0, 8, 16, 24, 1, 9, 17, 25, ...

Whoever multiplies makes 8-bit numbers (q - zero) * s2 first, which have to fit; s2 is at most 17,
since q * s2 has to fit 8 bits without a sign. Inputs are rounded to 8 bits, token by token.

The engine itself reads no quantization_config; ours says what the tensors are:

    quant_method qserve, bits 4, group_size, zero_point true, modules_to_not_convert,
    activations and kv_cache_scheme: like compressed-tensors' arguments

Sources: w4a8_linear.py and the kernels of QServe (now OmniServe); deepcompressor's QServe backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError, UnsupportedError
from qtool.formats import stored_codes
from qtool.formats.facts import (
    ArtifactScheme,
    Facts,
    Look,
    Options,
    check_shape,
    find,
    first,
    group_size_of,
    left_out,
    names_of,
)
from qtool.formats.safetensors_header import TensorSpec
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np


NAME = "qserve"
CODES = ("qweight",)
_TILE = 32
_LARGEST = 17
_INT8, _HALF = ("I8", "int8"), ("F16", "float16")


def scheme_of(group_size: int) -> Scheme:
    """Of groups, or with -1 of rows."""
    return Scheme(4, group_size, False, "int8", outer="rows")


def choose(schemes: Iterable[Scheme], layout: str | None = None) -> Options:
    """There is one layout."""
    return Options("")


def supports(scheme: Scheme, shape: tuple[int, ...], options: Options) -> str | None:
    """Why a matrix [out, in] cannot be stored, or None."""
    if scheme != scheme_of(scheme.group_size):
        return f"qserve holds 4 bits with zeros, not {scheme}"
    if any(size % _TILE for size in shape):
        return f"qserve's tiles are {_TILE} by {_TILE}, which do not divide {list(shape)}"
    size = scheme.group_size
    if size > 0 and (size % _TILE or shape[1] % size):
        return f"qserve's groups are multiples of {_TILE} that divide {shape[1]}, not {size}"
    return None


def supports_together(schemes: Iterable[Scheme]) -> str | None:
    """The group size is one for the artifact."""
    sizes = sorted({scheme.group_size for scheme in schemes})
    if len(sizes) > 1:
        return f"qserve has one group_size for all modules, not {', '.join(map(str, sizes))}"
    return None


def specs(
    module: str, scheme: Scheme, shape: tuple[int, ...], options: Options
) -> list[TensorSpec]:
    """The tensors that store a matrix [out, in]."""
    rows, columns = shape
    found = [
        TensorSpec(f"{module}.qweight", "I8", (rows, columns // 2)),
        TensorSpec(f"{module}.s1_scales", "F16", (rows,)),
    ]
    if scheme.group_size < 0:
        return [*found, TensorSpec(f"{module}.s1_szeros", "F16", (rows,))]
    grid = (scheme.groups(columns), rows)
    return found + [
        TensorSpec(f"{module}.{last}", "I8", grid) for last in ("s2_scales", "s2_zeros")
    ]


def tiles(codes: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Codes [out, in] -> qweight [out, in / 2]."""
    rows, columns = codes.shape
    parted = codes.reshape(rows // _TILE, 2, 2, 8, columns // _TILE, 2, 4, 4)
    ordered = parted.transpose(1, 0, 4, 3, 6, 5, 2, 7)  # a, tiles, c, e, d, b, f
    both: NDArray[np.uint8] = ordered[0] | (ordered[1] << np.uint8(4))
    return np.ascontiguousarray(both).reshape(rows, columns // 2).view(np.int8)


def codes_of(words: NDArray[np.int8]) -> NDArray[np.uint8]:
    """The inverse."""
    rows, half = words.shape
    both = np.ascontiguousarray(words).view(np.uint8)
    both = both.reshape(rows // _TILE, 2 * half // _TILE, 8, 4, 2, 2, 4)
    parts = np.stack([both & np.uint8(15), both >> np.uint8(4)])  # a, tiles, c, e, d, b, f
    return np.ascontiguousarray(parts.transpose(1, 0, 6, 3, 2, 5, 4, 7)).reshape(rows, 2 * half)


def _across(values: NDArray[Any]) -> NDArray[Any]:
    """[out, groups] -> [groups, out] in the order of s2."""
    rows, groups = values.shape
    ordered = values.T.reshape(groups, rows // _TILE, 4, 8).swapaxes(2, 3)
    return np.ascontiguousarray(ordered).reshape(groups, rows)


def _back(stored: NDArray[Any]) -> NDArray[Any]:
    """The inverse."""
    groups, rows = stored.shape
    ordered = stored.reshape(groups, rows // _TILE, 8, 4).swapaxes(2, 3).reshape(groups, rows)
    return np.ascontiguousarray(ordered.T)


def pack(module: str, quant: GroupQuant, options: Options) -> dict[str, NDArray[Any]]:
    """The stored tensors of one matrix; FormatError where it cannot be stored exactly."""
    scheme, outer = quant.scheme, quant.outer_rows
    reason = supports(scheme, quant.shape, options)
    if reason or outer is None or quant.g_idx is not None:
        raise FormatError(f"{module}: {reason or 'it has no scale of each row, or a g_idx'}")
    check_shape(f"{module}: scale", quant.scale.shape, scheme.grid(quant.shape))
    stored: dict[str, NDArray[Any]] = {
        f"{module}.qweight": tiles(quant.codes),
        f"{module}.s1_scales": outer.astype("<f2", copy=False),
    }
    if scheme.group_size < 0:
        scaled = quant.zero[:, 0].astype(np.float32) * outer.astype(np.float32)
        halves = scaled.astype(np.float16)
        if (halves.astype(np.float32) != scaled).any() or (quant.scale != 1).any():
            raise FormatError(f"{module}: the zero times the scale of a row is no float16 number")
        return stored | {f"{module}.s1_szeros": halves}
    scale = quant.scale.astype(np.int32)
    if (scale != quant.scale).any() or scale.min() < 1 or scale.max() > _LARGEST:
        raise FormatError(f"{module}: scales of groups are integers from 1 to {_LARGEST}")
    _check_range(module, quant)
    zeros = -(quant.zero.astype(np.int32) * scale)
    return stored | {
        f"{module}.s2_scales": _across(scale.astype(np.int8)),
        f"{module}.s2_zeros": _across(zeros.astype(np.uint8).view(np.int8)),
    }


def _check_range(module: str, quant: GroupQuant) -> None:
    """FormatError where a number of 8 bits would overflow."""
    index = quant.group_index()
    wide = quant.codes.astype(np.int16)
    wide -= quant.zero.astype(np.int16)[:, index]
    wide *= quant.scale.astype(np.int16)[:, index]
    if wide.size and not -128 <= int(wide.min()) <= int(wide.max()) <= 127:
        bad = int(np.abs(wide).max())
        raise FormatError(f"{module}: a code stands for {bad} of -128 to 127 steps of its row")


def scheme_in(module: str, look: Look, found: ArtifactScheme) -> tuple[Scheme, tuple[int, int]]:
    """The scheme and shape [out, in] of a stored matrix; FormatError where shapes disagree."""
    weight = find(look, f"{module}.qweight")
    rows, half = weight.shape
    if not (rows and half) or rows % _TILE or 2 * half % _TILE:
        raise FormatError(
            f"{module}.qweight: the shape is {[rows, half]}; expected tiles of 32 by 16 bytes"
        )
    _typed(module, look, "s1_scales", _HALF, (rows,))
    if str(weight.dtype) not in _INT8:
        raise FormatError(f"{module}.qweight: the dtype is {weight.dtype}; expected int8")
    scales = look(f"{module}.s2_scales")
    if scales is None:
        _typed(module, look, "s1_szeros", _HALF, (rows,))
        return scheme_of(-1), (rows, 2 * half)
    groups = scales.shape[0] if len(scales.shape) == 2 else 0
    if not groups or 2 * half % groups:
        raise FormatError(
            f"{module}.s2_scales: the shape is {list(scales.shape)}, of a matrix "
            f"{[rows, 2 * half]}; expected groups and {rows}"
        )
    for last in ("s2_scales", "s2_zeros"):
        _typed(module, look, last, _INT8, (groups, rows))
    return scheme_of(2 * half // groups), (rows, 2 * half)


def _typed(
    module: str, look: Look, last: str, dtypes: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    """FormatError unless a tensor is there with this type and shape."""
    name = f"{module}.{last}"
    stored = stored_codes.look_up(look, name)
    check_shape(name, stored.shape, shape)
    if str(stored.dtype) not in dtypes:
        raise FormatError(f"{name}: the dtype is {stored.dtype}; expected {dtypes[1]}")


def unpack(module: str, get: Callable[[str], NDArray[Any]], found: ArtifactScheme) -> GroupQuant:
    """Read one matrix; `get` gives a stored tensor by name, KeyError where there is none."""
    scheme, _ = scheme_in(module, stored_codes.looking(get), found)
    codes, outer = codes_of(get(f"{module}.qweight")), get(f"{module}.s1_scales")
    if scheme.group_size < 0:
        zero = _row_zeros(module, outer, get(f"{module}.s1_szeros"))
        scale = np.ones((len(outer), 1), np.float32)
        return GroupQuant(scheme, codes, scale, zero, outer_rows=outer)
    steps = _back(get(f"{module}.s2_scales")).astype(np.int16)
    if steps.min() < 1:
        raise FormatError(f"{module}.s2_scales: it has the scale {steps.min()}; they are positive")
    shifted = (-_back(get(f"{module}.s2_zeros")).astype(np.int16)) % 256
    wide = shifted // steps
    if (wide * steps != shifted).any() or wide.max() > 15:
        raise UnsupportedError(
            f"{module}.s2_zeros: a number is no zero from 0 to 15 times the scale of its group; "
            "files of that kind are not read here"
        )
    quant = GroupQuant(
        scheme, codes, steps.astype(np.float32), wide.astype(np.uint8), outer_rows=outer
    )
    _check_range(module, quant)
    return quant


def _row_zeros(module: str, outer: NDArray[Any], scaled: NDArray[Any]) -> NDArray[np.uint8]:
    wide = scaled.astype(np.float32)
    with np.errstate(all="ignore"):
        zero = np.rint(wide / outer.astype(np.float32))
        good = (zero * outer.astype(np.float32) == wide) & (zero >= 0) & (zero <= 15)
    if not good.all():
        raise UnsupportedError(
            f"{module}.s1_szeros: row {int(np.argmin(good))} has {float(wide[np.argmin(good)])}, "
            "no whole zero from 0 to 15 times its scale; files of that kind are not read here"
        )
    return zero.astype(np.uint8)[:, None]


def config(facts: Facts, options: Options) -> dict[str, Any]:
    """quantization_config of config.json."""
    kept = facts.kv_cache
    cache = {"num_bits": 4 if kept is None else kept["bits"], "type": "int", "symmetric": False}
    return {
        "quant_method": NAME,
        "bits": 4,
        "group_size": facts.default.group_size,
        "zero_point": True,
        "activations": {
            "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
        },
        "kv_cache_scheme": None if kept is None else
            cache | {"strategy": "attn_head", "dynamic": True},
        "modules_to_not_convert": left_out(facts),
    }  # fmt: skip


def side_files(facts: Facts, options: Options) -> dict[str, dict[str, Any]]:
    """No further files."""
    return {}


def detect(config: Mapping[str, Any]) -> ArtifactScheme | None:
    """The scheme that a quantization_config tells, or None."""
    if str(config.get("quant_method") or "").lower() != NAME:
        return None
    bits = first(config, "bits", "w_bit", "weight_bits")
    dense = names_of(config.get("modules_to_not_convert"))
    if bits not in (None, 4):
        return ArtifactScheme(NAME, NAME, None, f"w{bits}", dense)
    size = group_size_of(config.get("group_size", -1))
    return replace(ArtifactScheme(NAME, NAME, scheme_of(size)), dense=dense)
