"""Parts of GGUF files that lie."""

import struct
import time
from pathlib import Path

import pytest

from qtool.errors import FormatError
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import Kind
from support.gguf.gguf_bytes import Gguf, entry, text

ARCH = entry("general.architecture", Kind.STRING, "llama")
KEY = text("k")
U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
HUGE = 2**64 - 1


def alignment(value: int, kind: int = Kind.UINT32) -> bytes:
    return entry("general.alignment", kind, value)


def of_infos(*infos: bytes, data: int = 32) -> bytes:
    return bytes(Gguf(infos=infos, data=bytes(data)))


def of_entries(*entries: bytes) -> bytes:
    return bytes(Gguf(entries=[ARCH, *entries]))


def refusal(path: Path) -> tuple[str, float]:
    """The sentence and the seconds of CPU it took."""
    start = time.process_time()
    with pytest.raises(FormatError) as caught:
        GgufFile.open(path)
    return str(caught.value), time.process_time() - start
