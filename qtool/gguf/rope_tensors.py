"""Tensors that no checkpoint has: by what llama.cpp divides the rotation frequencies.

Llama 3.1 slows low frequencies down: with wavelength w = 2 pi / f of frequency f = base^(-2i/d),
the divisor is 1 below original / high_freq_factor, `factor` above original / low_freq_factor, and
between them 1 / ((1 - s) / factor + s) with s = (original / w - low) / (high - low). Phi-3 stores
its divisors in config.json, one list for short and one for long texts. Sources: the Llama 3.1 and
LongRoPE settings of transformers (modeling_rope_utils).
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.errors import SourceError
from qtool.gguf.hf_config import Config, count, number


def rope_tensors(config: Config, rotated: int) -> dict[str, NDArray[np.float32]]:
    """GGUF name -> float32 [rotated / 2]; rotated: elements of a head that are rotated."""
    rope = config["rope_parameters"]["full_attention"]
    if rope["rope_type"] == "llama3":
        return {"rope_freqs.weight": llama3_divisors(rope, rotated)}
    if rope.get("long_factor"):
        return {
            f"rope_factors_{name}.weight": _listed(rope, f"{name}_factor", rotated // 2)
            for name in ("long", "short")
        }
    return {}


def llama3_divisors(rope: Mapping[str, Any], rotated: int) -> NDArray[np.float32]:
    """float32 [rotated / 2]; steps in float32 as convert_hf_to_gguf.py takes them."""
    one = np.float32(1.0)
    given = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    named = {**given, "original_max_position_embeddings": 8192, **rope}
    factor, low, high = (np.float32(number(named, name)) for name in given)
    original = np.float32(number(named, "original_max_position_embeddings"))
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    base = number(named, "rope_theta")
    # Powers in float64: rounded once they are the same on every machine.
    powers = np.power(base, exponents.astype(np.float64)).astype(np.float32)
    wavelengths = np.float32(2 * math.pi) / (one / powers)
    found = np.ones(len(wavelengths), np.float32)
    for i, length in enumerate(wavelengths):
        if length < original / high:
            continue
        if length > original / low:
            found[i] = factor
            continue
        share = (original / length - low) / (high - low)
        found[i] = one / ((one - share) / factor + share)
    return found


def _listed(rope: Mapping[str, Any], name: str, expected: int) -> NDArray[np.float32]:
    listed = rope.get(name)
    if not isinstance(listed, list) or len(listed) != expected:
        found = f"{len(listed)} numbers" if isinstance(listed, list) else repr(listed)
        raise SourceError(f"config.json: {name} is {found}, expected {expected} numbers")
    if any(isinstance(x, bool) or not isinstance(x, int | float) for x in listed):
        raise SourceError(f"config.json: {name} holds something that is no number")
    return np.array(listed, np.float32)


def longrope_attention_factor(config: Config) -> float:
    """What LongRoPE multiplies attention with: sqrt(1 + ln(longer by) / ln(original))."""
    rope = config["rope_parameters"]["full_attention"]
    original = count(config, "original_max_position_embeddings")
    longer = count(config, "max_position_embeddings") / original
    if longer <= 1.0:
        return 1.0
    if rope["rope_type"] == "yarn":
        return 0.1 * math.log(longer) + 1.0
    return math.sqrt(1 + math.log(longer) / math.log(original))
