"""Files of texts: compressed ones, JSON arrays and Parquet say what JSONL says."""

import bz2
import gzip
import json
import lzma
import random
import re
import struct
import sys
from collections.abc import Callable, Iterator
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
from qtool.planning.shapes import table_bytes
from qtool.recipe.file import Calibration
from qtool.runs.progress import Progress
from qtool.texts import parquet, records, source, stored
from qtool.texts.calibration import calibration_tokens, chunks
from qtool.texts.chats import Chat
from qtool.texts.datasets import choose
from qtool.texts.mixture import check_source, too_few_bytes
from qtool.texts.source import Text, load_text, read_text
from qtool.texts.tokenizing import tokenize

PAGE = "https://huggingface.co/datasets/ann/x"
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


ROWS = pyarrow.table({"text": ["a"]})
_STREAM = pyarrow.BufferOutputStream()
with pyarrow.ipc.new_stream(_STREAM, ROWS.schema) as _writer:
    _writer.write_table(ROWS)
STREAM = _STREAM.getvalue().to_pybytes()  # as `save_to_disk` of datasets writes it


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


@pytest.mark.parametrize("suffix", PACK)
def test_what_is_unpacked_is_never_there_as_a_whole(suffix: str, tmp_path: Path) -> None:
    """Neither by who reads it, nor by who looks whether it can be."""
    path = tmp_path / f"text.txt{suffix}"
    with path.open("wb") as file:
        for _ in range(3):
            file.write(PACK[suffix](b"a" * (40 << 20)))
    sizes = [len(some) for some in stored.blocks(path)]
    assert sum(sizes) == 120 << 20 and max(sizes) <= 9 << 20 and sizes[-1] == 0
    counts: list[int] = []

    def pieces(*_: object) -> Iterator[Text]:
        yield (counts.append(len(some)) or "a" * len(some) for some in stored.blocks(path))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(source, "_pieces", pieces)
        check_source(str(path))
    assert 32 << 20 <= sum(counts) <= 48 << 20


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS"),
        ("a.txt", b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS"),
        ("a.json.gz", b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS"),
        ("a.bin", b"ARROW1\0\0 and so on", "Arrow: save it as Parquet"),
        ("a.bin", STREAM, "Arrow, as datasets saves it: save it as Parquet"),
        ("a", b"PAR1 and so on PAR1", r"Parquet: name it \.parquet"),
        ("a.json", gzip.compress(b"{}"), r"compressed by gzip: name it \.gz"),
        ("a.txt.gz", bz2.compress(b"a"), r"compressed by bzip2: name it \.bz2"),
        ("a.txt", lzma.compress(b"a"), r"compressed by xz: name it \.xz"),
        ("a.parquet", PACK[".zst"](b"a"), r"compressed by Zstandard: name it \.zst"),
        ("a.txt", b"PK\x03\x04", "a zip archive: unpack it"),
        ("a.parquet", b"\n<!DOCTYPE html><html>", r"a page \(HTML\), not a file: log in"),
        ("a.jsonl.gz", b'<html class="no-js">', r"a page \(HTML\), not a file: log in"),
    ],
)
def test_a_file_that_is_something_else_than_its_name_says(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SourceError, match=rf"{re.escape(name)}: is {said}"):
        check_source(str(path))


@pytest.mark.parametrize(
    "text", ["BZhang et al.", "PAR1,text\n", "FEA1 is", "ARROW1 is", "<html>a page</html>", "PK"]
)
def test_texts_that_begin_like_something_else(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(text)
    check_source(str(tmp_path / "a.log"))
    assert told(tmp_path / "a.log") == [text]


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.zip", "a.tar"])
def test_archives_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"text")
    with pytest.raises(UnsupportedError, match=rf"{name}: an archive; unpack it, and name a file"):
        check_source(str(tmp_path / name))


def test_what_is_named_instead_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, name in (
        ("shards", "b.parquet"),
        ("disk/train", "data-0.arrow"),
        ("nothing", "a.bin"),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).write_bytes(b"")
    (tmp_path / "disk" / "dataset_dict.json").write_text("{}")
    (tmp_path / "shards" / "a.jsonl.gz").write_bytes(b"")
    for given, said in (
        ("shards", "a folder; name a file of it, such as a.jsonl.gz; several files are named by"),
        ("disk", "a folder; datasets saved it: save it as Parquet"),
        ("nothing", "a folder; --calibration wants a file: text, JSON, CSV or Parquet"),
        ("shards/*.parquet", "no such file, .*; several files are named by a YAML file"),
        ("", "'': no such file"),
        ("allenai/c4/en/a.json.gz", "; allenai/c4:en/a.json.gz would be one$"),
        ("./data/calib/a.txt", r"owner/name:FILE\)$"),
        ("hf://datasets/ann/x/data/a.txt", "; ann/x:data/a.txt would be one$"),
        (f"{PAGE}/resolve/main/a.txt?download=true", "; ann/x:a.txt would be one$"),
        (f"{PAGE}/blob/refs%2Fpr%2F1/a.txt", "; ann/x@refs/pr/1:a.txt would be one$"),
        ("disk/train/data-0.arrow", r"Arrow is not read; save it as Parquet"),
    ):
        with pytest.raises((SourceError, UnsupportedError), match=said):
            check_source(given)


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
        (
            '[{"text": "a"}, {"text": 1}]',
            r"element 2: expected .*; its `text` is a number$",
        ),
        ('[{"instruction": "a", "output": "b"}]', r"element 1: .*: name instruction"),
        ('[["a"]]', r"element 1: .*found an array"),
        ('[{"text": "a"}', r"element 1: expected `,` or `\]` behind it; is the file whole"),
        ('[{"text": "a"} {"text": "b"}]', r"element 1: expected `,` or `\]` behind it"),
        ('[{"text": "a"}, ]', r"element 2: the file ends within it; is it whole"),
        ('[{"text": "a"}, {"te', r"element 2: the file ends within it; is it whole"),
        (
            '[{"text": "a",}, {"text": "and so on, and on"}]',
            r"element 1: not JSON \(Expecting",
        ),
        ("[", r"element 1: the file ends within it"),
        ('["a"]', r"element 1: .*; found a string"),
        (
            '[{"data": [{"text": "a"}]}]',
            r"element 1: .*; if what is under data",
        ),
        ('[{"text": "a"}] [', r"expected nothing behind its array, found '\['"),
        ('[{"text": "\\ud800"}]', r"element 1: its text has half of a surrogate pair"),
        ("[" * 200_000, r"element 1: not JSON"),
        ('[{"text": "a", "id": ' + "1" * 5000 + "}]", r"element 1: not JSON \(Exceeds the limit"),
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
    with pytest.raises(SourceError, match="element 1: longer than 0 million characters"):
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
    # What is of no use is told before any work.
    for path in (packed, rows):
        path.write_bytes(path.read_bytes()[:-9])
    other = {
        "short.txt.gz": (gzip.compress(b"the and in " * 20), "220 bytes"),
        "latin.txt": ("é".encode("latin-1") * 999, "not UTF-8"),
        "chats.jsonl": (json.dumps(SAID[2]).encode(), "is a chat"),
        "alpaca.json": (b'[{"instruction": "a", "output": "b"}]', "name instruction"),
        "table.csv": (b"id\n1\n", "expected a column named text"),
        "lfs.txt": (b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS"),
    }
    reasons = {packed: "ends within gzip", rows: "read as Parquet"}
    for name, (content, why) in other.items():
        (tmp_path / name).write_bytes(content)
        reasons[tmp_path / name] = why
    for path, why in reasons.items():
        for words in (
            ["matrix", "tiny", "--recipes", "q4_0", "-o", str(tmp_path / "made"), "--eval"],
            ["report", "tiny", "--against", "tiny", "-o", str(tmp_path / "made"), "--text"],
        ):
            result = CliRunner().invoke(app, [*words, str(path), "--windows", "1"])
            assert result.exit_code == 1 and why in str(result.exception)
            assert not (tmp_path / "made").exists()
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
        (["requirements.txt", "data/en.parquet"], "data/en.parquet"),
        (["CONTRIBUTING.md", "data/0000.parquet"], "data/0000.parquet"),
        (["docs/training.md", "data/train-00000.parquet"], "data/train-00000.parquet"),
        (["constrained.json", "data.jsonl"], "data.jsonl"),
        (["meta.csv", "train.txt"], "train.txt"),
        (["corpus.txt", "eval_results.csv"], "corpus.txt"),
        (["licensed_text.jsonl", "license.txt"], "licensed_text.jsonl"),
        (["config_a.parquet", "x.csv"], "config_a.parquet"),
    ],
)
def test_which_file_of_a_dataset(
    names: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_, **__: names)
    assert choose("ann/texts") == chosen
    # What `save_to_disk` of datasets makes, and settings, are none.
    names[:] = ["data-0.arrow", "dataset_info.json", "sub/state.json", "trainer_state.json"]
    with pytest.raises(
        UnsupportedError, match=r"has no file of texts: .*\(it has data-0\.arrow, data"
    ):
        choose("ann/texts")


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

    served = {"ann/texts": tmp_path / "texts", "ann/gated": tmp_path / "texts"}
    with hub_here(monkeypatch, tmp_path, served) as hub:
        ran("quantize", "tiny", "--recipe", "w4g128-gptq", "--calibration", "ann/texts",
            "--samples", "2", "--length", "64", "-o", out)  # fmt: skip
        record = json.loads((tmp_path / "made" / "qtool.json").read_text())
        assert record["calibration"]["source"] == "ann/texts:data/train-0.parquet"
        ran("reproduce", out)  # ends with 1 where bytes differ
        measured = ran("eval", "tiny", "--text", text, "--windows", "1", "--length", "64")
        assert measured["protocol"]["text"] == text
        own = ran("eval", "tiny", "--text", str(test), "--windows", "1", "--length", "64")
        assert measured["perplexity"] == own["perplexity"]
        few = ("--text", text, "--windows", "1", "--length", "64")
        ran("compare", out, "--against", "tiny", *few)
        ran("report", out, "--against", "tiny", *few)
        for name, why in ((text + "x", "has no file 'data/test-0.parquetx'"), ("ann/x", "no such")):
            result = CliRunner().invoke(app, ["eval", "tiny", "--text", name])
            assert result.exit_code == 1 and why in str(result.exception)
        (folder / "more.parquet").write_bytes(b"")
        before = hub.sent.copy()
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(sys.modules, "pyarrow", None)
            words = ["eval", "tiny", "--text", "ann/texts:data/more.parquet"]
            result = CliRunner().invoke(app, words)
        assert "more.parquet: is read by pyarrow" in str(result.exception)
        assert hub.sent == before  # not downloaded
        log_in = "is gated: accept its terms on its page .*/datasets/ann/gated.*, then log in with"
        for given, said in (
            ("ann/gated:a.txt", log_in),
            ("ann/gated", log_in),
            ("ann/textz:a.txt", "does not exist, or is private; .* log in with"),
            ("ann/texts:data", r"no file 'data'; name one, such as data/more.parquet, data/test-0"),
            ("ann/texts:data/tset-0.txt", r"no file .*; name one, such as data/test-0.parquet"),
            ("ann/texts@gone:a.txt", "has no revision 'gone'"),
        ):
            with pytest.raises(SourceError, match=rf"^{given.partition(':')[0]}: dataset .*{said}"):
                load_text(given)
    here = tmp_path / "ann" / text[4:]
    here.parent.mkdir(parents=True)
    here.write_text("a text " * 200)
    monkeypatch.chdir(tmp_path)
    assert source.text_file(Path(text)) == Path(text)
