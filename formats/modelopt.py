"""NVIDIA's ModelOpt: FP8 and NVFP4 checkpoints, as TensorRT-LLM, vLLM and SGLang read them.

    FP8      weight          float8_e4m3 [out, in]
             weight_scale    float32, one number, or [out], or blocks; multiplies
    NVFP4    weight          uint8 [out, in / 2], even columns in the low nibbles
             weight_scale    float8_e4m3 [out, in / 16]
             weight_scale_2  float32, one number: max|w| / (448 * 6)

    w = value(q) * scale            w = value(q) * (scale * weight_scale_2)

config: `quantization` of hf_quant_config.json, or quantization_config with quant_method modelopt:
quant_algo, kv_cache_quant_algo, group_size, exclude_modules (ignore). Which of both a module is
stored as, its weight's dtype tells; other algorithms are recognised, not decoded.

Source: modelopt's export (NVFP4QTensor) and vLLM's loader of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qtool.errors import UnsupportedError
from qtool.formats import fp8, stored_codes
from qtool.formats.facts import ArtifactScheme, Look, first, names_of
from qtool.formats.read_only import choose as choose
from qtool.formats.read_only import config as config
from qtool.formats.read_only import pack as pack
from qtool.formats.read_only import side_files as side_files
from qtool.formats.read_only import specs as specs
from qtool.formats.read_only import supports as supports
from qtool.formats.read_only import supports_together as supports_together
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    from numpy.typing import NDArray


NAME = "modelopt"
CODES = ("weight",)
NVFP4 = Scheme(4, 16, True, "float8_e4m3", "e2m1", 1, "multiplies")
_FP8 = Scheme(8, -1, True, "float32", "e4m3", -1)
WEIGHTS_ALONE = "W4A16_NVFP4"
_ALGORITHMS = {"FP8": _FP8, "FP8_PER_CHANNEL_PER_TOKEN": _FP8, "NVFP4": NVFP4,
               WEIGHTS_ALONE: NVFP4, "MIXED_PRECISION": NVFP4}  # fmt: skip


def scheme_in(module: str, look: Look, found: ArtifactScheme) -> tuple[Scheme, tuple[int, int]]:
    """The scheme and shape [out, in] of a stored matrix; FormatError where shapes disagree."""
    if look(f"{module}.pre_quant_scale") is not None:
        raise UnsupportedError(
            f"{module}.pre_quant_scale: inputs that are scaled as the model runs are not read here"
        )
    if not _is_packed(stored_codes.look_up(look, f"{module}.weight").dtype, module, look):
        return fp8.scheme_in(module, look, replace(found, scheme=_FP8))
    stored_codes.look_up(look, f"{module}.weight_scale_2")
    return stored_codes.scheme_of_nibbles(
        module, look, NVFP4, f"{module}.weight", f"{module}.weight_scale"
    )


def _is_packed(dtype: object, module: str, look: Look) -> bool:
    """Whether bytes hold two codes; of arrays, which are all bytes, the second scale tells."""
    if str(dtype) == "uint8":
        return look(f"{module}.weight_scale_2") is not None
    return str(dtype) == "U8"


def unpack(module: str, get: Callable[[str], NDArray[Any]], found: ArtifactScheme) -> GroupQuant:
    """Read one matrix; `get` gives a stored tensor by name, KeyError where there is none."""
    look = stored_codes.looking(get)
    scheme, shape = scheme_in(module, look, found)
    if not scheme.outer:
        return fp8.unpack(module, get, replace(found, scheme=_FP8))
    outer, codes = f"{module}.weight_scale_2", f"{module}.weight"
    return stored_codes.read_nibbles(get, scheme, shape, codes, f"{module}.weight_scale", outer)


def detect(config: Mapping[str, Any]) -> ArtifactScheme | None:
    """The scheme that a quantization_config tells, or None."""
    method = str(config.get("quant_method") or "").lower()
    if not method.startswith(NAME):
        return None
    algorithm = str(config.get("quant_algo") or "").upper()
    dense = names_of(first(config, "exclude_modules", "ignore"))
    return ArtifactScheme(NAME, method, _ALGORITHMS.get(algorithm), algorithm, dense)
