"""Whether the quantization_config has the form that the classes of engines read.

    any                   an object with a quant_method, by which it is told apart
    awq, gptq             sym, zero_point, desc_act, lm_head: true or false, and no string
    fp8                   activation_scheme: static or dynamic
    compressed-tensors    keys and values of QuantizationScheme and QuantizationArgs, which engines
                          have from the package of that name; it refuses every other

Sources: compressed-tensors 0.20 (quantization/quant_args, quant_scheme), vLLM 0.33 and SGLang
0.5.23 (quantization/fp8), transformers 5.24 (quantizers/auto).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from qtool.artifacts.stored_config import quantization_config
from qtool.formats import mlx
from qtool.messages.printable import in_json
from qtool.verification.finding import Finding, of_setting
from qtool.verification.subject import Subject

CHECK, TABLE = "quantization-form", "quantization_config"
_SHOWN = 60  # characters of a value
_SWITCHES = ("sym", "zero_point", "desc_act", "lm_head")
SCHEME = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
_PARTS = ("weights", "input_activations", "output_activations")
ARGUMENTS = frozenset({
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic",
    "actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
})  # fmt: skip
# Of the last two vLLM, SGLang and transformers speak by themselves.
ORDERS = ("weight", "static", "group", "dynamic")


def check_form(subject: Subject) -> Iterator[Finding]:
    """quantization-form: what is read of it is what it may be."""
    said = subject.config.get(TABLE)
    if said is not None and not isinstance(said, Mapping):
        yield _wrong(TABLE, said, "an object, without which transformers does not read config.json")
        return
    if said == {}:
        yield Finding(
            "warning", CHECK, TABLE,
            f"config.json has an empty {TABLE}, which transformers refuses: take it out",
            of_setting(TABLE),
        )  # fmt: skip
    found = subject.artifact.found
    if said and found.format not in ("dense", mlx.NAME) and not _has_method(said):
        yield Finding(
            "error", CHECK, "quant_method",
            f"the {TABLE} has no quant_method; transformers refuses it, and vLLM takes the model "
            f"for an unquantized one: put back what it was made with ({found.format} by its "
            "tensors)",
            of_setting("quant_method"),
        )  # fmt: skip
    config = quantization_config(subject.artifact.checkpoint)
    if found.format in ("awq", "gptq"):
        for key in _SWITCHES:
            if isinstance(config.get(key), str):
                yield _wrong(key, config[key], "true or false, and no string")
    key = "activation_scheme"
    known = config.get("quant_method") != "fp8" or config.get(key) in ("static", "dynamic")
    if key in config and not known:
        yield _wrong(key, config[key], "static or dynamic")
    if config.get("quant_method") == "compressed-tensors":
        yield from _compressed(config)


def _has_method(said: Mapping[str, Any]) -> bool:
    """Whether its method is named; ModelOpt has a key of its own for it, and of bitsandbytes older
    files say with how many bits alone."""
    if said.get("load_in_4bit") is True or said.get("load_in_8bit") is True:
        return True
    inner = said.get("quantization")
    parts = (said, inner if isinstance(inner, Mapping) else {})
    return any(part.get(key) for part in parts for key in ("quant_method", "quant_algo"))


def _compressed(config: Mapping[str, Any]) -> Iterator[Finding]:
    groups = config.get("config_groups")
    for name, group in (groups if isinstance(groups, Mapping) else {}).items():
        if not isinstance(group, Mapping):
            continue  # such as the name of a preset
        where = f"config_groups.{name}"
        yield from _others(where, group, SCHEME)
        for part in _PARTS:
            if isinstance(group.get(part), Mapping):
                yield from _arguments(f"{where}.{part}", group[part])
            elif group.get(part) is not None:
                yield _wrong(f"{where}.{part}", group[part], "an object, or null")
    cache = config.get("kv_cache_scheme")
    if isinstance(cache, Mapping):
        yield from _arguments("kv_cache_scheme", cache)
    elif cache is not None:
        yield _wrong("kv_cache_scheme", cache, "an object, or null")


def _arguments(where: str, said: Mapping[str, Any]) -> Iterator[Finding]:
    yield from _others(where, said, ARGUMENTS)
    order, dynamic = said.get("actorder"), said.get("dynamic")
    if not (order is None or isinstance(order, bool) or str(order).lower() in ORDERS):
        yield _wrong(f"{where}.actorder", order, "weight, or null")
    if not (dynamic is None or isinstance(dynamic, bool) or str(dynamic).lower() == "local"):
        yield _wrong(f"{where}.dynamic", dynamic, "true, false or local")


def _others(where: str, said: Mapping[str, Any], known: frozenset[str]) -> Iterator[Finding]:
    for key in said:
        if key not in known:
            yield Finding(
                "error", CHECK, f"{where}.{key}",
                f"the {TABLE} says {where}.{key[:_SHOWN]}, a key that compressed-tensors 0.20 does "
                "not know, so that it refuses all: take it out, unless a later version has it",
                of_setting(f"{where}.{key}"),
            )  # fmt: skip


def _wrong(key: str, value: object, expected: str) -> Finding:
    return Finding(
        "error", CHECK, key,
        f"the {TABLE} says {key} {in_json(value)[:_SHOWN]}; expected {expected}: put back what the "
        "artifact was made with",
        of_setting(key),
    )  # fmt: skip
