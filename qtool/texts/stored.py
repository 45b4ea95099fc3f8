"""What kind of texts a file holds, by its name, and its bytes, which may be compressed.

    NAME.txt, .md, any other    one text
    .jsonl, .ndjson, .json      an object a line, or an array of objects
    .csv, .tsv                  a table, names of columns first
    .parquet                    a table, as the hub keeps datasets
    .gz, .bz2, .xz, .zst        behind any of these but .parquet: compressed

Parquet and Zstandard are read by pyarrow and zstandard, the extra qtool[datasets].
"""

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from qtool.errors import SourceError, UnsupportedError

JSON = (".jsonl", ".ndjson", ".json")
TABLES = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
COMPRESSED = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}
AT_ONCE = 1 << 18  # bytes that are read together
_MODULES = {PARQUET: "pyarrow", ".zst": "zstandard"}


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
    if kind_of(path) == PARQUET and _compression(path):
        raise UnsupportedError(
            f"{name}: Parquet is compressed by itself; decompress the file and name that"
        )
    for suffix in (path.suffix.lower(), kind_of(path)):
        if suffix in _MODULES:
            module(_MODULES[suffix], name)


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
    check_readable(path)
    found = _read(path, read)
    yield from _decompressed(path, found) if _compression(path) else found
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
    for rest in file:
        while rest := rest if within else rest.lstrip(b"\0"):
            try:
                held = stream.decompress(rest)
            except error_of as error:
                raise SourceError(
                    f"{path}: not {COMPRESSED[suffix]}, or damaged ({error}); fetch it again"
                ) from None
            within, rest = not stream.eof, stream.unused_data
            if not within:
                stream, streams = begin(), streams + 1
            yield held
    if within or not streams:
        raise SourceError(f"{path}: ends within {COMPRESSED[suffix]} data; fetch it again")


def _decompressor(suffix: str, path: Path) -> tuple[Callable[[], Any], type[Exception]]:
    """What begins a stream, and the error of bytes that are none."""
    if suffix == ".gz":
        return partial(zlib.decompressobj, 16 + zlib.MAX_WBITS), zlib.error
    if suffix == ".bz2":
        return bz2.BZ2Decompressor, OSError
    if suffix == ".xz":
        return lzma.LZMADecompressor, lzma.LZMAError
    zstandard = module("zstandard", path)
    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError


def _compression(path: Path) -> str:
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSED else ""
