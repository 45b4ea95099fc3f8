"""AWQ: 4-bit weights in groups along the input, w = (q - zero) * scale, zero stored as it is.

GEMM (what engines load):
    qweight  int32 [in, out/8]      nibble i of word c holds output 8c + (0,2,4,6,1,3,5,7)[i]
    qzeros   int32 [groups, out/8]  in the same order
    scales   fp16  [groups, out]
GEMV:
    qweight  int32 [out, in/8]      nibbles in order along the input
    qzeros   int32 [out, zw]        zw = groups/8, rounded up to a multiple of 1, 2 or 4
    scales   fp16  [out, 8 zw]      for groups of 128 and more, of 64, of 32; padding is zero
GEMV-fast, llm-awq:
    qweight  int16 [out/4, in]      below
    scales   fp16  [8 zw, out]
    qzeros   fp16  [8 zw, out]      -(scale * zero); llm-awq calls it scaled_zeros

GEMV-fast first puts each run of 32 inputs in the order 0,8,16,24, 1,9,17,25, ..., 7,15,23,31.
Four rows then share one: of every strip of 64 inputs it holds row 0's 64 codes, row 1's, row 2's
and row 3's, and each int16 has four neighbours of that sequence, the first in the low nibble.

Sources: the packing of AutoAWQ (casper-hansen/AutoAWQ, awq/modules/linear) and of llm-awq.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError
from qtool.formats import bits
from qtool.formats.facts import (
    ArtifactScheme,
    Facts,
    Look,
    Options,
    check_shape,
    find,
    find_floats,
    find_words,
    first,
    group_size_of,
    head_quantized,
    names_of,
    read_all,
    whole,
    whole_experts,
)
from qtool.formats.gptq_dynamic import overridden
from qtool.formats.layer_names import experts_of, fused_names
from qtool.formats.safetensors_file import TensorSpec
from qtool.messages.printable import in_json
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np


NAME = "awq"
CODES = ("qweight",)
BITS = 4


@dataclass(frozen=True)
class Layout:
    """What tells the variants apart."""

    version: str  # as quantization_config has it
    order: tuple[int, ...]  # of the codes within a run
    axis: str  # which features are packed into a word: out or in
    zeros: str  # name of the zeros' tensor


LAYOUTS = {
    "gemm": Layout("gemm", (0, 2, 4, 6, 1, 3, 5, 7), "out", "qzeros"),
    "gemv": Layout("gemv", tuple(range(8)), "in", "qzeros"),
    "gemv_fast": Layout(
        "gemv_fast", tuple(8 * (i % 4) + i // 4 for i in range(32)), "strips", "qzeros"
    ),
    "llm_awq": Layout(
        "llm-awq", tuple(8 * (i % 4) + i // 4 for i in range(32)), "strips", "scaled_zeros"
    ),
}
_STRIP = 64
_ROWS = 4


def choose(schemes: Iterable[Scheme], layout: str | None = None) -> Options:
    """The layout asked for, gemm by default."""
    chosen = (layout or "gemm").replace("-", "_")
    if chosen not in LAYOUTS:
        raise FormatError(f"awq has no layout {layout!r}; there are {', '.join(LAYOUTS)}")
    return Options(chosen)


def _zeros_width(groups: int, group_size: int) -> int:
    """Words of zeros in a row of GEMV."""
    multiple = 1 if group_size >= 128 else 2 if group_size >= 64 else 4
    return -(-groups // (8 * multiple)) * multiple


def supports(scheme: Scheme, shape: tuple[int, ...], options: Options) -> str | None:
    """Why a matrix [out, in] cannot be stored, or None."""
    rows, columns = shape
    size = scheme.group_size if scheme.group_size > 0 else columns
    if scheme.bits != BITS:
        return f"awq holds 4 bits only, not {scheme.bits}; format gptq holds 2, 3, 4 and 8"
    if scheme.scale_dtype != "float16":
        return f"awq stores float16 scales, not {scheme.scale_dtype}"
    if columns % size:
        return f"in_features {columns} is not divisible by the group size {size}"
    if rows % 8:
        return f"out_features {rows} is not divisible by 8, as awq needs"
    if options.layout == "gemm":
        return None
    if size not in (32, 64) and size < 128:
        return f"awq's {options.layout} layout needs groups of 32, 64, or 128 and more, not {size}"
    step = 8 if options.layout == "gemv" else _STRIP
    if columns % step:
        return f"in_features {columns} is not divisible by {step}, as awq's {options.layout} needs"
    return None


def supports_together(schemes: Iterable[Scheme]) -> str | None:
    """Why these schemes cannot stand in one artifact, or None."""
    kinds = sorted({(s.bits, s.group_size) for s in schemes})
    if len(kinds) > 1:
        found = ", ".join(f"{b} bits g{g}" for b, g in kinds)
        return (
            f"awq's config has one width and one group size for all modules, not {found}; "
            "format gptq can mix them"
        )
    return None


def _check(module: str, quant: GroupQuant, options: Options) -> None:
    reason = supports(quant.scheme, quant.shape, options)
    if reason:
        raise FormatError(f"{module}: {reason}")
    rows, columns = quant.shape
    groups = quant.scheme.groups(columns)
    check_shape(f"{module}: scale", quant.scale.shape, (rows, groups))
    check_shape(f"{module}: zero", quant.zero.shape, (rows, groups))
    if quant.scale.dtype != np.float16:
        raise FormatError(f"{module}: scales are {quant.scale.dtype}; awq stores float16")
    if quant.g_idx is not None:
        raise FormatError(f"{module}: awq cannot store columns out of group order (g_idx)")


def specs(
    module: str, scheme: Scheme, shape: tuple[int, ...], options: Options
) -> list[TensorSpec]:
    """The tensors that store a matrix [out, in]."""
    rows, columns = shape
    groups = scheme.groups(columns)
    layout = LAYOUTS[options.layout]
    width = _zeros_width(groups, columns if scheme.group_size < 0 else scheme.group_size)
    if layout.axis == "out":
        return [
            TensorSpec(f"{module}.qweight", "I32", (columns, rows // 8)),
            TensorSpec(f"{module}.qzeros", "I32", (groups, rows // 8)),
            TensorSpec(f"{module}.scales", "F16", (groups, rows)),
        ]
    if layout.axis == "in":
        return [
            TensorSpec(f"{module}.qweight", "I32", (rows, columns // 8)),
            TensorSpec(f"{module}.qzeros", "I32", (rows, width)),
            TensorSpec(f"{module}.scales", "F16", (rows, width * 8)),
        ]
    return [
        TensorSpec(f"{module}.qweight", "I16", (rows // _ROWS, columns)),
        TensorSpec(f"{module}.{layout.zeros}", "F16", (width * 8, rows)),
        TensorSpec(f"{module}.scales", "F16", (width * 8, rows)),
    ]


def _pack_strips(codes: NDArray[np.uint8], order: tuple[int, ...]) -> NDArray[np.int16]:
    """uint8 [out, in] -> int16 [out/4, in], as GEMV-fast has it."""
    rows, columns = codes.shape
    strips = bits.reorder(codes, order).reshape(rows // _ROWS, _ROWS, columns // _STRIP, _STRIP)
    flat = np.ascontiguousarray(strips.transpose(0, 2, 1, 3)).reshape(rows // _ROWS, columns * 4)
    return bits.pack(flat, BITS).view("<i2")


def _unpack_strips(words: NDArray[Any], order: tuple[int, ...]) -> NDArray[np.uint8]:
    quarter, columns = words.shape
    flat = bits.unpack(np.ascontiguousarray(words).view("<i4"), BITS, columns * _ROWS)
    strips = flat.reshape(quarter, columns // _STRIP, _ROWS, _STRIP).transpose(0, 2, 1, 3)
    codes = np.ascontiguousarray(strips).reshape(quarter * _ROWS, columns)
    return bits.reorder(codes, bits.inverse(order))


def _padded(matrix: NDArray[Any], width: int) -> NDArray[Any]:
    out = np.zeros((matrix.shape[0], width), matrix.dtype)
    out[:, : matrix.shape[1]] = matrix
    return out


def pack(module: str, quant: GroupQuant, options: Options) -> dict[str, NDArray[Any]]:
    """The stored tensors of one matrix; FormatError where it cannot be stored exactly."""
    _check(module, quant, options)
    layout = LAYOUTS[options.layout]
    if layout.axis == "out":
        return {
            f"{module}.qweight": bits.transpose(bits.pack_rows(quant.codes, layout.order)),
            f"{module}.qzeros": bits.transpose(bits.pack_rows(quant.zero, layout.order)),
            f"{module}.scales": bits.transpose(quant.scale),
        }
    columns = quant.shape[1]
    size = columns if quant.scheme.group_size < 0 else quant.scheme.group_size
    width = _zeros_width(quant.scheme.groups(columns), size) * 8
    if layout.axis == "in":
        return {
            f"{module}.qweight": bits.pack(quant.codes, BITS),
            f"{module}.qzeros": bits.pack(_padded(quant.zero, width), BITS),
            f"{module}.scales": _padded(quant.scale, width),
        }
    with np.errstate(over="ignore"):
        product = quant.scale.astype(np.float32) * quant.zero.astype(np.float32)
        scaled = (-product).astype(np.float16)
    if not np.isfinite(scaled).all():
        raise FormatError(f"{module}: scale * zero is too large for the float16 of this layout")
    return {
        f"{module}.qweight": _pack_strips(quant.codes, layout.order),
        f"{module}.{layout.zeros}": bits.transpose(_padded(scaled, width)),
        f"{module}.scales": bits.transpose(_padded(quant.scale, width)),
    }


def _zero_from_scaled(module: str, scaled: NDArray[Any], scale: NDArray[Any]) -> NDArray[np.uint8]:
    """The whole zero point z in -(scale * z), where the product was rounded to float16."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = -scaled.astype(np.float32) / scale.astype(np.float32)
    zero = np.rint(np.where(scale == 0, 0, ratio))
    if not (np.isfinite(zero).all() and (zero >= 0).all() and (zero < 1 << BITS).all()):
        raise FormatError(f"{module}: the scaled zeros are no 4-bit zeros times the scales")
    return zero.astype(np.uint8)


def scheme_in(module: str, look: Look, found: ArtifactScheme) -> tuple[Scheme, tuple[int, int]]:
    """The scheme and shape [out, in] of a stored matrix; FormatError where shapes disagree."""
    scheme = overridden(module, found)
    layout = LAYOUTS[found.layout]
    strips = layout.axis == "strips"
    weight = find_words(look, f"{module}.qweight", 2 if strips else 4)
    zeros = f"{module}.{layout.zeros}"
    _ = find_floats(look, zeros) if strips else find_words(look, zeros)
    find_floats(look, f"{module}.scales")
    first_axis, second_axis = weight.shape
    shape = (first_axis, second_axis * 8)
    if layout.axis == "out":
        shape = (second_axis * 8, first_axis)
    elif strips:
        shape = (first_axis * _ROWS, second_axis)
    reason = "it is empty" if 0 in shape else supports(scheme, shape, Options(found.layout))
    if reason:
        raise FormatError(f"{module}: {reason}")
    for spec in specs(module, scheme, shape, Options(found.layout)):
        check_shape(spec.name, find(look, spec.name).shape, spec.shape)
    return scheme, shape


def unpack(module: str, get: Callable[[str], NDArray[Any]], found: ArtifactScheme) -> GroupQuant:
    """Read one matrix; `get` gives a stored tensor by name, KeyError where there is none."""
    layout = LAYOUTS[found.layout]
    tensors = read_all(module, get, ("qweight", layout.zeros, "scales"))
    scheme, (_, columns) = scheme_in(module, tensors.get, found)
    weight = tensors[f"{module}.qweight"]
    stored_zeros = tensors[f"{module}.{layout.zeros}"]
    scales = tensors[f"{module}.scales"]
    groups = scheme.groups(columns)
    if layout.axis == "out":
        codes = bits.unpack_rows(bits.transpose(weight), layout.order)
        zero = bits.unpack_rows(bits.transpose(stored_zeros), layout.order)
        scale = bits.transpose(scales)
    elif layout.axis == "in":
        codes = bits.unpack(weight, BITS, columns)
        zero = bits.unpack(stored_zeros, BITS, stored_zeros.shape[1] * 8)[:, :groups].copy()
        scale = scales[:, :groups].copy()
    else:
        codes = _unpack_strips(weight, layout.order)
        scale = bits.transpose(scales[:groups])
        zero = _zero_from_scaled(module, bits.transpose(stored_zeros[:groups]), scale)
    return GroupQuant(scheme, codes, scale, zero)


def _not_converted(facts: Facts) -> list[str] | None:
    """Full names of the dense modules, which engines match as substrings of module names.

    Experts go by the name of their layer, the only one that engines ask for. SGLang asks for no
    other than the fused names of q/k/v and gate/up.
    """
    layers = whole_experts(facts.dense, [*facts.quantized, *facts.dense])
    names = {
        found[0] if (found := experts_of(name)) and found[0] in layers else name
        for name in facts.dense
    }
    names |= fused_names(name for name in names if experts_of(name) is None)
    joined = "\n".join(facts.quantized)  # one search each: experts make tens of thousands of names
    for dense in sorted(names):
        if dense in joined:
            name = next(name for name in facts.quantized if dense in name)
            raise FormatError(
                f"{dense} is dense and {name} is quantized: awq's modules_to_not_convert "
                "matches parts of names and would skip both; quantize both or neither"
            )
    return sorted(names) or None


def config(facts: Facts, options: Options) -> dict[str, Any]:
    """quantization_config of config.json.

    zero_point is true for symmetric weights too: their zeros are stored (as 8), and engines have
    no kernel for AWQ without zeros.
    """
    reason = supports_together(facts.quantized.values())
    if reason:
        raise FormatError(f"{reason}")
    default = facts.default
    symmetric = all(scheme.symmetric for scheme in facts.quantized.values())
    return {
        "quant_method": "awq",
        "bits": default.bits,
        "group_size": default.group_size,
        "sym": symmetric,  # transformers and GPTQModel take it for true where it is missing
        "zero_point": True,
        "version": LAYOUTS[options.layout].version,
        "lm_head": head_quantized(facts),
        "modules_to_not_convert": _not_converted(facts),
        "meta": {"quantizer": [f"qtool:{facts.version}"], "symmetric": symmetric},
    }


def side_files(facts: Facts, options: Options) -> dict[str, dict[str, Any]]:
    """quant_config.json, which older loaders read."""
    whole_config = config(facts, options)
    return {
        "quant_config.json": {
            "zero_point": whole_config["zero_point"],
            "q_group_size": whole_config["group_size"],
            "w_bit": whole_config["bits"],
            "version": whole_config["version"].upper(),
            "modules_to_not_convert": whole_config["modules_to_not_convert"],
        }
    }


def detect(config: Mapping[str, Any]) -> ArtifactScheme | None:
    """The scheme that a quantization_config tells, under any of the names in use, or None."""
    method = str(first(config, "quant_method", "method") or "").lower()
    if method != NAME and not (not method and "w_bit" in config):
        return None
    width = whole(first(config, "bits", "w_bit", "wbits"), "bits", 2, 8)
    size = group_size_of(first(config, "group_size", "q_group_size"))
    version = first(config, "version", "checkpoint_format", "format")
    name = str("gemm" if version is None else version).lower().replace("-", "_")
    if name not in LAYOUTS:
        raise FormatError(
            f"quantization_config: awq version {in_json(version)} is not known; there are "
            f"{', '.join(LAYOUTS)}"
        )
    meta = config.get("meta")
    symmetric = config.get("sym") is True or config.get("zero_point") is False
    if isinstance(meta, dict) and meta.get("symmetric") is True:
        symmetric = True
    dense = names_of(config.get("modules_to_not_convert"))
    return ArtifactScheme(NAME, NAME, Scheme(width, size, symmetric), name, dense)
