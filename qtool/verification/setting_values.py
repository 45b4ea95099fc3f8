"""Values that are of no sense for what a setting is: switches, shares, windows and the like.

    switches       transformers takes true and false alone; vLLM and SGLang read through it
    dropout        a share; nobody drops anything as it answers, some classes refuse another number
    sliding_window below 0 there are no positions: transformers fails at the first token, and vLLM
                   counts blocks by it; 0 vLLM takes for none, and transformers for no position
    rotated part   a share of each head: vLLM would rotate more than there is
    eps            added to a mean of squares: what is large leaves nothing of the numbers
    rope           llama3 blends between two wavelengths, YaRN takes logarithms

Sources: transformers 5.24 (all configuration classes, masking_utils, modeling_rope_utils), vLLM
0.33 (config/model, layers/rotary_embedding, v1/kv_cache_interface).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from qtool.verification.finding import Finding, Severity, of_setting
from qtool.verification.stored_biases import READ, READ_MLP
from qtool.verification.unlike_settings import is_number

CHECK = "model-settings"
_SHOWN = 60  # characters of a value
_OWN = "put back the model's own"
TIED = "tie_word_embeddings"
# What classes have them (None: all), but for null in the types below.
PLAIN_SWITCHES = {"use_cache": None, TIED: None, "attention_bias": READ, "mlp_bias": READ_MLP}
MAY_BE_NULL: Mapping[str, tuple[str, ...]] = {
    "use_cache": ("ernie4_5", "falcon_h1", "paddleocr_vl_text"),
    TIED: ("gemma3", "gemma3n", "perception_lm", "t5gemma2_encoder"),
    "attention_bias": ("chameleon", "gemma4_vision"),
}
# What no class has a string for, but for these.
SWITCHES = re.compile(r"(?:use|tie|is|has|add|do)_\w+|\w+_bias|qkv_bias|norm_topk_prob")
NAMED_SWITCHES = ("use_bidirectional_attention",)
_MAYBE_SWITCHES = re.compile(r"(?:norm|scale)_\w+|\w+_norm")
_SHARES = re.compile(r"(?:.*_)?(?:dropout|pdrop|dropout_prob|dropout_rate)")
_ROTATED = ("partial_rotary_factor", "rotary_pct")
_OF_YARN = ("beta_fast", "beta_slow", "attention_factor")
_SAME_ROPES = (("su", "longrope"), ("mrope", "default"))  # type, rope_type
_EPSILON = re.compile(r"(?:rms_norm|layer_norm|norm)_(?:eps|epsilon)")
_LARGE_EPSILON = 0.1  # published ones are from 1e-12 to 1e-3


def wrong(key: str, value: object, expected: str, severity: Severity = "error") -> Finding:
    """The finding that a setting has another value than expected."""
    shown = "null" if value is None else repr(value)[:_SHOWN]
    return Finding(
        severity, CHECK, key, f"config.json says {key} {shown}; expected {expected}: {_OWN}",
        of_setting(key),
    )  # fmt: skip


def check_switches(config: Mapping[str, Any], known: bool, decoder: bool) -> Iterator[Finding]:
    """Settings that are true or false. known: of a class whose code is known. decoder: of the
    language model itself; those around it say little, of which only strings are looked at."""
    for key, value in config.items():
        if not (decoder or isinstance(value, str)):
            continue
        severity = _no_switch(key, value, str(config.get("model_type")), known)
        if severity is not None:
            what = {str: "string", type(None): "null"}.get(type(value), "number")
            yield wrong(key, value, f"true or false, and no {what}", severity)


def _no_switch(key: str, value: object, kind: str, known: bool) -> Severity | None:
    if isinstance(value, str):
        read = SWITCHES.fullmatch(key) is not None and key not in NAMED_SWITCHES
        if value.lower() in ("true", "false"):
            read = read or _MAYBE_SWITCHES.fullmatch(key) is not None
            return "error" if known and read else "warning"
        if read and (known or key in PLAIN_SWITCHES):
            return "error" if known else "warning"
        return None
    if key not in PLAIN_SWITCHES or not (value is None or is_number(value)):
        return None
    types = PLAIN_SWITCHES[key]
    if known and (types is None or kind.removesuffix("_text") in types):
        return None if value is None and kind in MAY_BE_NULL.get(key, ()) else "error"
    # All engines take null for false, as far as they have it, and few who wrote it meant that.
    return None if value is None and key != TIED else "warning"


def check_bounds(text: Mapping[str, Any], known: bool) -> Iterator[Finding]:
    """Numbers of a decoder's settings beyond what they can be."""
    sure: Severity = "error" if known else "warning"
    for key, value in text.items():
        if not is_number(value):
            continue
        if _SHARES.fullmatch(key) and not 0 <= value <= 1:
            yield wrong(key, value, "a share from 0 to 1", "warning")
        elif key in _ROTATED and not 0 <= value <= 1:
            yield wrong(key, value, "a share of each head from 0 to 1", sure)
        elif _EPSILON.fullmatch(key) and value >= _LARGE_EPSILON and type(value) is float:
            yield wrong(key, value, "a small fraction, beside which numbers are not lost", sure)
    yield from _window(text, sure)
    if known and text.get("is_encoder_decoder") is True:
        yield wrong("is_encoder_decoder", True, "false of a decoder, which engines run as such")


# Classes that have one where use_sliding_window says so alone.
_WITHOUT_WINDOW = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen2_vl_text", "qwen2_5_vl_text")


def _window(text: Mapping[str, Any], sure: Severity) -> Iterator[Finding]:
    key = "sliding_window"
    value = text.get(key)
    if not is_number(value) or value > 0:
        return
    if text.get("use_sliding_window", text.get("model_type") not in _WITHOUT_WINDOW) is False:
        return
    if value < 0:
        yield wrong(key, value, "a number of tokens, or null", sure)
    elif text.get("model_type") != "llama":  # which does not look at it
        expected = "null where there is no window, for which vLLM alone takes 0"
        yield wrong(key, value, expected, "warning")


def check_rope_bounds(where: str, part: Mapping[str, Any], known: bool) -> Iterator[Finding]:
    """Of one kind of rotary embedding."""
    sure: Severity = "error" if known else "warning"
    kind = part.get("rope_type", part.get("type"))
    for key in _ROTATED[:1]:
        if is_number(part.get(key)) and not 0 <= part[key] <= 1:
            yield wrong(f"{where}.{key}", part[key], "a share of each head from 0 to 1", sure)
    for key in _OF_YARN if kind == "yarn" else ():
        value = part.get(key)
        if value is not None and not (is_number(value) and value > 0):
            yield wrong(f"{where}.{key}", value, "a positive number", sure)
    named = part.get("type")
    if None not in (named, kind) and named != kind and (named, kind) not in _SAME_ROPES:
        expected = f"no other type than its rope_type {kind!r}, as vLLM refuses two"
        yield wrong(f"{where}.type", named, expected, sure)
    key = "original_max_position_embeddings"
    if kind in ("yarn", "llama3", "longrope") and part.get(key) is not None:
        value = part[key]
        if not is_number(value) or not value >= 1:
            yield wrong(f"{where}.{key}", value, "an integer from 1", sure)
    low, high = part.get("low_freq_factor"), part.get("high_freq_factor")
    if kind == "llama3" and is_number(low) and is_number(high) and low > high:
        expected = f"no more than its high_freq_factor {high!r}"
        yield wrong(f"{where}.low_freq_factor", low, expected, "warning")
