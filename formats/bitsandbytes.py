"""bitsandbytes' int8 (LLM.int8()): each row divided by its largest magnitude, times 127.

    weight          int8 [out, in]
    SCB             float32 [out], the largest magnitude of each row
    weight_format   uint8, 0: rows are stored one after another

    w = (q * SCB) * (1 / 127), with 1 / 127 rounded to float32

config: quant_method bitsandbytes, load_in_8bit true, llm_int8_threshold, llm_int8_skip_modules.
Nothing is stored of the columns that are kept in float16 when the model runs: they are found then.
The 4-bit formats of bitsandbytes are recognised, not decoded.

Source: bitsandbytes' functional.int8_vectorwise_dequant, and the keys that transformers writes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError, UnsupportedError
from qtool.formats import stored_codes
from qtool.formats.facts import ArtifactScheme, Facts, Look, Options, left_out, names_of
from qtool.formats.other_names import names
from qtool.formats.patterns import any_of, matches
from qtool.formats.safetensors_header import TensorSpec
from qtool.messages.printable import in_json
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np


NAME = "bitsandbytes"
CODES = ("weight",)
SCHEME = Scheme(8, -1, True, "float32", outer="after")
(OUTER,) = struct.unpack("<f", struct.pack("<f", 1 / 127))  # as float32
THRESHOLD = 6.0  # of |x|, from which on bitsandbytes keeps a column of the input in float16


def scheme_in(module: str, look: Look, found: ArtifactScheme) -> tuple[Scheme, tuple[int, int]]:
    """The scheme and shape [out, in] of a stored matrix; FormatError where shapes disagree."""
    return stored_codes.scheme_of_bytes(module, look, SCHEME, f"{module}.SCB")


def unpack(module: str, get: Callable[[str], NDArray[Any]], found: ArtifactScheme) -> GroupQuant:
    """Read one matrix; `get` gives a stored tensor by name, KeyError where there is none."""
    try:
        layout = stored_codes.one_number(f"{module}.weight_format", get(f"{module}.weight_format"))
    except KeyError:
        layout = 0.0
    if layout != 0:
        raise UnsupportedError(
            f"{module}: weight_format is {layout:g}; only 0, rows one after another, is read"
        )
    scheme, shape = scheme_in(module, stored_codes.looking(get), found)
    return stored_codes.read_bytes(module, get, scheme, shape, f"{module}.SCB", outer=OUTER)


def detect(config: Mapping[str, Any]) -> ArtifactScheme | None:
    """The scheme that a quantization_config tells, or None."""
    method = str(config.get("quant_method") or "").lower()
    eight = config.get("load_in_8bit") is True
    if method != NAME and not (not method and eight):
        return None
    dense = names_of(config.get("llm_int8_skip_modules"))
    kind = str(config.get("bnb_4bit_quant_type") or "")
    return ArtifactScheme(NAME, NAME, SCHEME if eight else None, "int8" if eight else kind, dense)


def threshold_of(config: Mapping[str, Any]) -> float:
    """llm_int8_threshold; FormatError where it is no number."""
    value = config.get("llm_int8_threshold", THRESHOLD)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        raise FormatError(
            f"quantization_config: llm_int8_threshold is {in_json(value)}; expected a number "
            "from 0 on"
        )
    return float(value)


def choose(schemes: Iterable[Scheme], layout: str | None = None) -> Options:
    """There is one layout."""
    return Options("")


def supports(scheme: Scheme, shape: tuple[int, ...], options: Options) -> str | None:
    """Why a matrix [out, in] cannot be stored, or None."""
    if scheme != SCHEME:
        return f"bitsandbytes' int8 has 8 bits, symmetric, and one scale a row, not {scheme}"
    return None


def supports_together(schemes: Iterable[Scheme]) -> str | None:
    """There is one scheme."""
    return None


def specs(
    module: str, scheme: Scheme, shape: tuple[int, ...], options: Options
) -> list[TensorSpec]:
    """The tensors that store a matrix [out, in]."""
    return [
        TensorSpec(f"{module}.weight", "I8", shape),
        TensorSpec(f"{module}.SCB", "F32", shape[:1]),
        TensorSpec(f"{module}.weight_format", "U8", ()),
    ]


def pack(module: str, quant: GroupQuant, options: Options) -> dict[str, NDArray[Any]]:
    """The stored tensors of one matrix; FormatError where it cannot be stored exactly."""
    reason = supports(quant.scheme, quant.shape, options)
    if reason or quant.outer != OUTER or (quant.zero != 128).any():
        raise FormatError(f"{module}: {reason or 'rows are not scaled as bitsandbytes does it'}")
    return {
        f"{module}.weight": stored_codes.signed(quant.codes, 8),
        f"{module}.SCB": stored_codes.stored_scale(module, quant).reshape(-1),
        f"{module}.weight_format": np.zeros((), np.uint8),
    }


def config(facts: Facts, options: Options) -> dict[str, Any]:
    """quantization_config of config.json, with the keys that transformers writes."""
    return {
        "quant_method": NAME,
        "load_in_8bit": True,
        "load_in_4bit": False,
        "llm_int8_threshold": facts.outlier_threshold,
        "llm_int8_skip_modules": [*left_out(facts), *names(facts)],
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
    }


def side_files(facts: Facts, options: Options) -> dict[str, dict[str, Any]]:
    """No further files."""
    return {}


def skips(entry: str, name: str) -> bool | None:
    """Whether an entry of llm_int8_skip_modules means a module: an expression that matches its name
    from the start up to a dot, or what the name ends with. None where that is not known.

    Source: transformers 5.24, quantizers_utils.should_convert_module.
    """
    if name.endswith(entry) or name.startswith(entry + "."):
        return True
    if entry.replace(".", "").replace("_", "").isalnum():
        return False
    dots = [at for at, letter in enumerate(name) if letter == "."]
    starts = [name, *(name[:at] for at in dots), *(name[: at + 1] for at in dots)]
    return any_of(matches(f"(?:{entry})$", start) for start in starts)
