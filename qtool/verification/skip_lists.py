"""Lists of modules in a quantization_config: that they are lists, of expressions that compile.

A string is read letter by letter where a list is expected, so that each layer whose name has one
of them is left out, and an expression that does not compile ends loading: both in vLLM, SGLang and
transformers. Sources: vLLM 0.33 (quant_utils, gptq_utils, compressed_tensors/utils), transformers
5.24 (quantizers_utils), compressed-tensors 0.20 (QuantizationConfig, utils/match).
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from qtool.formats.auto_round import is_expression
from qtool.verification.finding import Finding, of_setting

CHECK = "dense-list"
LISTS = (
    "modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules",
    "llm_int8_skip_modules",
)  # fmt: skip
GROUPS = "config_groups"
_SHOWN = 60  # characters of a value
_LONGEST = 4000  # characters of an expression that is compiled
_MARK = re.compile(r"^(?:[-+]:|re:)")
# What the packages `regex`, with which vLLM compiles, and PCRE have beside Python's.
_MORE = re.compile(r"\\[pPXKR]|\(\?(?:<[=!]|[|R&0-9]|[a-z]*-)|\[\[:")


def malformed(config: Mapping[str, Any]) -> Iterator[Finding]:
    """dense-list: what no engine reads as a list of names and expressions."""
    for key, value in _no_lists(config):
        yield Finding(
            "error", CHECK, key,
            f"the quantization_config says {key} {str(value)[:_SHOWN]!r}; expected a list of "
            "names, as engines read a string letter by letter: write it as a list",
            of_setting(setting(key)),
        )  # fmt: skip
    for key, expression in _expressions(config):
        if (why := _refused(expression)) is not None:
            more = _MORE.search(expression) is not None
            yield Finding(
                "warning" if more else "error", CHECK, key,
                f"the quantization_config has the expression {expression[:_SHOWN]!r} in {key}, "
                f"which Python does not compile ({why}), so that {'some ' * more}engines end with "
                "an error: correct it",
            )  # fmt: skip


def setting(key: str) -> str:
    """What findings about a list are about; the targets of all groups are one."""
    return f"quantization_config.{key.partition('.')[0]}"


def unread(config: Mapping[str, Any]) -> frozenset[str]:
    """The settings that no engine reads as lists."""
    return frozenset(setting(key) for key, _ in _no_lists(config))


def _lists(config: Mapping[str, Any]) -> dict[str, object]:
    table = config.get(GROUPS)
    groups = table.items() if isinstance(table, Mapping) else ()
    targets = {
        f"{GROUPS}.{name}.targets": group.get("targets")
        for name, group in groups
        if isinstance(group, Mapping)
    }
    return {key: config.get(key) for key in LISTS} | targets


def _no_lists(config: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """What stands where a list does, and is none of strings; by its key."""
    for key, value in _lists(config).items():
        is_list = isinstance(value, list) and all(isinstance(one, str) for one in value)
        if value is not None and not is_list:
            yield key, value


def _expressions(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is compiled, without its mark, and the key that it stands in."""
    for key, value in _lists(config).items():
        for one in value if isinstance(value, list) else ():
            if isinstance(one, str) and one.startswith("re:"):
                yield key, _MARK.sub("", one, count=1)
    for key, wanted in (("dynamic", str), ("extra_config", is_expression)):
        table = config.get(key)
        for one in table if isinstance(table, Mapping) else ():
            if wanted(one):
                yield key, _MARK.sub("", one, count=1)


def _refused(expression: str) -> str | None:
    """Why Python cannot compile an expression; None where it can, or is not asked."""
    if len(expression) > _LONGEST:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(expression)
    except re.error as error:
        return str(error)
    except (OverflowError, RecursionError, MemoryError):
        return None
    return None
