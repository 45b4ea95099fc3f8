"""The text that a model is calibrated on, before any tokenizer has seen it.

a text file             one text
JSONL, an array of      texts and chats (qtool.texts.records); texts that follow each other are
JSON, CSV, Parquet      joined by newlines, a chat is a piece of its own
a hub dataset           such a file of it
nothing                 Python's own help texts

Several of these are named by a YAML file (qtool.texts.mixture).

A text comes some at a time, since it may be longer than memory.
"""

import codecs
import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import cast
from urllib.parse import unquote

from qtool import hub
from qtool.errors import SourceError
from qtool.texts import datasets
from qtool.texts.chats import Chat
from qtool.texts.records import from_json, from_table, texts_and_chats
from qtool.texts.stored import (
    JSON,
    PARQUET,
    TABLES,
    TO_PARQUET,
    blocks,
    check_beginning,
    is_plain,
    kind_of,
)

TOPICS = "pydoc_data.topics"
# Tokens of a text that samples are chosen from: a minute's worth, or so often what they take.
MOST_READ, TIMES = 1 << 24, 64
# How addresses and paths name a file of a dataset: OWNER/NAME/FILE.
_DATASET = re.compile(
    r"^(?:hf://datasets/|https?://[^/]+/datasets/)?([\w.-]+/[\w.-]+)/"
    r"(?:(?:resolve|blob)/([^/]+)/)?([^?]+)"
)
_KINDS = (*JSON, *TABLES, PARQUET, ".txt")
_PATHS = (*_KINDS, ".text", ".md", ".yaml", ".yml")
_SEVERAL = "several files are named by a YAML file, `- FILE` in each line"
_LOOKED_AT = 1 << 25  # bytes of a file, before it is worth a run
Text = Iterable[str]  # of which a part follows the other
Piece = Text | Chat


@dataclass(frozen=True)
class Texts:
    """Texts and chats that are read anew by each who asks for them."""

    name: str  # "file", a hub dataset, or pydoc_data.topics: no path of this machine
    path: Path | None  # None: Python's help
    size: int  # bytes, or characters of Python's help

    @property
    def plain(self) -> bool:
        """Whether no more characters than `size` come."""
        return self.path is None or is_plain(self.path)

    def pieces(self, read: Callable[[int], object] = lambda _: None) -> Iterator[Piece]:
        """One after the other; a text is read before the piece behind it is asked for. SourceError
        where a file is not as expected. read: is told of bytes as they are read."""
        if self.path is None:
            yield (default_text(),)
            read(self.size)
        else:
            yield from _pieces(self.path, read)


def load_text(source: str | None) -> Texts:
    """A file, a hub dataset or (None) Python's help; SourceError, UnsupportedError."""
    if source is None or source == TOPICS:
        return Texts(TOPICS, None, len(default_text()))
    name, path = "file", _file(source)
    if path is None:
        dataset, _, file = source.partition(":")
        file = file or datasets.choose(dataset)
        name, path = f"{dataset}:{file}", datasets.download(dataset, file)
    return Texts(name, path, path.stat().st_size)


def most_read(tokens: int) -> int:
    """How many tokens of a text are read at most, where samples take so many of it."""
    return max(MOST_READ, TIMES * tokens)


def check_text(source: str | None) -> None:
    """SourceError for a text that can be told to be of no use without model, network and torch,
    by its first 32 MiB."""
    if source is None or source == TOPICS or (path := _file(source)) is None:
        return
    read = said = 0

    def count(nbytes: int) -> None:
        nonlocal read
        read += nbytes

    for piece in _pieces(path, count):
        for part in (repr(piece.messages),) if isinstance(piece, Chat) else piece:
            said += len(part)
            if max(read, said) > _LOOKED_AT:
                return


def is_dataset(source: str) -> bool:
    """Whether a source is written like a hub dataset: owner/name or owner/name:FILE; what ends like
    a file of texts is a path."""
    dataset, colon, _ = source.partition(":")
    return hub.is_hub_id(dataset) and (bool(colon) or kind_of(dataset) not in _PATHS)


def on_hub(source: str | None) -> bool:
    """Whether load_text() would ask the hub for it."""
    return source not in (None, TOPICS) and not Path(source).exists() and is_dataset(source)


def _file(source: str) -> Path | None:
    """The file of that name; None where only a hub dataset can be meant. SourceError."""
    path = Path(source)
    if path.is_file():
        return path
    if source and path.is_dir():
        raise SourceError(f"{path}: a folder; {_of_folder(path)}")
    if source == "-" or (source and path.exists()):
        raise SourceError(
            f"{source}: a pipe or a device, and a text is read more than once; write it to a file "
            "and name that"
        )
    if is_dataset(source):
        return None
    like = _like(source)
    raise SourceError(
        f"{source or repr(source)}: no such file, and no hub dataset id (owner/name or "
        "owner/name:FILE)"
        + (f"; {like} would be one" if like else "")
        + (f"; {_SEVERAL}" if "*" in source or "," in source else "")
    )


def _like(source: str) -> str | None:
    """The id of what is written as an address or a path, if it may be a dataset's."""
    found = _DATASET.search(source)
    if found is None or not hub.is_hub_id(found[1]):
        return None
    revision = unquote(found[2] or "main")
    return f"{found[1]}{'' if revision == 'main' else f'@{revision}'}:{found[3]}"


def _of_folder(path: Path) -> str:
    """What to name instead."""
    if any(path.glob("**/*.arrow")):
        return f"datasets saved it: {TO_PARQUET}"
    usable = sorted(one.name for one in path.iterdir() if kind_of(one) in _KINDS)
    if not usable:
        return "--calibration wants a file: text, JSON, CSV or Parquet"
    return f"name a file of it, such as {usable[0]}; {_SEVERAL}"


def text_file(source: str | Path) -> Path:
    """The file of a text to measure on: of a hub dataset where owner/name:FILE names no file here,
    through the hub's cache. SourceError, UnsupportedError."""
    dataset, _, file = str(source).partition(":")
    return datasets.download(dataset, file) if file and on_hub(str(source)) else Path(source)


def default_text() -> str:
    """What `help()` knows of the language: about 460,000 characters on every machine."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_text(path: Path, *, raw: bool = False) -> Iterator[str]:
    """A text file, or the `text` fields of a JSONL file, joined by newlines; SourceError for chats.

    Ends of lines become newlines, as Python reads text, unless `raw`, as llama.cpp reads it.
    """
    for piece in _pieces(path, raw=raw):
        if isinstance(piece, Chat):
            raise SourceError(
                f"{piece.where}: is a chat, which --calibration takes; here expected is an object "
                "whose `text` is a string"
            )
        yield from piece


def _pieces(
    path: Path, read: Callable[[int], object] = lambda _: None, raw: bool = False
) -> Iterator[Piece]:
    check_beginning(path)
    kind = kind_of(path)
    if kind == PARQUET:
        from qtool.texts.parquet import rows

        records = rows(path, read)
    elif kind in TABLES:
        records = from_table(path, _decoded(path, read, raw))
    elif kind in JSON:
        records = from_json(path, _decoded(path, read, raw))
    else:
        yield _decoded(path, read, raw)
        return
    for is_chat, some in groupby(texts_and_chats(records), lambda one: isinstance(one, Chat)):
        if is_chat:
            yield from cast("Iterator[Chat]", some)
        else:
            yield _joined(cast("Iterator[str]", some))


def _decoded(path: Path, read: Callable[[int], object], raw: bool) -> Iterator[str]:
    utf8 = codecs.getincrementaldecoder("utf-8")()
    decoder = utf8 if raw else io.IncrementalNewlineDecoder(utf8, translate=True)
    begun = 0  # bytes that were read before
    for some in blocks(path, read):
        pending = len(utf8.getstate()[0])
        try:
            text = decoder.decode(some, final=not some)
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{path}: byte {begun - pending + error.start} is not UTF-8; a text has to be UTF-8"
            ) from None
        if not begun and not raw:
            text = text.removeprefix("\ufeff")  # a byte-order mark, as editors of Windows write it
        begun += len(some)
        yield text


def _joined(texts: Iterator[str]) -> Iterator[str]:
    yield next(texts, "")
    for text in texts:
        yield "\n"
        yield text
