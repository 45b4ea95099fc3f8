"""Compressed files of texts, and files that are something else than their names say."""

import bz2
import gzip
import lzma
import random
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from qtool.cli.main import app
from qtool.errors import SourceError, UnsupportedError
from qtool.hub import tiny_folder
from qtool.texts import source, stored
from qtool.texts.calibration import calibration_tokens
from qtool.texts.mixture import check_source, too_few_bytes
from qtool.texts.source import Text, load_text
from support.calibrating.text_files import PACK, SAID, STREAM, Settings, jsonl, told


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
        ("a.json", gzip.compress(b"{}", mtime=0), r"compressed by gzip: name it \.gz"),
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
