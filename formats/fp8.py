"""FP8 as transformers, DeepSeek and fbgemm store it: float8 weights and what to multiply them by.

    weight             float8_e4m3 [out, in]
    weight_scale_inv   float32 [out / 128, in / 128] (rounded up), the last blocks may be smaller
    weight_scale       instead of it: float32 [1] or [], or [out] or [out, 1]
    scale              instead of it: float8_e8m0, in blocks (DeepSeek V4)
    weight             of its experts: int8 [out, in / 2], two e2m1 numbers a byte, the first in the
                       low nibble, and scale [out, in / 32]
    input_scale        static activations only

    w = value(q) * scale        (a multiplier, also where it is called weight_scale_inv)

config: quant_method fp8 (fbgemm_fp8), activation_scheme dynamic | static, weight_block_size
[rows, columns] or null, modules_to_not_convert or ignored_layers; scale_fmt ue8m0 and expert_dtype
fp4 are not asked, as the tensors tell.

Sources: transformers' finegrained FP8 integration; DeepSeek-V3's weights description, and the
headers of DeepSeek-V4-Flash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError
from qtool.formats import stored_codes
from qtool.formats.facts import (
    ArtifactScheme,
    Facts,
    Look,
    Options,
    first,
    left_out,
    names_of,
    whole,
)
from qtool.formats.safetensors_header import TensorSpec
from qtool.messages.printable import in_json
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    from numpy.typing import NDArray


NAME = "fp8"
CODES = ("weight",)
_METHODS = (NAME, "fbgemm_fp8")
_FOUR_BITS = Scheme(4, 32, True, "e8m0", "e2m1")  # of experts whose weight is int8


def _names(module: str, look: Look) -> str:
    """The tensor that holds a module's scales."""
    for last in ("weight_scale_inv", "weight_scale", "scale"):
        if look(f"{module}.{last}") is not None:
            return f"{module}.{last}"
    raise FormatError(f"{module}.weight_scale_inv: missing, though {module}.weight is there")


def scheme_in(module: str, look: Look, found: ArtifactScheme) -> tuple[Scheme, tuple[int, int]]:
    """The scheme and shape [out, in] of a stored matrix; FormatError where shapes disagree."""
    if found.scheme is None:
        raise FormatError(f"{module}: the config does not say how it is stored")
    scales = _names(module, look)
    stored, shape = stored_codes.matrix(look, f"{module}.weight")
    powers = str(stored_codes.look_up(look, scales).dtype) in ("F8_E8M0", "U8", "uint8")
    if powers and str(stored.dtype) in ("I8", "int8"):
        return stored_codes.scheme_of_nibbles(module, look, _FOUR_BITS, f"{module}.weight", scales)
    book = "e5m2" if str(stored.dtype) == "F8_E5M2" else found.scheme.book
    scale = stored_codes.look_up(look, scales).shape
    rows, columns = found.scheme.rows, found.scheme.group_size
    if scale in ((), (1,), (1, 1)) and Scheme(8, columns, True, rows=rows).grid(shape) != (1, 1):
        rows, columns = -1, -1
    elif scale in ((shape[0],), (shape[0], 1)):
        rows, columns = 1, -1
    wanted = Scheme(8, columns, True, "float32", book, rows)
    return stored_codes.scheme_of_bytes(module, look, wanted, scales)


def unpack(module: str, get: Callable[[str], NDArray[Any]], found: ArtifactScheme) -> GroupQuant:
    """Read one matrix; `get` gives a stored tensor by name, KeyError where there is none."""
    look = stored_codes.looking(get)
    scheme, shape = scheme_in(module, look, found)
    scales = _names(module, look)
    if scheme.bits == _FOUR_BITS.bits:
        return stored_codes.read_nibbles(get, scheme, shape, f"{module}.weight", scales, None)
    return stored_codes.read_bytes(module, get, scheme, shape, scales)


def detect(config: Mapping[str, Any]) -> ArtifactScheme | None:
    """The scheme that a quantization_config tells, or None."""
    method = str(config.get("quant_method") or "").lower()
    if method not in _METHODS:
        return None
    block = config.get("weight_block_size")
    rows, columns = (1, -1) if method == "fbgemm_fp8" else (-1, -1)
    if block is not None:
        if not isinstance(block, list) or len(block) != 2:
            raise FormatError(
                f"quantization_config: weight_block_size is {in_json(block)}; expected rows and "
                "columns"
            )
        rows, columns = (whole(v, "weight_block_size", 1, 1 << 24) for v in block)
    scheme = Scheme(8, columns, True, "float32", "e4m3", rows)
    dense = names_of(first(config, "modules_to_not_convert", "ignored_layers"))
    return ArtifactScheme(NAME, method, scheme, str(config.get("activation_scheme") or ""), dense)


def choose(schemes: Iterable[Scheme], layout: str | None = None) -> Options:
    """There is one layout."""
    return Options("")


def supports(scheme: Scheme, shape: tuple[int, ...], options: Options) -> str | None:
    """Why a matrix [out, in] cannot be stored, or None."""
    if scheme.book != "e4m3" or scheme.scale_dtype != "float32":
        return f"fp8 stores float8_e4m3 with float32 scales, not {scheme}"
    if scheme.rows <= 1 or scheme.rows != scheme.group_size:
        return (
            f"format fp8 is written with square blocks (engines disagree on its other kinds), not "
            f"{scheme}; format compressed-tensors holds that"
        )
    return None


def supports_together(schemes: Iterable[Scheme]) -> str | None:
    """Why these schemes cannot stand in one artifact, or None."""
    kinds = sorted({str(scheme) for scheme in schemes})
    if len(kinds) > 1:
        return (
            f"fp8's config has one kind of scale for all modules, not {', '.join(kinds)}; "
            "format compressed-tensors can mix them"
        )
    return None


def specs(
    module: str, scheme: Scheme, shape: tuple[int, ...], options: Options
) -> list[TensorSpec]:
    """The tensors that store a matrix [out, in]."""
    return [
        TensorSpec(f"{module}.weight", "F8_E4M3", shape),
        TensorSpec(f"{module}.weight_scale_inv", "F32", scheme.grid(shape)),
    ]


def pack(module: str, quant: GroupQuant, options: Options) -> dict[str, NDArray[Any]]:
    """The stored tensors of one matrix; FormatError where it cannot be stored exactly."""
    reason = supports(quant.scheme, quant.shape, options)
    if reason:
        raise FormatError(f"{module}: {reason}")
    return {f"{module}.weight": quant.codes, f"{module}.weight_scale_inv": quant.scale}


def config(facts: Facts, options: Options) -> dict[str, Any]:
    """quantization_config of config.json."""
    scheme = facts.default
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [scheme.rows, scheme.group_size],
        "modules_to_not_convert": left_out(facts),
    }


def side_files(facts: Facts, options: Options) -> dict[str, dict[str, Any]]:
    """No further files."""
    return {}
