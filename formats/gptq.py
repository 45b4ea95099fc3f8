"""GPTQ: 2, 3, 4 or 8 bits in groups along the input, w = (q - zero) * scale.

    qweight  int32 [in * b / 32, out]           codes packed along the input, a little-endian
                                                bitstream (3 bits: 32 codes in three words)
    qzeros   int32 [groups, ceil(out * b / 32)] zeros packed along the output, likewise
    scales   fp16  [groups, out]
    g_idx    int32 [in]                         the group of every column

v1 (`checkpoint_format: gptq`) stores (zero - 1) mod 2^b, v2 (`gptq_v2`) stores zero. The
difference is taken field by field: an addition to the packed word would carry into the next
field wherever zero is 0. Files exist that say v1 and hold v2; symmetric ones give themselves away,
because every field is then 2^(b-1) and no symmetric v1 file has that. Others have their ones taken
from whole words: gptq_zeros.py.

Sources: the packing of AutoGPTQ and GPTQModel; the config keys of GPTQModel and vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError, UnsupportedError
from qtool.formats import bits, gptq_zeros
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
    read_all,
    whole,
)
from qtool.formats.gptq_dynamic import dynamic, negative, overridden
from qtool.formats.safetensors_file import TensorSpec
from qtool.messages.printable import in_json
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np


NAME = "gptq"
CODES = ("qweight",)
WIDTHS = (2, 3, 4, 8)
CHECKPOINT_FORMATS = {"v1": "gptq", "v2": "gptq_v2"}


def choose(schemes: Iterable[Scheme], layout: str | None = None) -> Options:
    """v1 where everything is symmetric, since engines load nothing else; v2 otherwise."""
    if layout is not None and layout not in CHECKPOINT_FORMATS:
        raise FormatError(f"gptq has no layout {layout!r}; there are v1 and v2")
    return Options(layout or ("v1" if all(s.symmetric for s in schemes) else "v2"))


def supports(scheme: Scheme, shape: tuple[int, ...], options: Options) -> str | None:
    """Why a matrix [out, in] cannot be stored, or None."""
    rows, columns = shape
    if scheme.bits not in WIDTHS:
        return f"gptq holds 2, 3, 4 or 8 bits, not {scheme.bits}"
    if scheme.scale_dtype != "float16":
        return f"gptq stores float16 scales, not {scheme.scale_dtype}"
    if scheme.group_size > 0 and columns % scheme.group_size:
        return f"in_features {columns} is not divisible by the group size {scheme.group_size}"
    step = bits.WORD if scheme.bits == 3 else bits.WORD // scheme.bits
    for what, count in (("in_features", columns), ("out_features", rows)):
        if count % step:
            return f"{what} {count} is not divisible by {step}, as gptq's {scheme.bits} bits need"
    if options.layout == "v1" and not scheme.symmetric:
        return "gptq v1 cannot hold every asymmetric zero; use v2"
    return None


def supports_together(schemes: Iterable[Scheme]) -> str | None:
    """Any mixture can stand in one artifact, through `dynamic`."""
    return None


def specs(
    module: str, scheme: Scheme, shape: tuple[int, ...], options: Options
) -> list[TensorSpec]:
    """The tensors that store a matrix [out, in]."""
    rows, columns = shape
    groups = scheme.groups(columns)
    return [
        TensorSpec(f"{module}.qweight", "I32", (bits.word_count(columns, scheme.bits), rows)),
        TensorSpec(f"{module}.qzeros", "I32", (groups, bits.word_count(rows, scheme.bits))),
        TensorSpec(f"{module}.scales", "F16", (groups, rows)),
        TensorSpec(f"{module}.g_idx", "I32", (columns,)),
    ]


def pack(module: str, quant: GroupQuant, options: Options) -> dict[str, NDArray[Any]]:
    """The stored tensors of one matrix; FormatError where it cannot be stored exactly."""
    scheme = quant.scheme
    reason = supports(scheme, quant.shape, options)
    if reason:
        raise FormatError(f"{module}: {reason}")
    rows, columns = quant.shape
    groups = scheme.groups(columns)
    check_shape(f"{module}: scale", quant.scale.shape, (rows, groups))
    check_shape(f"{module}: zero", quant.zero.shape, (rows, groups))
    if quant.scale.dtype != np.float16:
        raise FormatError(f"{module}: scales are {quant.scale.dtype}; gptq stores float16")
    middle = 1 << (scheme.bits - 1)
    if scheme.symmetric and (quant.zero != middle).any():
        raise FormatError(f"{module}: symmetric, but not every zero is {middle}")
    index = quant.group_index()
    check_shape(f"{module}: g_idx", index.shape, (columns,))
    if columns and (int(index.min()) < 0 or int(index.max()) >= groups):
        raise FormatError(f"{module}: g_idx names a group outside of 0 .. {groups - 1}")
    zero = bits.transpose(quant.zero)
    if (zero >> scheme.bits).any():
        raise FormatError(f"{module}: a zero does not fit {scheme.bits} bits")
    if options.layout == "v1":
        zero = (zero - np.uint8(1)) & np.uint8((1 << scheme.bits) - 1)
    return {
        f"{module}.qweight": bits.transpose(bits.pack(quant.codes, scheme.bits)),
        f"{module}.qzeros": bits.pack(zero, scheme.bits),
        f"{module}.scales": bits.transpose(quant.scale),
        f"{module}.g_idx": np.ascontiguousarray(index, dtype="<i4"),
    }


def scheme_in(module: str, look: Look, found: ArtifactScheme) -> tuple[Scheme, tuple[int, int]]:
    """The scheme and shape [out, in] of a stored matrix; FormatError where shapes disagree.

    Width and group size come from the shapes, which cannot be wrong about them as a config's
    patterns can; the config decides where several widths would fit.
    """
    default = overridden(module, found)
    weight = find_words(look, f"{module}.qweight")
    zeros = find_words(look, f"{module}.qzeros")
    groups, rows = find_floats(look, f"{module}.scales").shape
    index = look(f"{module}.g_idx")
    words = weight.shape[0]
    for width in (default.bits, *(b for b in WIDTHS if b != default.bits)):
        columns = words * bits.WORD // width
        if index is not None:
            (columns,) = find_words(look, f"{module}.g_idx", dimensions=1).shape
        fits = words == bits.word_count(columns, width)
        if fits and zeros.shape[1] == bits.word_count(rows, width):
            break
    else:
        raise FormatError(
            f"{module}: {words} words of codes and {zeros.shape[1]} words of zeros fit no width "
            "of 2, 3, 4 or 8 bits"
        )
    if not (rows and columns and groups):
        raise FormatError(f"{module}: it is empty")
    size = default.group_size
    if Scheme(width, size, True).groups(columns) != groups:
        size = -1 if groups == 1 else -(-columns // groups)
    if Scheme(width, size, True).groups(columns) != groups:
        raise FormatError(f"{module}: {columns} columns do not divide into {groups} groups")
    scheme = Scheme(width, size, default.symmetric)
    for spec in specs(module, scheme, (rows, columns), Options(found.layout)):
        if spec.name != f"{module}.g_idx" or index is not None:
            check_shape(spec.name, find(look, spec.name, len(spec.shape)).shape, spec.shape)
    return scheme, (rows, columns)


def unpack(module: str, get: Callable[[str], NDArray[Any]], found: ArtifactScheme) -> GroupQuant:
    """Read one matrix; `get` gives a stored tensor by name, KeyError where there is none."""
    if found.layout not in CHECKPOINT_FORMATS:
        raise UnsupportedError(
            f"{module}: checkpoint_format {in_json(found.layout)} is not known; there are gptq and "
            "gptq_v2"
        )
    tensors = read_all(module, get, ("qweight", "qzeros", "scales", "g_idx"))
    scheme, (rows, columns) = scheme_in(module, tensors.get, found)
    width = scheme.bits
    if width not in WIDTHS:
        raise UnsupportedError(
            f"{module}: {width} bits; gptq has 2, 3, 4 or 8, and others in planes (gptq_p), which "
            "are not read here"
        )
    codes = bits.unpack(bits.transpose(tensors[f"{module}.qweight"]), width, columns)
    zero = gptq_zeros.meant(found, scheme, tensors[f"{module}.qzeros"], rows)
    if found.overrides:  # `dynamic` may change sym for this module: the zeros tell
        middle = np.uint8(1 << (width - 1))
        scheme = Scheme(width, scheme.group_size, bool((zero == middle).all()))
    scale = bits.transpose(tensors[f"{module}.scales"])
    index = order_of(module, tensors.get(f"{module}.g_idx"), scheme, (rows, columns))
    return GroupQuant(scheme, codes, scale, bits.transpose(zero), index)


def order_of(
    module: str, index: NDArray[Any] | None, scheme: Scheme, shape: tuple[int, int]
) -> NDArray[np.int32] | None:
    """The stored group of each column, int32 [in]; None where it is k // group_size."""
    size = scheme.group_size if scheme.group_size > 0 else shape[1]
    if index is None or np.array_equal(index, np.arange(shape[1]) // size):
        return None
    groups = scheme.groups(shape[1])
    if int(index.min()) < 0 or int(index.max()) >= groups:
        raise FormatError(f"{module}.g_idx names a group outside of 0 .. {groups - 1}")
    return index.astype(np.int32)


def config(facts: Facts, options: Options) -> dict[str, Any]:
    """quantization_config of config.json, and all of quantize_config.json."""
    default = facts.default
    meta: dict[str, Any] = {"quantizer": [f"qtool:{facts.version}"]}
    if facts.damp_percent is not None:  # how the codes were found: GPTQ's own keys
        meta |= {
            "damp_percent": facts.damp_percent,
            "static_groups": facts.static_groups,
            # Inputs within a block are those of its unquantized weights.
            "true_sequential": False,
            "mse": facts.mse,
        }
    return {
        "quant_method": "gptq",
        "bits": default.bits,
        "group_size": default.group_size,
        "desc_act": facts.act_order,
        "sym": default.symmetric,
        "lm_head": head_quantized(facts),
        "checkpoint_format": CHECKPOINT_FORMATS[options.layout],
        "pack_dtype": "int32",
        "dynamic": dynamic(facts),
        "meta": meta,
    }


def side_files(facts: Facts, options: Options) -> dict[str, dict[str, Any]]:
    """quantize_config.json, equal to what config.json holds."""
    return {"quantize_config.json": config(facts, options)}


def detect(config: Mapping[str, Any]) -> ArtifactScheme | None:
    """The scheme that a quantization_config tells, or None."""
    method = str(first(config, "quant_method", "method") or "").lower()
    if method != NAME and not (not method and {"bits", "group_size", "desc_act"} <= set(config)):
        return None
    width = whole(first(config, "bits", "wbits"), "bits", 2, 8)
    size = group_size_of(first(config, "group_size"))
    written = str(first(config, "checkpoint_format", "format") or "gptq").lower()
    layout = {"gptq": "v1", "gptq_v2": "v2"}.get(written, written)
    table = config.get("dynamic")
    overrides: tuple[tuple[str, Mapping[str, object]], ...] = ()
    if isinstance(table, dict):
        overrides = tuple(
            (k, v if isinstance(v, dict) else {}) for k, v in table.items() if not negative(k)
        )
        dense = tuple(k.removeprefix("-:") for k in table if negative(k))
    else:
        dense = ()
    symmetric = config.get("sym", True) is not False
    scheme, writer = Scheme(width, size, symmetric), gptq_zeros.writer_of(config)
    return ArtifactScheme(NAME, NAME, scheme, layout, dense, overrides, writer=writer)
