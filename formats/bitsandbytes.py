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

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from qtool.errors import UnsupportedError
from qtool.formats import stored_codes
from qtool.formats.facts import ArtifactScheme, Look, names_of
from qtool.formats.read_only import choose as choose
from qtool.formats.read_only import config as config
from qtool.formats.read_only import pack as pack
from qtool.formats.read_only import side_files as side_files
from qtool.formats.read_only import specs as specs
from qtool.formats.read_only import supports as supports
from qtool.formats.read_only import supports_together as supports_together
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np


NAME = "bitsandbytes"
CODES = ("weight",)
SCHEME = Scheme(8, -1, True, "float32", outer="after")


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
    outer = float(np.float32(1 / 127))
    return stored_codes.read_bytes(module, get, scheme, shape, f"{module}.SCB", outer=outer)


def detect(config: Mapping[str, Any]) -> ArtifactScheme | None:
    """The scheme that a quantization_config tells, or None."""
    method = str(config.get("quant_method") or "").lower()
    eight = config.get("load_in_8bit") is True
    if method != NAME and not (not method and eight):
        return None
    dense = names_of(config.get("llm_int8_skip_modules"))
    kind = str(config.get("bnb_4bit_quant_type") or "")
    return ArtifactScheme(NAME, NAME, SCHEME if eight else None, "int8" if eight else kind, dense)
