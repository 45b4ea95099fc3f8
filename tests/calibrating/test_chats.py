"""Chats as calibration text: the ids that transformers' apply_chat_template gives."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool.errors import QtoolError, SourceError, UnsupportedError
from qtool.formats.gguf_values import string
from qtool.gguf.tokenizer.files import tokenizer_files
from qtool.gguf.tokenizer.keys import tokenizer_metadata
from qtool.texts.calibration import calibration_tokens
from qtool.texts.mixture import check_source
from qtool.texts.source import load_text, read_text
from support.calibrating.text_files import Settings
from support.models import small_tokenizers as small

TEMPLATE = """{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant'] %}
{{- raise_exception('no role ' + message.role) }}
{%- endif %}
{{- '<|turn|>' + message.role + '\n' + message.content + '<|end|>\n\n' }}
{%- endfor %}"""
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|end|>"}
TURNS = [
    {"role": "system", "content": "the thing <|turn|>"},
    {"role": "user", "content": "the end\n\n"},
    {"role": "assistant", "content": "é 12 and"},
]


def folder(place: Path, template: str | None = TEMPLATE, **files: Any) -> Path:
    """A model's folder as far as tokenizing goes."""
    # With a post-processor, so that an id too many would show.
    begin = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
    around = [begin, {"Sequence": {"id": "A", "type_id": 0}}]
    data = small.bpe(extra=[small.added(small.SIZE, "<|turn|>")]) | {
        "post_processor": {
            "type": "TemplateProcessing", "single": around, "pair": around,
            "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
        }
    }  # fmt: skip
    config = CONFIG if template is None else CONFIG | {"chat_template": template}
    return small.save(place, {"tokenizer.json": data, "tokenizer_config.json": config, **files})


def jsonl(place: Path, *lines: Any) -> Path:
    path = place / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def ids_of(text: Path, model: Path, n: int) -> list[int]:
    found = calibration_tokens(Settings(str(text), samples=1, length=n), model)
    return list(map(int, found.tokens[0]))


def theirs(model: Path, *chats: Sequence[dict[str, Any]], **more: Any) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        number
        for chat in chats
        for number in tokenizer.apply_chat_template(list(chat), **more)["input_ids"]
    ]


def test_ids_are_those_of_transformers_chat_after_chat(tmp_path: Path) -> None:
    model = folder(tmp_path / "model")
    other = [{"role": "user", "content": "in the"}]
    expected = theirs(model, TURNS, other)
    assert expected.count(small.SIZE) == 5 and expected.count(0) == 4
    text = jsonl(tmp_path, {"messages": TURNS}, {"messages": other, "source": "web"})
    assert ids_of(text, model, len(expected)) == expected
    with pytest.raises(SourceError, match=f"has {len(expected)} tokens"):
        ids_of(text, model, len(expected) + 1)


@pytest.mark.parametrize(
    "line",
    [
        {"conversations": [
            {"from": name, "value": turn["content"]}
            for name, turn in zip(("system", "human", "gpt"), TURNS, strict=True)
        ]},
        {"conversations": TURNS, "messages": None},
        {"prompt": TURNS[:2], "completion": TURNS[2:]},
        {"conversations": TURNS[1:], "system": TURNS[0]["content"], "tools": ""},
        {"conversations": TURNS, "system": "another one"},
    ],
    ids=["sharegpt", "roles", "trl", "system", "system-twice"],
)  # fmt: skip
def test_other_ways_to_write_the_same_chat(line: dict[str, Any], tmp_path: Path) -> None:
    plain = jsonl(tmp_path, {"messages": TURNS})
    (expected,) = load_text(str(plain)).pieces()
    (found,) = load_text(str(jsonl(tmp_path, line))).pieces()
    assert found == expected


def test_keys_of_other_meaning_are_ignored(tmp_path: Path) -> None:
    """`system` is a message of ShareGPT alone."""
    lines = [{"messages": TURNS[1:], "system": "linux", "prompt": 1}, {"messages": TURNS[1:]}]
    one, two = load_text(str(jsonl(tmp_path, *lines))).pieces()
    assert one == two


PARTS = """{% for message in messages %}{{ message.role }}
{%- if message.content is string %} S:{{ message.content }}
{%- else %}{% for part in message.content %} P:{{ part.text }}{% endfor %}
{%- endif %}<|end|>{% endfor %}"""


def test_content_is_given_to_the_template_as_it_is(tmp_path: Path) -> None:
    """A list as a list, to a template that walks over its parts; a string as a string."""
    model = folder(tmp_path / "model", PARTS)
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "and", "more": 1}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "the and"}]
    fixed = folder(tmp_path / "fixed", "user P:the  P:and<|end|>assistant S:the and<|end|>")
    expected = theirs(model, turns)
    assert expected == theirs(fixed, turns)
    assert ids_of(jsonl(tmp_path, {"messages": turns}), model, len(expected)) == expected


READS = """{{ messages[0].content }} {{ tools }} {{ documents }} {{ mode }} {{ bos_token }}
{%- if add_generation_prompt %}<|turn|>{% endif %}"""


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ({"tools": '[{"name": "and"}]'}, {"tools": [{"name": "and"}]}),
        ({"tools": "[]", "mode": "in"}, {}),
        ({"documents": [{"title": "in"}]}, {"documents": [{"title": "in"}]}),
        ({"documents": '[{"title": "in"}]'}, {"documents": [{"title": "in"}]}),
        ({"chat_template_kwargs": {"mode": "the", "add_generation_prompt": True}},
         {"mode": "the", "add_generation_prompt": True}),
        ({"chat_template_kwargs": {"bos_token": "in"}}, {"bos_token": "in"}),
        ({"chat_template_kwargs": None, "tools": None, "documents": None}, {}),
    ],
)  # fmt: skip
def test_a_template_reads_what_is_beside_the_messages(
    line: dict[str, Any], given: dict[str, Any], tmp_path: Path
) -> None:
    model = folder(tmp_path / "model", READS)
    expected = theirs(model, TURNS, **given)
    assert (expected == theirs(model, TURNS)) == (not given)
    assert ids_of(jsonl(tmp_path, {"messages": TURNS} | line), model, len(expected)) == expected


def test_texts_and_chats_in_one_file(tmp_path: Path) -> None:
    from qtool.texts.tokenizing import tokenize

    model = folder(tmp_path / "model")
    chat = {"messages": TURNS}
    text = jsonl(tmp_path, {"text": "the\n"}, {"text": "\nin", **chat}, chat, {"text": "and"})
    one, two = (tokenize(some, model).tolist() for some in ("the\n\n\nin", "and"))
    expected = [*one, *theirs(model, TURNS), *two]
    assert ids_of(text, model, len(expected)) == expected


def test_templates_are_found_where_transformers_looks(tmp_path: Path) -> None:
    """In a file of their own, and by name: `tool_use` where a chat has tools."""
    turns = [{"role": "user", "content": "the"}]
    tools = [{"type": "function", "function": {"name": "and"}}]
    files = {
        "chat_template.jinja": "{{ messages[0].content }}<|end|>",
        "additional_chat_templates/tool_use.jinja": "{{ tools[0].function.name }} "
        "{{ messages[0].content }}<|turn|>",
    }
    (tmp_path / "model" / "additional_chat_templates").mkdir(parents=True)
    model = folder(tmp_path / "model", None, **files)
    text = jsonl(tmp_path, {"messages": turns}, {"messages": turns, "tools": tools})
    expected = [*theirs(model, turns), *theirs(model, turns, tools=tools)]
    assert expected[-1] == small.SIZE
    assert ids_of(text, model, len(expected)) == expected


def test_a_gguf_file_has_its_template_with_it(tmp_path: Path) -> None:
    model = folder(tmp_path / "model")
    keys = tokenizer_metadata(model, "olmo2", small.SIZE + 1, {})
    files = tokenizer_files({**keys, "general.architecture": string("olmo2")})
    config = json.loads(files["tokenizer_config.json"])
    assert config["chat_template"] == TEMPLATE
    again = small.save(tmp_path / "again", files)
    expected = theirs(model, TURNS)
    assert ids_of(jsonl(tmp_path, {"messages": TURNS}), again, len(expected)) == expected


@pytest.mark.parametrize(
    "written",
    [
        "{{ strftime_now('%d %b %Y') }}",
        "{% set form = '%d %b ' ~ '%Y' %}{{ strftime_now(form) }}",
        "{{ strftime_now(format='%d %b %Y') }}",
        "{% set now = strftime_now %}{{ now('%d %b %Y') if strftime_now is defined }}",
    ],
)
def test_a_template_that_writes_the_date_writes_the_same_one_tomorrow(
    written: str, tmp_path: Path
) -> None:
    model = folder(tmp_path / "a", f"{written} {{{{ messages[0].content }}}}")
    fixed = folder(tmp_path / "b", "26 Jul 2024 {{ messages[0].content }}")
    expected = theirs(fixed, TURNS)
    assert theirs(model, TURNS) != expected
    assert ids_of(jsonl(tmp_path, {"messages": TURNS}), model, len(expected)) == expected
    assert theirs(model, TURNS) != expected  # the clock goes again


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"messages": []}, r"`messages` is not a list of one message"),
        ({"messages": "hello"}, r"`messages` is not a list of one message"),
        ({"conversations": [1]}, r"message 1: expected an object with `role` and `content`"),
        ({"messages": [{"content": "a"}]}, r"message 1: expected an object with `role`"),
        ({"messages": [*TURNS, {"from": "moon", "value": "a"}]},
         r"message 4: `from` is 'moon', expected human, user"),
        (user(None), r"message 1: its content is neither a string"),
        (user([{"type": "image", "url": "x"}]), r"message 1: a part .* is 'image'"),
        (user("half \ud800"), "half of a surrogate pair"),
        ({**user("a"), "tools": "{}"}, "`tools` is not a list of objects"),
        ({**user("a"), "tools": "a tool"}, "`tools` is a string that is not JSON"),
        ({**user("a"), "tools": '[{"a": "\\ud800"}]'}, "`tools` is a string that is not JSON"),
        ({**user("a"), "documents": ["a"]}, "`documents` is not a list of objects"),
        ({**user("a"), "chat_template_kwargs": []}, "`chat_template_kwargs` is not an object"),
        ({"conversations": TURNS, "system": 1}, "`system` is not a string"),
        ({"prompt": "a"}, r"are\), a string alone, or a chat whose `messages`"),
    ],
)  # fmt: skip
def test_a_malformed_chat_names_its_line(line: Any, says: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path, user("fine"), line)
    with pytest.raises(SourceError, match=rf"{re.escape(str(path))}:2: .*{says}"):
        check_source(str(path))


@pytest.mark.parametrize(
    ("template", "kind", "says"),
    [
        (None, UnsupportedError, r"has no chat template \(chat_template in tokenizer_config.json"),
        (TEMPLATE.replace("'user'", "'human'"), SourceError, r"not take this chat \(no role user"),
        ("{{ messages[0].name + 'x' }}", SourceError, r"not take this chat \(.*name"),
        ("{{ messages[0].content / 2 }}", SourceError, r"not take this chat \(unsupported operand"),
        ("{% if %}", SourceError, r"not take this chat \(Expected an expression"),
        ("{% for m in messages %}{{ m.text }}{% endfor %}", SourceError, "writes nothing of what"),
    ],
)
def test_a_template_that_does_not_serve(
    template: str | None, kind: type[QtoolError], says: str, tmp_path: Path
) -> None:
    text = jsonl(tmp_path, user("the"))
    with pytest.raises(kind, match=rf"chats\.jsonl:1: .*{says}"):
        ids_of(text, folder(tmp_path / "model", template), 1)


@pytest.mark.parametrize("template", [PARTS.replace("is string", "is none"), TEMPLATE, "{{ %s }}"])
def test_content_in_the_form_that_a_template_does_not_read(template: str, tmp_path: Path) -> None:
    """One wants lists alone, one adds strings, and one would write the list as Python does."""
    model = folder(tmp_path / "model", template.replace("%s", "messages[0].content | trim"))
    parts = [{"type": "text", "text": "the"}]
    wrong, says = {
        "{{ %s }}": (parts, "takes content that is a string alone, not a list"),
        TEMPLATE: (parts, r"does not take this chat \(can only concatenate str"),
    }.get(template, ("the", "writes nothing of what its messages say; give content in the form"))
    with pytest.raises(SourceError, match=rf"chats\.jsonl:1: .*{says}"):
        ids_of(jsonl(tmp_path, user(wrong)), model, 1)
    right = user("the" if wrong is parts else parts)
    expected = theirs(model, right["messages"])
    assert ids_of(jsonl(tmp_path, right), model, len(expected)) == expected


def test_arguments_that_are_not_for_the_template(tmp_path: Path) -> None:
    line = user("the") | {"chat_template_kwargs": {"tokenize": True, "chat_template": "x", "a": 1}}
    with pytest.raises(SourceError, match=r":1: .* has chat_template, tokenize, which the templ"):
        ids_of(jsonl(tmp_path, line), folder(tmp_path / "model"), 1)


def test_a_text_to_measure_on_is_no_chat(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r":2: is a chat, which --calibration takes"):
        list(read_text(jsonl(tmp_path, {"text": "the"}, user("the"))))


def test_chats_are_the_same_chunks_again(tmp_path: Path) -> None:
    """Chosen by seed as other text is; the digest is over ids."""
    model = folder(tmp_path / "model")
    chats = [{"messages": TURNS}] * 20
    first = calibration_tokens(Settings(str(jsonl(tmp_path, *chats)), 3, 8, 1), model)
    whole = np.array(theirs(model, *[TURNS] * 20))
    n = len(whole) // 8
    chosen = sorted(np.random.default_rng(1).permutation(n)[:3])
    assert np.array_equal(first.tokens, whole[: n * 8].reshape(n, 8)[chosen])
    assert first.record()["source"] == "file"
