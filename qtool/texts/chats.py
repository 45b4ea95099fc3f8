"""Chats as a model reads them: rendered by its own chat template.

    {"messages": [{"role": "user", "content": TEXT}, ...]}
    {"conversations": [{"from": "human", "value": TEXT}, ...]}     ShareGPT; and `system`: a string,
                       which comes first where no message has that role
    {"prompt": [...], "completion": [...]}                         messages of both, as TRL has them
    TEXT: a string, or a list of {"type": "text", "text": "..."}; the template gets what it is
    beside them, if any: `tools` and `documents`, a list of objects or JSON of one in a string;
                         `chat_template_kwargs`, an object of what else the template is to read

A template is a Jinja program that transformers runs in a sandbox. Source: apply_chat_template() of
transformers, whose ids these are. Only today's date would be another one tomorrow: a template that
writes it gets one fixed day, so that the same chats are always the same tokens.
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from qtool.errors import SourceError, UnsupportedError

LISTS = ("messages", "conversations")
PAIR = ("prompt", "completion")  # TRL's, both lists of messages, or both texts
COLUMNS = (*LISTS, "system", "tools", "documents", "chat_template_kwargs")  # that records may have
DAY = datetime(2024, 7, 26)  # what Llama 3.1's own template writes where there is no clock
_MODES = ("add_generation_prompt", "continue_final_message")  # that templates or theirs act on
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class Chat:
    """One conversation, as templates want it."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None
    documents: tuple[Mapping[str, Any], ...] | None
    kwargs: Mapping[str, Any]
    where: str = field(repr=False, compare=False)  # FILE:LINE


def chat_of(record: Any, where: str) -> Chat | None:
    """The chat of a JSONL line, None where it is none; SourceError for one that is malformed."""
    if not isinstance(record, dict):
        return None
    name = next((name for name in LISTS if record.get(name) is not None), None)
    if name is None and all(isinstance(record.get(key), list) for key in PAIR):
        name, record = LISTS[0], {**record, LISTS[0]: [one for key in PAIR for one in record[key]]}
    if name is None:
        return None
    given, kwargs = record[name], record.get("chat_template_kwargs")
    if not isinstance(given, list) or not given:
        found = "; it is a string: write it as JSON itself" if isinstance(given, str) else ""
        raise SourceError(f"{where}: `{name}` is not a list of one message or more{found}")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise SourceError(f"{where}: `chat_template_kwargs` is not an object")
    messages = [_message(one, f"{where}: message {n}") for n, one in enumerate(given, 1)]
    system = record.get("system") if name == "conversations" else None
    if not isinstance(system, str | None):
        raise SourceError(f"{where}: `system` is not a string")
    if system and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    tools, documents = (_objects(record, key, where) for key in ("tools", "documents"))
    return Chat(tuple(messages), tools, documents, kwargs or {}, where)


def _objects(record: Mapping[str, Any], key: str, where: str) -> tuple[dict[str, Any], ...] | None:
    """The objects under a key, None where there are none."""
    found = record.get(key)
    if isinstance(found, str):
        try:
            found = json.loads(found or "[]")
            json.dumps(found, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            raise SourceError(
                f"{where}: `{key}` is a string that is not JSON; expected a list of objects"
            ) from None
    if found is not None and not (
        isinstance(found, list) and all(isinstance(one, dict) for one in found)
    ):
        raise SourceError(f"{where}: `{key}` is not a list of objects")
    return tuple(found) if found else None


def _message(given: Any, where: str) -> dict[str, Any]:
    """With `role` and `content` as it is given, and what else it has."""
    if isinstance(given, dict) and "from" in given and "role" not in given:
        role = _ROLES.get(str(given["from"]))
        if role is None:
            raise SourceError(
                f"{where}: `from` is {str(given['from'])[:40]!r}, expected {', '.join(_ROLES)}"
            )
        others = {key: value for key, value in given.items() if key not in ("from", "value")}
        given = {**others, "role": role, "content": given.get("value")}
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise SourceError(
            f"{where}: expected an object with `role` and `content` (or `from` and `value`)"
        )
    content = given.get("content")
    if isinstance(content, list):
        for part in content:
            _check_part(part, where)
    elif not isinstance(content, str) and not (content is None and given.get("tool_calls")):
        raise SourceError(f"{where}: its content is neither a string nor a list of texts")
    return given


def _check_part(part: Any, where: str) -> None:
    """SourceError for what is no text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise SourceError(
            f"{where}: a part of its content is {str(kind or part)[:40]!r}; calibration reads text "
            'alone, {"type": "text", "text": ...}'
        )


def _texts(message: Mapping[str, Any]) -> list[str]:
    """What a message says, without space around it."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return [text for part in parts if (text := part.strip())]


@contextmanager
def _fixed_day() -> Iterator[None]:
    """Within, the clock of transformers' strftime_now() stands at DAY. A function of that name
    cannot be handed to the template: transformers makes plain data of what it is given."""
    theirs: Any = import_module("transformers.utils.chat_template_utils")
    clock, theirs.datetime = theirs.datetime, SimpleNamespace(now=lambda: DAY)
    try:
        yield
    finally:
        theirs.datetime = clock


@_fixed_day()
def render(chat: Chat, tokenizer: Any, model: str) -> str:
    """What the template of a tokenizer of transformers makes of a chat.

    UnsupportedError without a template; SourceError where the template refuses the chat, or writes
    nothing of it, or a list as Python does.
    """
    from jinja2.exceptions import TemplateError

    if not tokenizer.chat_template:
        raise UnsupportedError(
            f"{chat.where}: is a chat, and {model} has no chat template (chat_template in "
            "tokenizer_config.json, or chat_template.jinja); add one, or calibrate on plain text"
        )
    taken = set(inspect.signature(tokenizer.apply_chat_template).parameters) - set(_MODES)
    if names := sorted(taken.intersection(chat.kwargs)):
        raise SourceError(
            f"{chat.where}: `chat_template_kwargs` has {', '.join(names)}, which the template does "
            "not read; leave that out"
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in chat.messages],
            tools=None if chat.tools is None else list(chat.tools),
            documents=None if chat.documents is None else list(chat.documents),
            tokenize=False,
            **chat.kwargs,
        )
    # What templates raise by themselves, and what their expressions do of values that they do not
    # expect.
    except (TemplateError, ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError,
            TypeError, ValueError) as error:  # fmt: skip
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise SourceError(
            f"{chat.where}: the chat template of {model} does not take this chat ({said}); change "
            "the chat as the template wants it, or leave it out"
        ) from None
    lists = [one["content"] for one in chat.messages if isinstance(one.get("content"), list)]
    if any(content and str(content) in text for content in lists):
        raise SourceError(
            f"{chat.where}: the chat template of {model} takes content that is a string alone, not "
            "a list; join the texts of a message to one string"
        )
    contents = [one for message in chat.messages for one in _texts(message)]
    if contents and not any(one in text for one in contents):
        raise SourceError(
            f"{chat.where}: the chat template of {model} writes nothing of what its messages say; "
            "give content in the form that it reads (a string, or a list of texts), or calibrate "
            "on plain text"
        )
    return str(text)
