"""Settings that a model computes with, in the forms and by the names that engines read.

transformers checks the types of a config.json as it reads it, vLLM and SGLang read it through
transformers, and each of them looks up activations and kinds of rotary embedding by name: what is
of another type or name is refused, or fails before the first token. Of a class that is not known
here, whose code may have more of them, an unknown name is a warning.

Sources: transformers 5.24 (configuration_utils, modeling_rope_utils, activations, and the types of
all its configuration classes), vLLM 0.33 (layers/rotary_embedding, layers/activation,
transformers_utils/config, config/model, models/granite), SGLang 0.5.23 (layers/rotary_embedding,
models/granite, managers/tokenizer_manager).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from qtool.checkpoints.structure import text_config
from qtool.gguf.architectures import TABLE
from qtool.verification.finding import Finding, Severity, of_setting
from qtool.verification.setting_values import CHECK as CHECK
from qtool.verification.setting_values import (
    check_bounds,
    check_rope_bounds,
    check_switches,
)
from qtool.verification.setting_values import wrong as _wrong
from qtool.verification.settings_form import class_of
from qtool.verification.subject import Subject
from qtool.verification.unlike_settings import is_number

_OWN = "put back the model's own"
# transformers' ACT2CLS, and vLLM's for gates alone.
ACTIVATIONS = frozenset({
    "gelu", "gelu_10", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh",
    "gelu_python_tanh", "gelu_accurate", "hardswish", "laplace", "leaky_relu", "linear", "mish",
    "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh",
    "prelu", "xielu", "geglu", "swigluoai",
})  # fmt: skip
_ACTIVATED = ("hidden_act", "hidden_activation", "activation_function")
# What each kind of rotary embedding cannot do without: transformers' ROPE_INIT_FUNCTIONS, and what
# single classes there, vLLM and SGLang have beside it.
_BY_A_FACTOR = ("factor",)
ROPES: Mapping[str, tuple[str, ...]] = {
    "default": (), "linear": _BY_A_FACTOR, "dynamic": _BY_A_FACTOR, "yarn": _BY_A_FACTOR,
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (), "axial": (),
    "su": ("short_factor", "long_factor"), "mrope": (), "xdrope": (), "ntk_alpha": (), "ntk": (),
    "deepseek_yarn": (), "deepseek_llama_scaling": (), "mllama4": (), "bailing_mrope": (),
    "openpangu": (), "telechat3-yarn": (),
}  # fmt: skip
_NUMERIC = ("factor", "low_freq_factor", "high_freq_factor")
_BASES = ("rope_local_base_freq", "rotary_emb_base")  # a theta by other names
_LARGEST = 3.4e38  # of float32, in which angles are computed
# Classes for which vLLM and SGLang take a theta of 0 for no rotation at all.
_STILL_AT_0 = ("Granite", "Muse")
# Of torch: what a model may be in, and what else there is, which no model is.
DTYPES = frozenset({
    "bfloat16", "float16", "half", "float32", "float", "float64", "double", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
})  # fmt: skip
_WHOLE_DTYPES = frozenset({
    "bool", "int8", "uint8", "int16", "int32", "int64", "short", "int", "long",
})  # fmt: skip
# No class takes a string for these.
_NUMBERS = re.compile(
    r"(?:.*_)?(?:eps|epsilon|dropout|softcapping|multiplier|initializer_range|base_freq)"
    r"|partial_rotary_factor|rotary_pct|routed_scaling_factor|max_position_embeddings"
    r"|head_dim|sliding_window|intermediate_size|(?:bos|eos|pad)_token_id"
)
_EPSILON = re.compile(r"(?:rms_norm|layer_norm|norm)_(?:eps|epsilon)")
_MAY_LACK_EPS = ("cohere2_moe",)  # whose class takes null


def check_model_settings(subject: Subject) -> Iterator[Finding]:
    """model-settings: numbers are numbers, and names are of something."""
    text = text_config(subject.config)
    known = known_class(subject.config)
    yield from _other_part(subject.config, known)
    yield from _numbers(text, known)
    yield from _activations(text, known)
    yield from _positions(text, known)
    yield from _rotary(text, known, class_of(subject.config).startswith(_STILL_AT_0))
    yield from check_bounds(text, known)
    for part in (text,) if text is subject.config else (subject.config, text):
        yield from check_switches(part, known, part is text)
        yield from _dtypes(part)


def known_class(config: Mapping[str, Any]) -> bool:
    """Whether its class is one whose code is known: transformers' own, in the table of GGUF."""
    row = TABLE.get(class_of(config))
    return row is not None and not row.remote and "auto_map" not in config


def _other_part(config: Mapping[str, Any], known: bool) -> Iterator[Finding]:
    """transformers hands it on in place of the whole, and vLLM and SGLang look there for heads."""
    part = config.get("text_config")
    if not isinstance(part, Mapping) or "num_attention_heads" not in config:
        return
    alone = known and class_of(config).endswith("ForCausalLM")
    if part == {} or alone:
        yield Finding(
            "error" if alone else "warning", CHECK, "text_config",
            f"config.json has {'a' if part else 'an empty'} text_config, where engines look for "
            "the settings of the language model, which stand around it: take it out",
            of_setting("text_config"),
        )  # fmt: skip


def _numbers(text: Mapping[str, Any], known: bool) -> Iterator[Finding]:
    for key, value in text.items():
        if not isinstance(value, str):
            continue
        if _NUMBERS.fullmatch(key):
            yield _wrong(key, value, "a number", "error" if known else "warning")
    for key, value in text.items():
        if _EPSILON.fullmatch(key) and is_number(value):
            if known and type(value) is int:
                yield _wrong(key, value, "a small fraction, as transformers takes no integer")
            elif not value >= 0:
                yield _wrong(key, value, "a number from 0 on", "error" if known else "warning")
    lacks = "rms_norm_eps" in text and text["rms_norm_eps"] is None
    if lacks and known and text.get("model_type") not in _MAY_LACK_EPS:
        yield _wrong("rms_norm_eps", None, "a number")


def _activations(text: Mapping[str, Any], known: bool) -> Iterator[Finding]:
    for key in _ACTIVATED:
        value = text.get(key)
        if value is None:
            continue
        if not isinstance(value, str):
            yield _wrong(key, value, "the name of an activation")
        elif value not in ACTIVATIONS:
            expected = "an activation that engines know, such as silu or gelu_pytorch_tanh"
            yield _wrong(key, value, expected, "error" if known else "warning")


def _positions(text: Mapping[str, Any], known: bool) -> Iterator[Finding]:
    """vLLM refuses a model of no positions, SGLang every text, and transformers what is no int."""
    key = "max_position_embeddings"
    value = text.get(key)
    if is_number(value) and (not value >= 1 or (known and not isinstance(value, int))):
        yield _wrong(key, value, "an integer from 1", "error" if known else "warning")


def _rotary(text: Mapping[str, Any], known: bool, still_at_0: bool) -> Iterator[Finding]:
    key = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    said = text.get(key) or {}
    if not isinstance(said, Mapping):
        yield _wrong(key, said, "an object")
        return
    # One for all blocks, or one for each kind of them.
    inner = {f"{key}.{kind}": one for kind, one in said.items() if isinstance(one, Mapping)}
    nested = all(one is None or isinstance(one, Mapping) for one in said.values())
    parts = inner if inner and nested else {key: said}
    rotary = text.get("position_embedding_type") != "nope"
    for where, part in parts.items():
        yield from _rotary_kind(where, part, known)
        if "rope_theta" in part and (rotary or part["rope_theta"] is not None):
            yield from _theta(f"{where}.rope_theta", part["rope_theta"], known, still_at_0)
    inside = all("rope_theta" in part for part in parts.values())
    if "rope_theta" in text and not inside and (rotary or text["rope_theta"] is not None):
        yield from _theta("rope_theta", text["rope_theta"], known, still_at_0)
    for key in _BASES:
        if is_number(text.get(key)):
            yield from _theta(key, text[key], known, still_at_0)


def _theta(key: str, value: object, known: bool, still_at_0: bool) -> Iterator[Finding]:
    """What is below 0 has no powers between whole ones, 0 no inverse, and what float32 does not
    hold no other power; up to 1 later pairs turn no slower, which no model was trained with."""
    each = value if isinstance(value, list) else [value]  # one for each block in some
    if not all(map(is_number, each)):
        sure = known or value is not None
        yield _wrong(key, value, "a number", "error" if sure else "warning")
    elif any(is_number(one) and not 0 <= one <= _LARGEST for one in each):
        yield _wrong(key, value, "a positive number", "error" if known else "warning")
    elif value == 0 and known and not still_at_0:
        yield _wrong(key, value, "a positive number")
    elif any(is_number(one) and 0 < one <= 1 for one in each):
        yield _wrong(key, value, "a number above 1, such as 10000", "warning")


def _rotary_kind(where: str, part: Mapping[str, Any], known: bool) -> Iterator[Finding]:
    name = "rope_type" if "rope_type" in part else "type"
    kind = part.get(name, "default")
    if not isinstance(kind, str):
        yield _wrong(f"{where}.{name}", kind, "the name of a kind of rotary embedding")
    elif kind not in ROPES:
        listed = "default, linear, dynamic, yarn, longrope or llama3"
        expected = f"a kind that engines know, such as {listed}"
        yield _wrong(f"{where}.{name}", kind, expected, "error" if known else "warning")
    else:
        for key in ROPES[kind]:
            if key not in part and not (kind == "dynamic" and "alpha" in part):
                yield Finding(
                    "error", CHECK, f"{where}.{key}",
                    f"config.json has a {where} of {name} {kind} without {key}, which no engine "
                    f"computes: {_OWN}",
                    of_setting(f"{where}.{key}"),
                )  # fmt: skip
    yield from check_rope_bounds(where, part, known)
    for key in _NUMERIC:
        value = part.get(key)
        if key in part and not is_number(value):
            yield _wrong(f"{where}.{key}", value, "a number")
        elif is_number(value) and key in ROPES.get(str(kind), ()) and not value > 0:
            severity: Severity = "error" if known else "warning"
            yield _wrong(f"{where}.{key}", value, "a positive number", severity)


def _dtypes(config: Mapping[str, Any]) -> Iterator[Finding]:
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.get(key)
    name = value if isinstance(value, str) else ""
    if value is None or isinstance(value, Mapping) or name in DTYPES:
        return
    whole = name in _WHOLE_DTYPES
    yield _wrong(key, value, "a dtype of floats, such as bfloat16", "warning" if whole else "error")
