"""Chats as a model reads them: rendered by its own chat template.

    {"messages": [{"role": "user", "content": TEXT}, ...]}         and `tools` beside it, if any
    {"conversations": [{"from": "human", "value": TEXT}, ...]}     ShareGPT
    TEXT: a string, or a list of {"type": "text", "text": "..."}, which are joined

A template is a Jinja program that transformers runs in a sandbox. Source: apply_chat_template() of
transformers, whose ids these are. Only today's date would be another one tomorrow: a template that
writes it gets one fixed day, so that the same chats are always the same tokens.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from qtool.errors import SourceError, UnsupportedError

LISTS = ("messages", "conversations")
DAY = date(2024, 7, 26)  # what Llama 3.1's own template writes where there is no clock
_NOW = re.compile(r"strftime_now\(\s*(['\"])([^'\"]*)\1\s*\)")
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class Chat:
    """One conversation, as templates want it."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None
    where: str = field(repr=False, compare=False)  # FILE:LINE


def chat_of(record: Any, where: str) -> Chat | None:
    """The chat of a JSONL line, None where it is none; SourceError for one that is malformed."""
    if not isinstance(record, dict):
        return None
    name = next((name for name in LISTS if record.get(name) is not None), None)
    if name is None:
        return None
    given, tools = record[name], record.get("tools")
    if not isinstance(given, list) or not given:
        raise SourceError(f"{where}: `{name}` is not a list of one message or more")
    if tools is not None and not _objects(tools):
        raise SourceError(f"{where}: `tools` is not a list of objects")
    messages = [_message(one, f"{where}: message {n}") for n, one in enumerate(given, 1)]
    return Chat(tuple(messages), tuple(tools) if tools else None, where)


def _objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _message(given: Any, where: str) -> dict[str, Any]:
    """With `role` and `content`, and what else it has."""
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
        content = "".join(_part(part, where) for part in content)
    elif content is None and given.get("tool_calls"):
        return given
    if not isinstance(content, str):
        raise SourceError(f"{where}: its content is neither a string nor a list of texts")
    return {**given, "content": content}


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise SourceError(
            f"{where}: a part of its content is {str(kind or part)[:40]!r}; calibration reads text "
            'alone, {"type": "text", "text": ...}'
        )
    return str(part["text"])


def render(chat: Chat, tokenizer: Any, model: str) -> str:
    """What the template of a tokenizer of transformers makes of a chat.

    UnsupportedError without a template; SourceError where the template refuses the chat, or writes
    nothing of it.
    """
    from jinja2.exceptions import TemplateError

    tools: Sequence[Any] | None = None if chat.tools is None else list(chat.tools)
    if not tokenizer.chat_template:
        raise UnsupportedError(
            f"{chat.where}: is a chat, and {model} has no chat template (chat_template in "
            "tokenizer_config.json, or chat_template.jinja); add one, or calibrate on plain text"
        )
    try:
        template = tokenizer.get_chat_template(tools=tools)
        text = tokenizer.apply_chat_template(
            [dict(message) for message in chat.messages],
            tools=tools,
            chat_template=_NOW.sub(lambda found: repr(DAY.strftime(found[2])), template),
            tokenize=False,
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
    contents = [str(message.get("content") or "").strip() for message in chat.messages]
    if any(contents) and not any(one and one in text for one in contents):
        raise SourceError(
            f"{chat.where}: the chat template of {model} writes nothing of what its messages say; "
            "calibrate on plain text"
        )
    return str(text)
