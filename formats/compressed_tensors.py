"""compressed-tensors: integers of 2 to 8 bits, FP8 and FP4, for vLLM and transformers.

    pack-quantized          weight_packed        int32 [out, ceil(in * b / 32)], a row is a
                                                 little-endian bitstream
                            weight_scale         [out, groups]
                            weight_zero_point    int32 [ceil(out * b / 32), groups], along out
                            weight_shape         int64 [2] = out, in
                            weight_g_idx         int32 [in], in older files
    int-quantized           weight               int8 [out, in]
                            weight_scale, weight_zero_point (int8)
    float-quantized         weight               float8_e4m3 [out, in]
                            weight_scale
    both                    input_scale          [1], of activations with one scale for all
    mxfp8-quantized         weight_scale         uint8 (e8m0) [out, in / 32]; the rest as before
    nvfp4-pack-quantized    weight_packed        uint8 [out, in / 2]
                            weight_scale         float8_e4m3 [out, in / 16]
                            weight_global_scale  float32 [1]
                            input_global_scale   likewise, where inputs are NVFP4, too:
                                                 448 * 6 / max|x|
    mxfp4-pack-quantized    weight_packed        uint8 [out, in / 2]
                            weight_scale         uint8 (e8m0) [out, in / 32]

    w = (q - zero) * scale          w = value(q) * scale          w = value(q) * (scale / global)

Codes and zeros are signed, and stored packed with 2^(b-1) added. Before version 0.17 words of 3, 5,
6 and 7 bits held floor(32 / b) codes each and wasted the rest; the width of the words tells, and
the newer way is written. Scales of one number a row are [out, 1], of one for the matrix [1].
weight_g_idx is read, not written: version 0.19 refuses it.

Source: the compressors of compressed-tensors 0.20.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError
from qtool.formats import bits, stored_codes
from qtool.formats import compressed_tensors_transforms as transforms
from qtool.formats.compressed_tensors_config import NAME, detect, layout_of, written_config
from qtool.formats.compressed_tensors_read import scheme_in, unpack
from qtool.formats.facts import Facts, Options, check_shape
from qtool.formats.safetensors_header import TensorSpec
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np

__all__ = [
    "CODES", "NAME", "choose", "config", "detect", "pack", "scheme_in", "side_files", "specs",
    "supports", "supports_together", "unpack",
]  # fmt: skip

CODES = ("weight_packed", "weight")
_FLOAT_SCALES = ("float16", "bfloat16", "float32")
_FP4 = {("float8_e4m3", 16, "divides"): "nvfp4", ("e8m0", 32, ""): "mxfp4"}


def choose(schemes: Iterable[Scheme], layout: str | None = None) -> Options:
    """How integers are stored: packed, or (for quantized activations) a byte each, plain."""
    chosen = layout or "packed"
    if chosen not in ("packed", "plain"):
        raise FormatError(
            f"compressed-tensors has no layout {layout!r}; there are packed and plain"
        )
    return Options(chosen)


def supports(scheme: Scheme, shape: tuple[int, ...], options: Options) -> str | None:
    """Why a matrix [out, in] cannot be stored, or None."""
    _, columns = shape
    if scheme.group_size > 0 and columns % scheme.group_size:
        return f"in_features {columns} is not divisible by the group size {scheme.group_size}"
    if not scheme.is_float:
        one = scheme.rows == -1 == scheme.group_size and options.layout == "plain"
        if (
            (scheme.rows != 1 and not one)
            or scheme.outer
            or scheme.scale_dtype not in _FLOAT_SCALES
        ):
            return f"compressed-tensors stores one float scale a row or group, not {scheme}"
        if options.layout == "plain" and not scheme.symmetric:
            return "compressed-tensors' int8 weights are symmetric where engines load them"
        return None if 2 <= scheme.bits <= 8 else f"it holds 2 to 8 bits, not {scheme.bits}"
    if scheme.book == "e2m1":
        kind = (scheme.scale_dtype, scheme.group_size, scheme.outer)
        if kind in _FP4 and scheme.rows == 1:
            return None
        return f"compressed-tensors stores FP4 as nvfp4 g16 or mxfp4 g32, not {scheme}"
    if scheme.book != "e4m3" or scheme.outer:
        return f"compressed-tensors stores FP8 as e4m3, not {scheme}"
    if scheme.scale_dtype == "e8m0" and (scheme.group_size, scheme.rows) != (32, 1):
        return f"compressed-tensors stores mxfp8 in groups of 32, not {scheme}"
    return None


def supports_together(schemes: Iterable[Scheme]) -> str | None:
    """Any mixture can stand in one artifact, in groups."""
    return None


def specs(
    module: str, scheme: Scheme, shape: tuple[int, ...], options: Options
) -> list[TensorSpec]:
    """The tensors that store a matrix [out, in]."""
    found = _weight_specs(module, scheme, shape, options)
    if options.input_scale:
        found.append(TensorSpec(f"{module}.{options.input_scale}", "F32", (1,)))
    return found


def _weight_specs(
    module: str, scheme: Scheme, shape: tuple[int, ...], options: Options
) -> list[TensorSpec]:
    rows, columns = shape
    grid: tuple[int, ...] = scheme.grid(shape) if scheme.rows >= 0 else (1,)
    scale = TensorSpec(
        f"{module}.weight_scale", stored_codes.STORED_DTYPES[scheme.scale_dtype], grid
    )
    if scheme.book == "e2m1":
        found = [TensorSpec(f"{module}.weight_packed", "U8", (rows, columns // 2)), scale]
        if scheme.outer:
            found.append(TensorSpec(f"{module}.weight_global_scale", "F32", (1,)))
        return found
    if scheme.is_float:
        return [TensorSpec(f"{module}.weight", "F8_E4M3", shape), scale]
    if options.layout == "plain":
        return [TensorSpec(f"{module}.weight", "I8", shape), scale]
    words = bits.word_count(columns, scheme.bits)
    found = [
        TensorSpec(f"{module}.weight_packed", "I32", (rows, words)),
        scale,
        TensorSpec(f"{module}.weight_shape", "I64", (2,)),
    ]
    if not scheme.symmetric:
        zeros = (bits.word_count(rows, scheme.bits), scheme.groups(columns))
        found.append(TensorSpec(f"{module}.weight_zero_point", "I32", zeros))
    return found


def pack(module: str, quant: GroupQuant, options: Options) -> dict[str, NDArray[Any]]:
    """The stored tensors of one matrix; FormatError where it cannot be stored exactly."""
    scheme = quant.scheme
    reason = supports(scheme, quant.shape, options)
    if reason:
        raise FormatError(f"{module}: {reason}")
    check_shape(f"{module}: scale", quant.scale.shape, scheme.grid(quant.shape))
    if quant.g_idx is not None:
        raise FormatError(
            f"{module}: columns out of group order (g_idx), which compressed-tensors reads no more"
        )
    scale = stored_codes.stored_scale(module, quant)
    if scheme.rows < 0:
        scale = scale.reshape(1)
    stored: dict[str, NDArray[Any]] = {}
    if scheme.book == "e2m1":
        from qtool.float_codes import pack_nibbles

        stored = {"weight_packed": pack_nibbles(quant.codes), "weight_scale": scale}
        if scheme.outer:
            stored["weight_global_scale"] = np.array([quant.outer], np.float32)
    elif scheme.is_float:
        stored = {"weight": quant.codes, "weight_scale": scale}
    else:
        _check_zeros(module, quant)
        if options.layout == "plain":
            stored = {
                "weight": stored_codes.signed(quant.codes, scheme.bits),
                "weight_scale": scale,
            }
        else:
            stored = {
                "weight_packed": bits.pack(quant.codes, scheme.bits),
                "weight_scale": scale,
                "weight_shape": np.array(quant.shape, "<i8"),
            }
            if not scheme.symmetric:
                across = bits.pack(bits.transpose(quant.zero), scheme.bits)
                stored["weight_zero_point"] = bits.transpose(across)
    return {f"{module}.{last}": array for last, array in stored.items()}


def _check_zeros(module: str, quant: GroupQuant) -> None:
    middle = 1 << (quant.scheme.bits - 1)
    check_shape(f"{module}: zero", quant.zero.shape, quant.scale.shape)
    if quant.scheme.symmetric and (quant.zero != middle).any():
        raise FormatError(f"{module}: symmetric, but not every zero is {middle}")
    if (quant.zero >> (quant.scheme.bits - 1) > 1).any():
        raise FormatError(f"{module}: a zero does not fit {quant.scheme.bits} bits")


def config(facts: Facts, options: Options) -> dict[str, Any]:
    """quantization_config of config.json."""
    schemes = {name: layout_of(scheme, options.layout) for name, scheme in facts.quantized.items()}
    found = written_config(facts, schemes)
    everything = [*facts.quantized, *facts.dense]
    rotated = transforms.written(facts.rotated_inputs, facts.rotated_heads, everything)
    return found if rotated is None else found | {transforms.KEY: rotated}


def side_files(facts: Facts, options: Options) -> dict[str, dict[str, Any]]:
    """No further files."""
    return {}
