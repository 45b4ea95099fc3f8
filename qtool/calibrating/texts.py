"""The text that a model is calibrated on, before any tokenizer has seen it.

a text file        one text
JSONL              a line is {"text": ...}, {"prompt": ..., "completion": ...}, one behind the
                   other, or a chat (qtool.calibrating.chats). Texts that follow each other are
                   joined by newlines; a chat is a piece of its own
CSV, TSV           a row is {"text": ...} or {"prompt": ..., "completion": ...}, by the names in the
                   first line; joined as those of JSONL
a hub dataset      such a file of it
nothing            Python's own help texts

Several of these are named by a YAML file (qtool.calibrating.mixture).

A text comes some at a time, since it may be longer than memory.
"""

import codecs
import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from qtool import hub
from qtool.calibrating.chats import PAIR, Chat, chat_of
from qtool.errors import SourceError, UnsupportedError

JSONL = (".jsonl", ".ndjson", ".json")
_TEXT = (".txt", ".text", ".md", *JSONL)
_TABLES = {".csv": ",", ".tsv": "\t"}
_LONGEST_CELL = 1 << 30  # characters
TOPICS = "pydoc_data.topics"
_AT_ONCE = 1 << 18  # bytes that are read together
Text = Iterable[str]  # of which a part follows the other
Piece = Text | Chat


@dataclass(frozen=True)
class Texts:
    """Texts and chats that are read anew by each who asks for them."""

    name: str  # "file", a hub dataset, or pydoc_data.topics: no path of this machine
    path: Path | None  # None: Python's help
    size: int  # bytes, or characters of Python's help

    def pieces(self, read: Callable[[int], object] = lambda _: None) -> Iterator[Piece]:
        """One after the other; a text is read before the piece behind it is asked for. SourceError
        where a file is not as expected. read: is told of bytes as they are read."""
        if self.path is None:
            yield (default_text(),)
            read(self.size)
        else:
            yield from _pieces(self.path, _decoded(self.path, read))


def load_text(source: str | None) -> Texts:
    """A file, a hub dataset or (None) Python's help; SourceError, UnsupportedError."""
    if source is None or source == TOPICS:
        return Texts(TOPICS, None, len(default_text()))
    name, path = "file", _file(source)
    if path is None:
        dataset, _, file = source.partition(":")
        name, path = source, _download(dataset, file)
    return Texts(name, path, path.stat().st_size)


def check_text(source: str | None) -> None:
    """SourceError for a text that can be told to be of no use without model, network and torch."""
    if source is not None and source != TOPICS and (path := _file(source)) is not None:
        for piece in _pieces(path, _decoded(path)):
            if not isinstance(piece, Chat):
                for _ in piece:
                    pass


def is_dataset(source: str) -> bool:
    """Whether a source is written like a hub dataset: owner/name or owner/name:FILE."""
    return hub.is_hub_id(source.partition(":")[0])


def _file(source: str) -> Path | None:
    """The file of that name; None where only a hub dataset can be meant. SourceError."""
    path = Path(source)
    if path.is_file():
        return path
    if path.exists():
        raise SourceError(f"{path}: a folder; --calibration wants a text or JSONL file")
    if is_dataset(source):
        return None
    raise SourceError(
        f"{source}: no such file, and no hub dataset id (owner/name or owner/name:FILE)"
    )


def default_text() -> str:
    """What `help()` knows of the language: about 460,000 characters on every machine."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_text(path: Path, *, raw: bool = False) -> Iterator[str]:
    """A text file, or the `text` fields of a JSONL file, joined by newlines; SourceError for chats.

    Ends of lines become newlines, as Python reads text, unless `raw`, as llama.cpp reads it.
    """
    for piece in _pieces(path, _decoded(path, raw=raw)):
        if isinstance(piece, Chat):
            raise SourceError(
                f"{piece.where}: is a chat, which --calibration takes; here expected is an object "
                "whose `text` is a string"
            )
        yield from piece


def _decoded(
    path: Path, read: Callable[[int], object] = lambda _: None, raw: bool = False
) -> Iterator[str]:
    utf8 = codecs.getincrementaldecoder("utf-8")()
    decoder = utf8 if raw else io.IncrementalNewlineDecoder(utf8, translate=True)
    begun = 0  # bytes that were read before
    for some in _blocks(path):
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
        read(len(some))


def _blocks(path: Path) -> Iterator[bytes]:
    """Of a file, the last one empty; SourceError where it cannot be read."""
    try:
        with path.open("rb") as file:
            while some := file.read(_AT_ONCE):
                yield some
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None
    yield b""


def _pieces(path: Path, text: Iterator[str]) -> Iterator[Piece]:
    if path.suffix.lower() in _TABLES:
        yield _joined(_rows(path, text))
        return
    if path.suffix.lower() not in JSONL:
        yield text
        return
    for is_chat, some in groupby(_records(path, text), lambda record: isinstance(record, Chat)):
        if is_chat:
            yield from cast("Iterator[Chat]", some)
        else:
            yield _joined(cast("Iterator[str]", some))


def _joined(texts: Iterator[str]) -> Iterator[str]:
    yield next(texts, "")
    for text in texts:
        yield "\n"
        yield text


def _lines(text: Iterator[str]) -> Iterator[str]:
    begun: list[str] = []
    for some in text:
        first, *more = some.split("\n")
        begun.append(first)
        for line in more:
            yield "".join(begun)
            begun = [line]
    yield "".join(begun)


def _records(path: Path, text: Iterator[str]) -> Iterator[str | Chat]:
    for number, line in enumerate(_lines(text), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise SourceError(
                f"{where}: not JSON; expected JSONL, one object a line with `text` or `messages`"
            ) from None
        plain = _text_of(record)
        found = chat_of(record, where) if plain is None else plain
        if found is None:
            keys = ", ".join(record)[:80] if isinstance(record, dict) else ""
            if isinstance(record, list):
                keys = "an array: write one object a line"
            elif isinstance(record, dict) and {"instruction", "output"} <= record.keys():
                keys += ": name instruction (and input) prompt, and output completion"
            raise SourceError(
                f"{where}: expected an object whose `text` is a string (or `prompt` and "
                "`completion` are), or a chat whose `messages` (or `conversations`) are a list"
                + (f"; found {keys}" if keys else "")
            )
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise SourceError(
                f"{where}: its text has half of a surrogate pair, which is no character"
            ) from None
        yield found


def _rows(path: Path, text: Iterator[str]) -> Iterator[str]:
    """The texts of a table."""
    csv.field_size_limit(_LONGEST_CELL)
    lines = (line + "\n" for line in _lines(text))
    rows = csv.reader(lines, delimiter=_TABLES[path.suffix.lower()], strict=True)
    try:
        names = [name.removeprefix("\ufeff") for name in next(rows, [])]
        if _text_of(dict.fromkeys(names, "")) is None or len({*names}) < len(names):
            raise SourceError(
                f"{path}: expected a column named text (or prompt and completion), once; found "
                f"{', '.join(names)[:80]}; a file named .txt is read as it is"
            )
        for row in filter(None, rows):  # an empty line is none
            if len(row) != len(names):
                raise SourceError(
                    f"{path}:{rows.line_num}: {len(row)} columns, expected {len(names)}; what has "
                    "a separator in it has to stand in quotes"
                )
            yield str(_text_of(dict(zip(names, row, strict=True))))
    except csv.Error as error:
        raise SourceError(f"{path}:{rows.line_num}: not CSV ({error})") from None


def _text_of(record: Any) -> str | None:
    """What a line says that is no chat; None for all others."""
    if not isinstance(record, dict):
        return None
    if isinstance(text := record.get("text"), str):
        return text
    parts = [record.get(key) for key in PAIR]
    said = [part for part in parts if isinstance(part, str)]
    return "".join(said) if len(said) == len(parts) else None


def _download(dataset: str, file: str) -> Path:
    """One text file of a hub dataset, through the hub's cache."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub import errors as hub_errors

    repository, _, revision = dataset.partition("@")
    where = f"{dataset}: dataset on the hub (there is no such file here)"
    transport = cast("tuple[type[Exception], ...]", hub_errors.HfHubHTTPError.__bases__)
    try:
        if not file:
            names = HfApi().list_repo_files(
                repository, repo_type="dataset", revision=revision or None
            )
            file = _choose(where, names)
        return Path(
            hf_hub_download(repository, file, repo_type="dataset", revision=revision or None)
        )
    except (hub_errors.RepositoryNotFoundError, hub_errors.HFValidationError):
        raise SourceError(f"{where} does not exist, or is private; check the spelling") from None
    except hub_errors.EntryNotFoundError as error:
        reason = (
            "cannot be reached, and the cache has no copy; check the network and HF_HUB_OFFLINE"
            if isinstance(error, hub_errors.LocalEntryNotFoundError)
            else f"has no file {file!r}"
        )
        raise SourceError(f"{where} {reason}") from None
    except transport as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise SourceError(f"{where} cannot be downloaded: {said}") from None


def _choose(where: str, names: list[str]) -> str:
    """The text file of a dataset: of several, the first in order that says `train`, if any."""
    usable = sorted(
        name
        for name in names
        if name.lower().endswith(_TEXT) and not name.lower().startswith(("readme", "license"))
    )
    usable = [name for name in usable if Path(name).suffix.lower() != ".json"] or usable
    if not usable:
        raise UnsupportedError(
            f"{where} has no text or JSONL file (it has {', '.join(sorted(names)[:4])}); this "
            "version reads no Parquet: save its text as a file and name that"
        )
    return next((name for name in usable if "train" in name.lower()), usable[0])
