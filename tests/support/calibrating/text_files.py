"""Files of texts in every form, and what is read of them."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow
import pyarrow.parquet
import zstandard

from qtool.texts.chats import Chat
from qtool.texts.source import Text, load_text

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
    source: str | None = None
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
