"""Rows of Parquet say what lines of JSONL say."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from qtool.cli.main import app
from qtool.errors import SourceError, UnsupportedError
from qtool.planning.shapes import table_bytes
from qtool.recipe.file import Calibration
from qtool.texts import parquet, source
from qtool.texts.chats import Chat
from qtool.texts.mixture import check_source
from qtool.texts.source import load_text
from support.calibrating.text_files import SAID, jsonl, table, told


def test_rows_of_parquet_are_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts, chats and what is beside them; what is null is not there."""
    monkeypatch.setattr(parquet, "_ROWS", 2)
    path = table(tmp_path / "texts.parquet", [*SAID, {"text": None}], row_group_size=3)
    counts: list[int] = []
    assert told(path, counts.append) == told(jsonl(tmp_path / "texts.jsonl", SAID))
    assert sum(counts) == path.stat().st_size and len(counts) >= 3
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "id": None}]}
    chat = {
        "prompt": "not what is read",  # as in ultrachat_200k
        "messages": [{"role": "user", "content": "a", "tool_calls": None}, call],
        "tools": [{"name": "f", "parameters": None}],
        "images": [b"not read"],
    }
    (piece,) = load_text(str(table(tmp_path / "chats.parquet", [chat]))).pieces()
    assert isinstance(piece, Chat) and piece.where.endswith("chats.parquet: row 1")
    last = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    assert piece.messages == ({"role": "user", "content": "a"}, last)
    assert piece.tools == ({"name": "f"},)
    parted = [{"type": "text", "text": "a", "image": None}]
    pair = {"prompt": [{"role": "user", "content": parted}], "completion": []}
    told_of = told(table(tmp_path / "pairs.parquet", [pair]))
    assert told_of == [({"role": "user", "content": [{"type": "text", "text": "a"}]},)]


def test_long_rows_are_read_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [{"text": f"{number} " * 1000} for number in range(40)]
    path = table(tmp_path / "texts.parquet", said, use_dictionary=False)
    for together, reads in ((1 << 23, 1), (1, 40), (20_000, 8)):
        monkeypatch.setattr(parquet, "_BYTES", together)
        counts: list[int] = []
        assert told(path, counts.append) == ["\n".join(one["text"] for one in said)]
        assert abs(len(counts) - reads) <= reads // 4


def test_a_value_that_is_there_once_is_not_read_many_times_at_once(tmp_path: Path) -> None:
    """A dictionary has it once, and every row of what is read together."""
    said = [{"text": "words " * 50_000}] * 400
    path = table(tmp_path / "a.parquet", said)
    assert path.stat().st_size < 1 << 20
    before = pyarrow.total_allocated_bytes()
    most = 0
    for text in source.read_text(path):
        most = max(most, pyarrow.total_allocated_bytes() - before, len(text))
    assert 300_000 <= most <= 24 << 20


def test_plans_count_the_largest_page(tmp_path: Path) -> None:
    """pyarrow, and what a page of 1024 rows takes while it is read."""
    kib = "".join(random.Random(0).choices("abcdef ", k=1024))
    few = [{"text": kib + str(number), "other": kib * 9 + str(number)} for number in range(300)]
    for said, groups, page in ((few, 300, 300), (few, 100, 100), (few * 8, 2400, 1024)):
        path = table(tmp_path / "a.parquet", said, row_group_size=groups, use_dictionary=False)
        assert parquet.largest_page(path) == pytest.approx(page * 1028, rel=0.03)
        asked = Calibration(source=str(path))
        assert table_bytes(asked) == 60_000_000 + 3 * parquet.largest_page(path)
    assert table_bytes(Calibration(source="ann/texts:a.parquet")) == 60_000_000
    assert table_bytes(Calibration(source=str(tmp_path / "a.txt"))) == 0
    (tmp_path / "mix.yaml").write_text("- a.parquet\n- ann/texts\n")
    assert table_bytes(Calibration(source=str(tmp_path / "mix.yaml"))) == table_bytes(asked)
    plain, rows = (
        json.loads(CliRunner().invoke(app, ["plan", "tiny", "--recipe", "w4g128-gptq", "--json",
                                            "--calibration", str(one)]).stdout)["peak_rss_bytes"]
        for one in (jsonl(tmp_path / "a.jsonl", few), path)
    )  # fmt: skip
    assert rows >= plain + 60_000_000


def test_bad_parquet_is_told(tmp_path: Path) -> None:
    path = tmp_path / "texts.parquet"
    said = [{"text": "words " * 20 + str(number)} for number in range(500)]
    whole = table(path, said, compression="none").read_bytes()
    for content in (b"", b"PAR1", whole[: len(whole) // 2], whole[:4] + whole[300:]):
        path.write_bytes(content)
        with pytest.raises(SourceError, match=r"texts\.parquet: cannot be read as Parquet \(."):
            check_source(str(path))
    for at in range(4, len(whole) - 8, 97):  # read, or refused
        damaged = bytearray(whole)
        damaged[at] ^= 0x80
        path.write_bytes(damaged)
        try:
            told(path)
        except SourceError as error:
            assert str(error).startswith(str(path))
    bad: list[tuple[list[dict[str, Any]], str]] = [
        ([{"a": "b"}], r"text \(or .*\), messages or conversations; found a$"),
        ([{"instruction": "a", "output": "b"}], "found .*: name instruction .* completion$"),
        ([{"question": "a", "answer": "b"}], "found .*: name question prompt, and answer"),
        ([{"Text": "a"}], "found Text: name Text text$"),
        ([{"system": "a", "text": "b"}, {"system": "c"}], r"row 2: expected an object whose"),
        ([{"text": 3}], r"row 1: .*; its `text` is a number$"),
        ([{"text": b"3"}], r"row 1: .*; its `text` is bytes$"),
        ([{"messages": "[]"}], r"row 1: `messages` is not .*; it is a string: write it as JSON"),
        ([{"messages": [{"at": np.datetime64(10**18 + 1, "ns")}]}], "cannot be read as Parquet"),
    ]
    for some, why in bad:
        with pytest.raises(SourceError, match=why):
            check_source(str(table(path, some)))
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, ["text", "text"])
    pyarrow.parquet.write_table(twice, path)
    with pytest.raises(SourceError, match="several columns are named text"):
        check_source(str(path))
    with pytest.raises(UnsupportedError, match=r"\.parquet is compressed by itself; decompress"):
        check_source(str(path.rename(tmp_path / "texts.parquet.gz")))
