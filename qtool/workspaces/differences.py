"""What tells one run from another, as a person would say it: the fact, before and now.

The facts are those of a journal, or of a matrix: a recipe with all its keys, files by what
qtool.workspaces.identity says of them, digests, versions. The ones of before come from a file,
which may say anything.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from qtool.errors import ResumeError
from qtool.workspaces.program import CODE, VERSION

RECIPE, SHARDS, LAYOUT = "recipe", "size of a shard", "layout of its files"
DEVICE = "device"  # cpu, or the name of a GPU
HEADER = "header of its file"
PRECISION = "precision of matmuls"  # over the calibration text, as they are made here
_OPTIONS = {f"calibration.{key}": f"--{key}" for key in ("samples", "length", "seed")}
_TEXT = "calibration.source"
_SHOWN = 4  # differences in a sentence
_LONG = 60  # characters of a value


class AnotherRun(ResumeError):
    """What is kept is of another command; its sentence says which."""


def told(others: Mapping[str, tuple[Any, Any]]) -> str:
    """What differs, by the facts that do (before, now), without those that follow from others; and
    what would go on."""
    follow = {LAYOUT} if len(others) > 1 else set[str]()
    follow |= {CODE} if VERSION in others else set[str]()
    others = {name: pair for name, pair in others.items() if name not in follow}
    said = [one for name, pair in others.items() for one in differences(name, *pair)]
    more = f" and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    return f"{', '.join(said[:_SHOWN])}{more}; {_way_on(others)}"


def differences(name: str, before: Any, now: Any) -> Iterator[str]:
    """`FACT was X, is Y`, one for each part that differs."""
    if name == CODE:
        yield "qtool itself has changed since, though not its version"
        return
    if isinstance(before, dict) and isinstance(now, dict):
        if name == RECIPE and before.get("name") != now.get("name"):
            yield _was(name, before.get("name"), now.get("name"))
            return
        for key in [*now, *(key for key in before if key not in now)]:
            if before.get(key) != now.get(key):
                inner = key if name in (RECIPE, "") else f"{name}: {key}"
                if isinstance(before.get(key), dict) and isinstance(now.get(key), dict):
                    for one, found in _leaves(key, before[key], now[key]):
                        yield _was(one if name == RECIPE else f"{name}: {one}", *found)
                else:
                    yield _was(inner, before.get(key), now.get(key))
    elif _is_file(now):
        yield _file(name, before, now)
    elif isinstance(now, list) and isinstance(before, list):
        yield from _source(name, before, now)
    else:
        yield _was(name, before, now)


def _leaves(path: str, before: Any, now: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The innermost keys that differ, joined by dots."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*now, *(key for key in before if key not in now)]:
            yield from _leaves(f"{path}.{key}", before.get(key), now.get(key))
    elif before != now:
        yield path, (before, now)


def _source(name: str, before: list[Any], now: list[Any]) -> Iterator[str]:
    """A model: its config, what it was made from, and its files."""
    known = {one[0]: one for one in before if _is_file(one)}
    found = {one[0]: one for one in now if _is_file(one)}
    if "config.json" in known.keys() ^ found.keys() and (_has_config(before) or _has_config(now)):
        # A GGUF file's run has config.json among the files, others its content: not to be compared.
        shared = [key for key in found if key in known and known[key] != found[key]]
        yield from (f"{name}: {_file(key, known[key], found[key])}" for key in shared)
        return
    said = [_file(key, known.get(key), one) for key, one in found.items() if known.get(key) != one]
    said += [f"{key} is gone" for key in known if key not in found]
    for one, other in zip(before, now, strict=False):
        if isinstance(one, dict) and isinstance(other, dict) and one != other:
            said += [_was(path, *pair) for path, pair in _leaves("config.json", one, other)]
    yield from (f"{name}: {one}" for one in said or ["is another one"])


def _has_config(facts: list[Any]) -> bool:
    return any(isinstance(one, dict) for one in facts)


def _is_file(fact: Any) -> bool:
    """Name, size, time and a digest of some content."""
    return isinstance(fact, list) and len(fact) == 4 and isinstance(fact[0], str)


def _file(name: str, before: Any, now: list[Any]) -> str:
    if not _is_file(before):
        return f"{name} is new"
    if before[0] != now[0]:
        return _was(name, before[0], now[0])
    if before[1] != now[1]:
        return f"{name} was of {_value(before[1])} bytes, is of {_value(now[1])}"
    if before[3] != now[3]:
        return f"{name} has other bytes"
    return f"{name} was written to since"


def _was(name: str, before: Any, now: Any) -> str:
    if before is None and now is not None:
        return f"{name} was not set, is {_value(now)}"
    if now is None:
        return f"{name} was {_value(before)}, is not set"
    if _is_digest(before) or _is_digest(now):
        return f"{name} has other content"
    return f"{name} was {_value(before)}, is {_value(now)}"


def _is_digest(value: Any) -> bool:
    bare = value.removeprefix("sha256:") if isinstance(value, str) else ""
    return len(bare) == 64 and set(bare) <= set("0123456789abcdef")


def _value(value: Any) -> str:
    try:
        said = value if isinstance(value, str) else json.dumps(value)
    except RecursionError:
        said = "nested too deeply"
    return said if len(said) <= _LONG else f"{said[:_LONG]}..."


def _way_on(others: Mapping[str, tuple[Any, Any]]) -> str:
    """The options with which this command is the earlier one again, where that can be told."""
    again = "give its command again to finish it"
    options = []
    for name, (before, now) in others.items():
        if name == SHARDS and type(before) is int:
            options.append(f"--max-shard-size {before}")
        elif name == DEVICE:
            options.append(f"--device {'cpu' if before == 'cpu' else 'cuda'}")
        elif name == RECIPE and isinstance(before, dict):
            if before.get("name") != now.get("name"):
                return f"{again} (--recipe {shlex.quote(_value(before.get('name')))})"
            for key in now:
                for path, (was, _) in _leaves(key, before.get(key), now[key]):
                    option = _option(path, was)
                    if option is None:
                        return again
                    options.append(option)
        elif name == PRECISION:
            there = "with" if before == "bfloat16" else "without"
            return f"on a CPU {there} AMX, as where it was begun, it can be finished"
        else:
            return "with that as it was it can be finished"
    if not 0 < len(options) <= _SHOWN:
        return again
    return f"this command with {' '.join(options)} goes on with it"


def _option(path: str, was: Any) -> str | None:
    """What sets a key of the recipe to what it was."""
    if type(was) not in (int, float, str, bool) or _value(was).endswith("..."):
        return None
    if path == _TEXT:
        return f"--calibration {shlex.quote(_value(was))}"
    if path in _OPTIONS:
        return f"{_OPTIONS[path]} {_value(was)}"
    return f"--set {shlex.quote(f'{path}={_value(was)}')}"
