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

from qtool.checkpoints.hf_config import Config, count, head_width, number, of_block
from qtool.errors import SettingError, SourceError

NOT_ROTATED = 1e30  # as a divisor


def rope_tensors(config: Config) -> dict[str, NDArray[np.float32]]:
    """GGUF name -> float32 [rotated / 2]: half of the elements of a head that are rotated."""
    rope = config["rope_parameters"]["full_attention"]
    if rope["rope_type"] == "proportional":  # in the blocks without a window, as the last one
        last = of_block(config, count(config, "num_hidden_layers") - 1)
        return {"rope_freqs.weight": proportional_divisors(rope, head_width(last))}
    if rope["rope_type"] != "llama3" and not rope.get("long_factor"):
        return {}  # as of a model without attention, which has no heads
    rotated = head_width(config)
    if rope.get("partial_rotary_factor") is not None:
        rotated = int(rotated * number(rope, "partial_rotary_factor"))
    if rope["rope_type"] == "llama3":
        found = llama3_divisors(rope, rotated)
        rest = count(rope, "divisors") - len(found) if rope.get("divisors") else 0
        return {"rope_freqs.weight": np.pad(found, (0, max(rest, 0)), constant_values=1)}
    return {
        f"rope_factors_{name}.weight": _listed(rope, f"{name}_factor", rotated // 2)
        for name in ("long", "short")
    }


def proportional_divisors(rope: Mapping[str, Any], width: int) -> NDArray[np.float32]:
    """float32 [width / 2]: a leading share of each half of a head is rotated, the others hardly."""
    share = rope.get("partial_rotary_factor")
    part = 1.0 if share is None else number(rope, "partial_rotary_factor")
    factor = number(rope, "factor") if rope.get("factor") is not None else 1.0
    if not 0 <= part <= 1 or not 0 < factor < NOT_ROTATED:
        raise SourceError(
            f"config.json: partial_rotary_factor {part} and factor {factor} of proportional rope "
            "settings make no sense"
        )
    found = np.full(width // 2, NOT_ROTATED, np.float32)
    found[: int(part * width // 2)] = factor
    return found


def llama3_divisors(rope: Mapping[str, Any], rotated: int) -> NDArray[np.float32]:
    """float32 [rotated / 2], in the steps of convert_hf_to_gguf.py.

    Equal to its own but for the last bit of one divisor in some unusual widths, where torch does
    not round the power correctly.
    """
    given = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    named = {**given, "original_max_position_embeddings": 8192, **rope}
    factor, low, high = (number(named, name) for name in given)
    original = number(named, "original_max_position_embeddings")
    base = number(named, "rope_theta")
    if not 0 < low <= high or factor <= 0 or original <= 0 or base <= 0:
        raise SourceError(
            f"config.json: rope scaling of the type llama3 with low_freq_factor {low}, "
            f"high_freq_factor {high}, factor {factor} over {original} and rope_theta {base} "
            "makes no sense"
        )
    one = np.float32(1.0)
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    # Powers in float64, rounded once: the same on every machine.
    powers = np.power(base, exponents.astype(np.float64))
    wavelengths = one / (one / powers.astype(np.float32)) * np.float32(2 * math.pi)
    found = np.ones(len(wavelengths), np.float32)
    for i, length in enumerate(wavelengths):
        if length > np.float32(original / low):
            found[i] = factor
        elif low < high and length >= np.float32(original / high):
            # torch divides a number by a tensor as number * (1 / tensor).
            share = (one / length * np.float32(original) - np.float32(low)) / np.float32(high - low)
            found[i] = one / ((one - share) / np.float32(factor) + share)
    return found


def _listed(rope: Mapping[str, Any], name: str, expected: int) -> NDArray[np.float32]:
    listed = rope.get(name)
    if not isinstance(listed, list) or len(listed) != expected:
        found = f"{len(listed)} numbers" if isinstance(listed, list) else repr(listed)
        raise SettingError(name, f"is {found}, expected {expected} numbers")
    if any(isinstance(x, bool) or not isinstance(x, int | float) for x in listed):
        raise SettingError(name, "holds something that is no number")
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
