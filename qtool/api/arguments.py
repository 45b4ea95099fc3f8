"""What a function is given, by the types that its signature names: told before any work."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Any

# By the words of an annotation, what a value has to be, and how that is said. A bool is a whole
# number to Python, and never what was meant by one.
_KINDS: dict[str, tuple[type, str]] = {
    "int": (Integral, "an integer"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
    "str": (str, "a text"),
    "Path": (os.PathLike, "a path"),
    "None": (type(None), "None"),
}
_LIST = "Sequence["


def checked(
    function: Callable[..., Any], given: tuple[Any, ...], more: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, integers of numpy as Python's; UsageError for one that is
    nothing of what its annotation names. Annotations of other types are left alone, and arguments
    that the function has not to Python."""
    from qtool.errors import UsageError

    signature = inspect.signature(function)
    try:
        bound = signature.bind(*given, **more)
    except TypeError:
        return given, more
    for name, value in bound.arguments.items():
        wanted = signature.parameters[name].annotation.split(" | ")
        if not all(one in _KINDS or one.startswith(_LIST) for one in wanted):
            continue
        if not any(_is(value, one) for one in wanted):
            said = [_said(one) for one in wanted if one != "None"]
            raise UsageError(f"{name}: expected {' or '.join(said)}, found {_shown(value)}")
        if isinstance(value, Integral) and not isinstance(value, bool):
            bound.arguments[name] = int(value)
    return bound.args, bound.kwargs


def _is(value: object, wanted: str) -> bool:
    if wanted.startswith(_LIST):
        if isinstance(value, str):  # one text stands for a list of it
            return True
        if not isinstance(value, Collection) or isinstance(value, bytes | Mapping):
            return False
        return all(any(_is(one, item) for item in _items(wanted)) for one in value)
    if isinstance(value, bool):
        return wanted == "bool"
    return isinstance(value, _KINDS[wanted][0])


def _items(wanted: str) -> list[str]:
    return wanted.removeprefix(_LIST).removesuffix("]").split(" | ")


def _said(wanted: str) -> str:
    if wanted.startswith(_LIST):
        return "a list of " + " or ".join(
            _KINDS[one][1].removeprefix("a ") + "s" for one in _items(wanted)
        )
    return _KINDS[wanted][1]


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."
