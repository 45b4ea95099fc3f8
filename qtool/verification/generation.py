"""generation_config.json: what engines draw with where a request says nothing else.

    temperature         from 0 on; vLLM takes up to 2
    top_p, min_p        above 0 and from 0, to 1
    top_k               -1 or 0 for all, else from 1
    repetition_penalty  above 0
    max_new_tokens      from 1
    do_sample           true or false

vLLM and SGLang refuse each request that takes another value, and transformers fails as it draws.
Sources: vLLM 0.33 (config/model, sampling_params), SGLang 0.5.23 (configs/model_config, sampling/
sampling_params), transformers 5.24 (generation).
"""

from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any

from qtool.errors import QtoolError
from qtool.gguf.tokenizer.hf_json import read_object
from qtool.verification.finding import Finding, Severity, of_setting
from qtool.verification.subject import Subject
from qtool.verification.unlike_settings import is_number

CHECK, FILE = "generation", "generation_config.json"
_SHOWN = 60  # characters of a value
_HOTTEST = 2


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# What each may be, in code and in words; null is not said.
_ALLOWED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda v: is_number(v) and 0 <= v < inf, "a number from 0 on"),
    "top_p": (lambda v: is_number(v) and 0 < v <= 1, "a share above 0, up to 1"),
    "min_p": (lambda v: is_number(v) and 0 <= v <= 1, "a share from 0 to 1"),
    "top_k": (lambda v: _is_whole(v, -1), "an integer, 0 for all tokens"),
    "repetition_penalty": (
        lambda v: is_number(v) and 0 < v < inf, "a number above 0, 1 for none",
    ),
    "max_new_tokens": (lambda v: _is_whole(v, 1), "an integer from 1"),
    "do_sample": (lambda v: isinstance(v, bool), "true or false"),
}  # fmt: skip


def check_generation(subject: Subject) -> Iterator[Finding]:
    """generation: numbers that engines draw with."""
    try:
        said = read_object(subject.artifact.checkpoint.folder / FILE)
    except QtoolError:  # of which the check of the tokenizer tells
        return
    for key, (allowed, expected) in _ALLOWED.items():
        value = said.get(key)
        if value is not None and not allowed(value):
            yield _wrong(key, value, expected)
    value = said.get("temperature")
    if is_number(value) and _HOTTEST < value < inf:
        expected = f"a number up to {_HOTTEST}, as vLLM refuses any above"
        yield _wrong("temperature", value, expected, "warning")
    elif value == 0 and said.get("do_sample") is True:
        expected = "a number above 0 where do_sample is true, as transformers fails at 0"
        yield _wrong("temperature", value, expected, "warning")
    value = said.get("top_k")
    if value == -1 and said.get("do_sample") is True:
        expected = "0 for all tokens where do_sample is true, as transformers fails at -1"
        yield _wrong("top_k", value, expected, "warning")


def _wrong(key: str, value: object, expected: str, severity: Severity = "error") -> Finding:
    return Finding(
        severity, CHECK, FILE,
        f"{FILE} says {key} {repr(value)[:_SHOWN]}; expected {expected}: put back the model's own",
        of_setting(f"{FILE}.{key}"),
    )  # fmt: skip
