"""Sentences of errors, notes and warnings, which speak of options, in the words of who calls a
function.

    --max-ram 2x: no size   ->  max_ram="2x": no size
    choose another -o       ->  choose another out
    give --replace          ->  give replace=True
    --set weights.bits=3    ->  changes=["weights.bits=3"]
    this command            ->  this call

Every message is written once, for the command line, which most people use; here is the one place
where it is told otherwise. An option counts that is an argument of the function called; others are
of engines (`--dtype`), or of a command that is named whole, `qtool calibrate ...`, and stay.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from qtool.api.arguments import checked
from qtool.errors import QtoolError

Given = ParamSpec("Given")
Made = TypeVar("Made")

Words = Callable[[str], str]

# Of what functions give: sentences, and what has some in it.
_SAYING = frozenset({"warnings", "notes", "findings", "message", "plan", "failed"})
_NAMES = {"o": "out", "set": "changes"}
_COMMANDS = re.compile(r"(`qtool [^`]*`|\(qtool [^)]*\))")
# A value: quoted, a key with a list or a table, a word with a digit, a dot or a slash in it, or one
# with nothing after it.
_TABLE = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_LISTED = rf"[\w.]+=(?:{_TABLE}|\[(?:[^][{{}}]|{_TABLE}|\[[^][]*\])*\])"
_OPTION = re.compile(
    r"(?<![^\s(`'\"])--?(?P<name>[a-z][a-z-]*)"
    r"(?: (?!\()(?P<value>'[^']*'|\"[^\"]*\"|" + _LISTED + "|"
    r"[^\s`'\",;:)]*[\d./=][^\s`'\",;:)]*(?<!\.)"
    r"|[\w-]+(?=[:;,)`]|$)))?(?![\w-])"
)
_COMMAND = re.compile(r"\b(this|that|same|another|its) command\b")
_GOES_ON = ("out", "takes")  # words of a sentence, where no value of an option stands
_BARE = re.compile(r"-?\d+(\.\d+)?|[A-Z_]+")  # no text: a number, or what stands for one


def for_python(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """The function, which speaks of its arguments, and takes those of the types that it names."""

    @functools.wraps(function)
    def called(*given: Given.args, **more: Given.kwargs) -> Made:
        positional, named = checked(function, given, more)
        parameters = inspect.signature(function).parameters
        flags = {name: isinstance(one.default, bool) for name, one in parameters.items()}
        words = functools.partial(told, arguments=flags)
        if "progress" in parameters and named.get("progress") is None:
            from qtool.messages.progress import Progress

            log = named.get("log_file")
            quiet = named.get("quiet", parameters["quiet"].default)
            named["progress"] = Progress(quiet, None if log is None else Path(log), words)
        try:
            made = function(*positional, **named)
        except QtoolError as error:
            _retell(error, words)
            raise
        return cast(Made, retold(made, words))

    return called


def _retell(error: QtoolError, words: Words) -> None:
    error.args = (words(str(error)),)
    notes = getattr(error, "__notes__", [])
    notes[:] = [words(note) for note in notes]


def retold(made: Any, words: Words) -> Any:
    """What was made, with its warnings, notes and findings in other words."""
    if not is_dataclass(made) or isinstance(made, type):
        return made
    anew: dict[str, Any] = {}
    for name in (field.name for field in fields(made) if field.name in _SAYING):
        value = getattr(made, name)
        if name == "message":
            anew[name] = words(value)
        elif name == "failed":
            for error in value.values():
                _retell(error, words)
        elif isinstance(value, list | tuple):
            each = [words(one) if isinstance(one, str) else retold(one, words) for one in value]
            anew[name] = type(value)(each)
        else:
            anew[name] = retold(value, words)
    return replace(made, **anew) if anew else made


def told(text: str, arguments: Mapping[str, bool]) -> str:
    """A sentence in the words of Python. arguments: by name, whether it is true or false."""

    def option(found: re.Match[str]) -> str:
        name = found["name"].replace("-", "_")
        name, value = _NAMES.get(name, name), found["value"]
        if name not in arguments:
            return found[0]
        after = "" if value is None else f" {value}"
        if arguments[name]:
            return f"{name}=True{after}"
        if value is None or (found[0].startswith("--") and value in _GOES_ON):
            return f"{name}{after}"
        bare = value[1:-1] if value[0] in "'\"" else value
        if name == "changes":
            return (
                f"changes=[{json.dumps(bare, ensure_ascii=False)}]"
                if "=" in bare
                else f"changes: {bare}"
            )
        return f"{name}={bare}" if _BARE.fullmatch(value) else f'{name}="{bare}"'

    parts = _COMMANDS.split(text)
    for place in range(0, len(parts), 2):
        said = _COMMAND.sub(r"\1 call", _OPTION.sub(option, parts[place]))
        parts[place] = said.replace('"] changes=["', '", "')
    return "".join(parts)
