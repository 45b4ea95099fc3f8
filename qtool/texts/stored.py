"""What kind of texts a file holds, by its name, and its bytes, which may be compressed.

    NAME.txt, .md, any other    one text
    .jsonl, .ndjson, .jsonlines, .json
                                an object a line, or an array of objects
    .csv, .tsv                  a table, names of columns first
    .parquet                    a table, as the hub keeps datasets
    .gz, .bz2, .xz, .zst        behind any of these but .parquet: compressed

Parquet and Zstandard are read by pyarrow and zstandard, the extra qtool[datasets].
"""

import bz2
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from qtool.errors import SourceError, UnsupportedError

JSON = (".jsonl", ".ndjson", ".jsonlines", ".json")
TABLES = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
COMPRESSED = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}
AT_ONCE = 1 << 18  # bytes that are read together
# That are unpacked together: a few of them may be a million characters.
_STEPS = {".gz": 1 << 11, ".bz2": 1 << 11, ".xz": 1 << 11, ".zst": 1 << 8}
_MODULES = {PARQUET: "pyarrow", ".zst": "zstandard"}
_ARCHIVES = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".zip", ".7z", ".rar")
_ARROW = (".arrow", ".feather")
_MIXTURES = (".yaml", ".yml")
TO_PARQUET = "save it as Parquet (`to_parquet` of datasets, polars or pandas) and name that"
# How files begin that are something else than their names say, what they are, and the suffix of
# those that are to begin so. What text may begin with is told by how the file ends, too.
_BEGINNINGS = (
    (rb"version https://git-lfs\.github\.com/", "a pointer of Git LFS, not the file itself: fetch "
     "that with `git lfs pull`, or download it from its page", ""),
    (rb"ARROW1\0\0", f"Arrow: {TO_PARQUET}", ""),
    (rb"\xff{4}", f"Arrow, as datasets saves it: {TO_PARQUET}", ""),
    (rb"FEA1", f"Feather: {TO_PARQUET}", ""),
    (rb"PAR1", "Parquet: name it .parquet", PARQUET),
    (rb"PK\x03\x04", "a zip archive: unpack it, and name a file of it", ""),
    (rb"\x1f\x8b", "compressed by gzip: name it .gz", ".gz"),
    (rb"BZh[1-9]1AY&SY", "compressed by bzip2: name it .bz2", ".bz2"),
    (rb"\xfd7zXZ\0", "compressed by xz: name it .xz", ".xz"),
    (rb"\x28\xb5\x2f\xfd", "compressed by Zstandard: name it .zst", ".zst"),
)  # fmt: skip
_ENDS_SO_TOO = (b"FEA1", b"PAR1")


def kind_of(name: str | Path) -> str:
    """The suffix that says what a file holds, in small letters, without that of a compression."""
    path = Path(name)
    return Path(path.stem if _compression(path) else path).suffix.lower()


def is_plain(path: Path) -> bool:
    """Whether a file's bytes are those of its texts: neither compressed nor a table of numbers."""
    return not _compression(path) and kind_of(path) != PARQUET


def check_readable(name: str | Path) -> None:
    """UnsupportedError where a file of that name cannot be read here, whatever is in it."""
    path = Path(name)
    kind = kind_of(path)
    if kind in _ARCHIVES:
        raise UnsupportedError(f"{name}: an archive; unpack it, and name a file of it")
    if kind in _ARROW:
        raise UnsupportedError(f"{name}: Arrow is not read; {TO_PARQUET}")
    if _compression(path) and kind in (PARQUET, *_MIXTURES):
        why = "compressed by itself" if kind == PARQUET else "not read where it is compressed"
        raise UnsupportedError(f"{name}: {kind} is {why}; decompress the file and name that")
    for suffix in (path.suffix.lower(), kind):
        if suffix in _MODULES:
            module(_MODULES[suffix], name)


def check_beginning(path: Path) -> None:
    """SourceError where a file begins as no file of its name does, and it can be told what it is;
    UnsupportedError as above."""
    check_readable(path)
    try:
        with path.open("rb") as file:
            begin = file.read(64)
            file.seek(max(0, path.stat().st_size - 16))
            end = file.read()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None
    own = _compression(path) or kind_of(path)
    for pattern, said, suffix in _BEGINNINGS:
        at_the_end = pattern not in _ENDS_SO_TOO or end.endswith(pattern)
        if suffix != own and re.match(pattern, begin) and at_the_end:
            raise SourceError(f"{path}: is {said}")
    if not is_plain(path) and begin.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise SourceError(f"{path}: is a page (HTML), not a file: log in, and download it again")


def module(name: str, where: str | Path) -> Any:
    """One of those that read files of a kind; UnsupportedError where it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        raise UnsupportedError(
            f"{where}: is read by {name.partition('.')[0]}, which is not installed: "
            "pip install 'qtool[datasets]'"
        ) from None


def blocks(path: Path, read: Callable[[int], object] = lambda _: None) -> Iterator[bytes]:
    """What a file holds, decompressed; the last block is empty. read: is told of bytes of the
    file once what they hold was used. SourceError where it cannot be read, or breaks off."""
    found = _read(path, read)
    yield from _gathered(_decompressed(path, found)) if _compression(path) else found
    yield b""


def _read(path: Path, read: Callable[[int], object]) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while some := file.read(AT_ONCE):
                yield some
                read(len(some))
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None


def _decompressed(path: Path, file: Iterator[bytes]) -> Iterator[bytes]:
    """Of its blocks: one compressed stream or several, between and behind which zeros may be."""
    suffix = _compression(path)
    begin, error_of = _decompressor(suffix, path)
    stream, streams, within = begin(), 0, False
    for block in file:
        at = 0
        while at < len(block):
            if not within and block[at] == 0:
                at = len(block) - len(block[at:].lstrip(b"\0"))
                continue
            some = block[at : at + _STEPS[suffix]]
            try:
                yield from _unpacked(stream, some)
            except error_of as error:
                raise SourceError(
                    f"{path}: not {COMPRESSED[suffix]}, or damaged ({error}); fetch it again"
                ) from None
            at += len(some) - len(stream.unused_data)
            within = not stream.eof
            if not within:
                stream, streams = begin(), streams + 1
    if within or not streams:
        raise SourceError(f"{path}: ends within {COMPRESSED[suffix]} data; fetch it again")


def _gathered(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Small ones as one, without empty ones."""
    held, there = list[bytes](), 0
    for part in parts:
        held.append(part)
        there += len(part)
        if there >= AT_ONCE:
            yield b"".join(held)
            held, there = [], 0
    if there:
        yield b"".join(held)


def _unpacked(stream: Any, some: bytes) -> Iterator[bytes]:
    """What comes of some bytes: of bzip2 and xz, which may be anything, a part at a time."""
    if isinstance(stream, bz2.BZ2Decompressor | lzma.LZMADecompressor):
        yield stream.decompress(some, AT_ONCE)
        while not (stream.eof or stream.needs_input):
            yield stream.decompress(b"", AT_ONCE)
    else:
        yield stream.decompress(some)


def _decompressor(suffix: str, path: Path) -> tuple[Callable[[], Any], type[Exception]]:
    """What begins a stream, and the error of bytes that are none."""
    if suffix == ".gz":
        return partial(zlib.decompressobj, 16 + zlib.MAX_WBITS), zlib.error
    if suffix == ".bz2":
        return bz2.BZ2Decompressor, OSError
    if suffix == ".xz":
        return lzma.LZMADecompressor, lzma.LZMAError
    zstandard = module("zstandard", path)
    window = 1 << 31  # what `zstd --long=31` has
    return (
        lambda: zstandard.ZstdDecompressor(max_window_size=window).decompressobj(),
        zstandard.ZstdError,
    )


def _compression(path: Path) -> str:
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSED else ""
