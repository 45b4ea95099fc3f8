"""Files of texts: compressed ones, JSON arrays and Parquet say what JSONL says."""

import bz2
import gzip
import json
import lzma
import random
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hub_here import hub_here
from typer.testing import CliRunner

from qtool.cli.main import app
from qtool.errors import SourceError, UnsupportedError
from qtool.hub import tiny_folder
from qtool.runs.progress import Progress
from qtool.texts import parquet, records, source, stored
from qtool.texts.calibration import calibration_tokens, chunks
from qtool.texts.chats import Chat
from qtool.texts.datasets import choose
from qtool.texts.mixture import check_source, too_few_bytes
from qtool.texts.source import Text, load_text, read_text
from qtool.texts.tokenizing import tokenize

PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: zstandard.ZstdCompressor(write_checksum=True).compress(content),
}
SAID = [
    {"text": "naïve\r\n你好"},
    {"prompt": "How many? ", "completion": "Two."},
    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "🙂"}]},
    {"text": "behind a chat"},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
]


@dataclass(frozen=True)
class Settings:
    source: str | None
    samples: int = 4
    length: int = 16
    seed: int = 0


def told(path: Path, read: Callable[[int], object] = lambda _: None) -> list[Any]:
    """Texts, and the messages of chats."""
    return [
        piece.messages if isinstance(piece, Chat) else "".join(cast("Text", piece))
        for piece in load_text(str(path)).pieces(read)
    ]


def jsonl(path: Path, said: list[dict[str, Any]]) -> Path:
    lines = [json.dumps(one, ensure_ascii=number % 2 == 0) for number, one in enumerate(said)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def table(path: Path, said: list[dict[str, Any]], **options: Any) -> Path:
    names = list(dict.fromkeys(name for one in said for name in one))
    every = pyarrow.table({name: [one.get(name) for one in said] for name in names})
    pyarrow.parquet.write_table(every, path, **options)
    return path


@pytest.mark.parametrize("at_once", [1, 7, 1 << 18])
@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".CSV"])
def test_compressed_files_say_what_is_in_them(
    kind: str, suffix: str, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "AT_ONCE", at_once)
    plain = jsonl(tmp_path / f"plain{kind}", SAID)
    if kind == ".CSV":
        plain.write_text('text,other\n"a ""b""\nc",1\né,2\n', encoding="utf-8")
    packed = tmp_path / f"packed{kind}{suffix.upper() if kind == '.CSV' else suffix}"
    packed.write_bytes(PACK[suffix](plain.read_bytes()))
    counts: list[int] = []
    assert told(packed, counts.append) == told(plain)
    assert sum(counts) == load_text(str(packed)).size == packed.stat().st_size
    assert load_text(str(plain)).plain and not load_text(str(packed)).plain


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_files_of_several_streams(suffix: str, tmp_path: Path) -> None:
    """As `cat` and pigz make them; behind them zeros, as tapes and xz have."""
    path, pack = tmp_path / f"text.txt{suffix}", PACK[suffix]
    path.write_bytes(pack(b"one ") + bytes(8) + pack(b"") + pack(b"two") + bytes(512))
    assert told(path) == ["one two"]
    if suffix == ".zst":  # frames to skip, as pzstd writes them
        skipped = struct.pack("<II", 0x184D2A53, 5) + b"12345"
        path.write_bytes(skipped + pack(b"one ") + skipped + pack(b"two"))
        assert told(path) == ["one two"]


@pytest.mark.parametrize("suffix", PACK)
def test_damaged_compressed_files_are_told(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"text.txt{suffix}"
    content = random.Random(0).randbytes(3000).hex().encode()
    packed = PACK[suffix](content)
    name = stored.COMPRESSED[suffix]
    for nbytes in (0, 1, len(packed) // 2, len(packed) - 1):
        path.write_bytes(packed[:nbytes])
        with pytest.raises(SourceError, match=rf"text\.txt{suffix}: ends within {name} data"):
            check_source(str(path))
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 0x55
    for damaged in (b"these are words", packed + b"these are words", bytes(flipped)):
        path.write_bytes(damaged)
        with pytest.raises(SourceError, match=rf"text\.txt{suffix}: not {name}, or damaged \("):
            check_source(str(path))
    path.write_bytes(PACK[suffix](b"abc\xff"))
    with pytest.raises(SourceError, match="byte 3 is not UTF-8"):
        check_source(str(path))


@pytest.mark.parametrize("at_once", [1, 5, 1 << 18])
@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_says_what_its_elements_would_as_lines(
    indent: int | None, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "AT_ONCE", at_once)
    path = tmp_path / "texts.json"
    path.write_text(" \n" + json.dumps(SAID, indent=indent, ensure_ascii=False) + "\n\n")
    assert told(path) == told(jsonl(tmp_path / "texts.jsonl", SAID))
    path.write_text("[ \n]")
    assert told(path) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"text": "a"}, {"text": 1}]', r"element 2: expected an object whose `text`.*found text"),
        ('[{"instruction": "a", "output": "b"}]', r"element 1: .*: name instruction"),
        ('[["a"]]', r"element 1: .*found an array"),
        ('[{"text": "a"}', r"element 1: expected `,` or `\]` behind it; is the file whole"),
        ('[{"text": "a"} {"text": "b"}]', r"element 1: expected `,` or `\]` behind it"),
        ('[{"text": "a"}, ]', r"element 2: not JSON, broken off, or longer than 64 million"),
        ('[{"text": "a"}, {"te', r"element 2: not JSON, broken off"),
        ("[", r"element 1: not JSON, broken off"),
        ('[{"text": "a"}] [', r"expected nothing behind its array, found '\['"),
        ('[{"text": "\\ud800"}]', r"element 1: its text has half of a surrogate pair"),
        ("[" * 200_000, r"element 1: not JSON"),
    ],
)
def test_a_bad_array_names_the_element(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.json"
    path.write_text(content)
    with pytest.raises(SourceError, match=rf"texts\.json: {said}"):
        check_source(str(path))


def test_an_element_that_is_too_long_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "AT_ONCE", 100)
    monkeypatch.setattr(records, "_LONGEST_ELEMENT", 5000)
    path = tmp_path / "texts.json"
    path.write_text(json.dumps([{"text": "a" * 4000}]))
    assert told(path) == ["a" * 4000]
    path.write_text(json.dumps([{"text": "a" * 100_000}]))
    counts: list[int] = []
    with pytest.raises(SourceError, match="element 1: not JSON, broken off, or longer"):
        told(path, counts.append)
    assert sum(counts) < 20_000


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


def test_bad_parquet_is_told(tmp_path: Path) -> None:
    path = tmp_path / "texts.parquet"
    said = [{"text": "words " * 20 + str(number)} for number in range(500)]
    whole = table(path, said, compression="none").read_bytes()
    for content in (b"", b"PAR1", whole[: len(whole) // 2], whole[:4] + whole[300:]):
        path.write_bytes(content)
        with pytest.raises(SourceError, match=r"texts\.parquet: not Parquet, or damaged \(."):
            check_source(str(path))
    for at in range(4, len(whole) - 8, 97):  # read, or refused
        damaged = bytearray(whole)
        damaged[at] ^= 0x80
        path.write_bytes(damaged)
        try:
            told(path)
        except SourceError as error:
            assert str(error).startswith(str(path))
    with pytest.raises(SourceError, match=r"text \(or .*messages or conversations, once; found a$"):
        check_source(str(table(path, [{"a": "b"}])))
    with pytest.raises(SourceError, match=r"parquet: row 2: expected an object whose `text`"):
        check_source(str(table(path, [{"messages": [], "text": "a"}, {"messages": 1}][:1])))
        check_source(str(table(path, [{"system": "a", "text": "b"}, {"system": "c"}])))
    with pytest.raises(UnsupportedError, match="Parquet is compressed by itself; decompress"):
        check_source(str(path.rename(tmp_path / "texts.parquet.gz")))


@pytest.mark.parametrize("name", ["texts.parquet", "texts.txt.zst"])
def test_a_package_that_is_missing_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "pyarrow" if name.endswith("parquet") else "zstandard"
    monkeypatch.setitem(sys.modules, package, None)
    path = tmp_path / name
    path.write_bytes(b"")
    said = CliRunner().invoke(
        app, ["plan", "tiny", "--recipe", "w4g64-gptq", "--calibration", str(path)]
    )
    assert said.exit_code == 1
    assert str(said.exception) == (
        f"{path}: is read by {package}, which is not installed: pip install 'qtool[datasets]'"
    )


def test_of_a_long_text_the_first_tokens_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 million, or 64 times what samples take; what lies behind is not looked at."""
    assert source.most_read(128 * 512) == 1 << 24
    assert source.most_read(512 * 2048) == 64 * 512 * 2048
    monkeypatch.setattr(source, "MOST_READ", 1000)
    monkeypatch.setattr(source, "TIMES", 20)
    monkeypatch.setattr(stored, "AT_ONCE", 1000)
    monkeypatch.setattr("qtool.texts.calibration._LONG", 1)
    monkeypatch.setattr("qtool.texts.calibration._SHORT", 1)
    words = random.Random(1)
    text = " ".join(words.choice(["the", "and", "import", "class", "in"]) for _ in range(400_000))
    short, long = tmp_path / "short.txt", tmp_path / "long.txt"
    long.write_bytes(text.encode() + b"\xff")
    found = calibration_tokens(Settings(str(long)), tiny_folder(), Progress())
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith("note: of the calibration text the first 1,280 tokens are read")
    first = tokenize(text, tiny_folder())[:1280]
    assert np.array_equal(found.tokens, chunks(first, 4, 16, 0))
    short.write_text(text[:4000])  # less than that
    calibration_tokens(Settings(str(short)), tiny_folder(), Progress())
    assert "first" not in capsys.readouterr().err


def test_what_is_compressed_is_not_counted_by_its_bytes(tmp_path: Path) -> None:
    """Neither for too short a text, nor for one that is short."""
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress(b"the and in " * 20_000))
    assert path.stat().st_size < 4 * 16 * 16
    assert too_few_bytes(str(path), 64 * 16) is None
    plain = tmp_path / "text.txt"
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    made = [calibration_tokens(Settings(str(one), 64), tiny_folder()) for one in (path, plain)]
    assert np.array_equal(made[0].tokens, made[1].tokens)
    assert made[0].digest == made[1].digest


def test_a_text_to_measure_on_may_be_compressed_or_a_table(tmp_path: Path) -> None:
    said = [{"text": "the and in\n" * 40}, {"text": ""}, {"text": "import the class " * 40}]
    plain = jsonl(tmp_path / "a.jsonl", said)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    rows = table(tmp_path / "a.parquet", said)
    figures = []
    for path in (plain, packed, rows):
        assert "".join(read_text(path)) == "".join(read_text(plain))
        words = ["eval", "tiny", "--text", str(path), "--windows", "1", "--length", "64", "--json"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        figures.append(json.loads(result.stdout)["perplexity"])
    assert figures[0] == figures[1] == figures[2]
    with pytest.raises(SourceError, match=r"chats\.parquet: row 1: is a chat"):
        "".join(read_text(table(tmp_path / "chats.parquet", [SAID[2]])))


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["README.md", "data/test.jsonl", "data/train.jsonl"], "data/train.jsonl"),
        (["data/test_sft-0.parquet", "data/train_sft-0.parquet"], "data/train_sft-0.parquet"),
        (["NOTICE.txt", "plain/train-0.parquet"], "plain/train-0.parquet"),
        (["dataset_infos.json", "test.csv"], "test.csv"),
        (["en/c4-train.0.json.gz", "en/c4-train.1.json.gz"], "en/c4-train.0.json.gz"),
        (["val.jsonl.zst", "license.md"], "val.jsonl.zst"),
        (["sg_52k.json", "README.md"], "sg_52k.json"),
    ],
)
def test_which_file_of_a_dataset(
    names: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_, **__: names)
    assert choose("ann/texts") == chosen


def test_datasets_of_the_hub_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table to calibrate on, one to measure on; a file that is here goes first."""
    folder = tmp_path / "texts" / "data"
    folder.mkdir(parents=True)
    said = [{"text": "import the class and in " * 40, "id": 7}] * 4
    table(folder / "train-0.parquet", said)
    test = table(folder / "test-0.parquet", said[:2])
    out, text = str(tmp_path / "made"), "ann/texts:data/test-0.parquet"

    def ran(*words: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, [*words, "--json"])
        assert result.exit_code == 0, result.output + str(result.exception)
        return cast("dict[str, Any]", json.loads(result.stdout))

    with hub_here(monkeypatch, tmp_path, {"ann/texts": tmp_path / "texts"}) as hub:
        ran("quantize", "tiny", "--recipe", "w4g128-gptq", "--calibration", "ann/texts",
            "--samples", "2", "--length", "64", "-o", out)  # fmt: skip
        record = json.loads((tmp_path / "made" / "qtool.json").read_text())
        assert record["calibration"]["source"] == "ann/texts:data/train-0.parquet"
        ran("reproduce", out)  # ends with 1 where bytes differ
        measured = ran("eval", "tiny", "--text", text, "--windows", "1", "--length", "64")
        assert measured["protocol"]["text"] == "test-0.parquet"
        own = ran("eval", "tiny", "--text", str(test), "--windows", "1", "--length", "64")
        assert measured["perplexity"] == own["perplexity"]
        few = ("--text", text, "--windows", "1", "--length", "64")
        ran("compare", out, "--against", "tiny", *few)
        ran("report", out, "--against", "tiny", *few)
        for name, why in ((text + "x", "has no file 'data/test-0.parquetx'"), ("ann/x", "no such")):
            result = CliRunner().invoke(app, ["eval", "tiny", "--text", name])
            assert result.exit_code == 1 and why in str(result.exception)
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        (folder / "more.parquet").write_bytes(b"")
        before = hub.sent.copy()
        result = CliRunner().invoke(app, ["eval", "tiny", "--text", "ann/texts:data/more.parquet"])
        assert "more.parquet: is read by pyarrow" in str(result.exception)
        assert hub.sent == before  # not downloaded
    here = tmp_path / "ann" / text[4:]
    here.parent.mkdir(parents=True)
    here.write_text("a text " * 200)
    monkeypatch.chdir(tmp_path)
    assert source.text_file(Path(text)) == Path(text)
