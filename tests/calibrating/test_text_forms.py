"""Texts as files have them: JSON lines, tables, plain; read some at a time; bytes that are none."""

import csv
import json
from pathlib import Path
from typing import cast

import pytest

from qtool.errors import SourceError
from qtool.texts import stored
from qtool.texts.mixture import check_source
from qtool.texts.source import Text, load_text, read_text


def read(path: Path) -> list[str]:
    return ["".join(cast("Text", text)) for text in load_text(str(path)).pieces()]


def test_jsonl_texts_are_joined_by_newlines(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "one\\u2028two", "id": 1}\n\n{"text": "three"}\n')
    assert load_text(str(path)).name == "file"
    assert read(path) == ["one\u2028two\nthree"]


@pytest.mark.parametrize("name", ["texts.jsonl", "texts.json"])
def test_a_string_is_a_text(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    lines = map(json.dumps, ("one", {"text": "two"}, "three\nfour"))
    path.write_text("\n".join(lines) if name == "texts.jsonl" else f"[{', '.join(lines)}]")
    assert read(path) == ["one\ntwo\nthree\nfour"]


def test_an_object_without_its_text_is_left_out(tmp_path: Path) -> None:
    """As rows of Parquet are, in which every row has all columns."""
    path = tmp_path / "texts.jsonl"
    empty = [{"text": None, "id": 1}, {"messages": None}, {"prompt": None, "completion": None}]
    path.write_text("\n".join(map(json.dumps, [empty[0], {"text": "a"}, *empty, {"text": "b"}])))
    assert read(path) == ["a\nb"]
    path.write_text('{"id": null}')
    with pytest.raises(SourceError, match=r"found id$"):
        check_source(str(path))


def test_a_completion_follows_its_prompt(tmp_path: Path) -> None:
    """As TRL has both; a `text` beside them is what counts."""
    path = tmp_path / "texts.jsonl"
    lines = [
        {"prompt": "2 + 2 =", "completion": " 4"},
        {"text": None, "prompt": "", "completion": "b"},
    ]
    lines.append({"text": "c", "prompt": "d", "completion": "e"})
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read(path) == ["2 + 2 = 4\nb\nc"]


@pytest.mark.parametrize(("name", "between"), [("texts.csv", ","), ("texts.TSV", "\t")])
def test_a_column_of_a_table_is_texts(name: str, between: str, tmp_path: Path) -> None:
    path = tmp_path / name
    rows = [("id", "text"), ("1", 'one, "two"'), ("2", "three\n\nlines\n"), (), ("3", "")]
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=between).writerows(rows)
    assert "".join(read_text(path)) == 'one, "two"\nthree\n\nlines\n\n'
    assert "".join(read_text(path, raw=True)) == 'one, "two"\nthree\n\nlines\n\n'
    path.write_text("\ufeff" + between.join(("prompt", "completion")) + "\n" + f"a{between}b\n")
    assert "".join(read_text(path)) == "".join(read_text(path, raw=True)) == "ab"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("id,words\n1,one\n", ": expected a column named text .*; found id, words; a file named"),
        ("text,text\n1,one\n", "several columns are named text"),
        ("", r": expected a column named text"),
        ("text\nHello, world\n", ":2: 2 columns, expected 1; what has a separator in it has to"),
        ("id,text\n1,one\n2\n", ":3: 1 columns, expected 2"),
        ('text\n"one\n', r": not CSV \(unexpected end of data\)"),
    ],
)
def test_tables_without_text(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.csv"
    path.write_text(content)
    with pytest.raises(SourceError, match=said):
        "".join(read_text(path))


@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_text_is_read_some_at_a_time(
    suffix: str, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters of several bytes and ends of lines lie across what is read together."""
    monkeypatch.setattr(stored, "AT_ONCE", at_once)
    path = tmp_path / f"texts.{suffix}"
    text = "naïve\r\n你好\r\r\n🙂\n\r"
    path.write_bytes(text.encode())
    plain = "naïve\n你好\n\n🙂\n\n"
    if suffix == "jsonl":
        lines = [json.dumps({"text": text}), "", json.dumps({"text": "é"}, ensure_ascii=False)]
        path.write_bytes("\r\n".join(lines).encode())
        plain = f"{text}\né"
    counts: list[int] = []
    found = load_text(str(path))
    assert ["".join(cast("Text", some)) for some in found.pieces(counts.append)] == [plain]
    assert sum(counts) == found.size == path.stat().st_size
    assert "".join(read_text(path, raw=True)) == (plain if suffix == "jsonl" else text)


@pytest.mark.parametrize("name", ["text.txt", "text.jsonl"])
def test_a_byte_order_mark_is_no_text(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    text = '{"text": "a"}' if name.endswith("l") else "a"
    path.write_text(text, encoding="utf-8-sig")
    assert read(path) == ["a"]
    if name == "text.txt":
        assert "".join(read_text(path, raw=True)) == "\ufeffa"  # as llama.cpp reads it


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a"}\nnot json\n', r":2: not JSON"),
        ('{"text": "a"}\n{"content": "b"}\n', r":2: expected an object whose `text`"),
        ('{"text": 3}\n', r":1: expected an object whose `text`"),
        ('{"prompt": "a", "response": "b"}\n', r":1: expected .* list; found prompt, response$"),
        ('{"prompt": "a", "completion": [{"role": "user"}]}\n', r"; found prompt, completion$"),
        ("1\n", r":1: expected an object"),
        ('{"text":' * 100_000, r":1: not JSON"),
    ],
)
def test_bad_jsonl_names_the_line(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(content)
    with pytest.raises(SourceError, match=said):
        check_source(str(path))


def test_bytes_that_are_no_text_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"abc\xff\xfe")
    with pytest.raises(SourceError, match="byte 3 is not UTF-8"):
        check_source(str(path))


@pytest.mark.parametrize("at_once", [1, 4, 5])
@pytest.mark.parametrize(("content", "at"), [(b"ab\xc3\xa9\xe4\xbdc", 4), (b"abcde\xe4\xbd", 5)])
def test_the_byte_that_is_no_text_is_counted_from_the_start_of_the_file(
    content: bytes, at: int, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "AT_ONCE", at_once)
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=f"byte {at} is not UTF-8"):
        check_source(str(path))
