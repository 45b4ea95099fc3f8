"""GGUF files put together byte by byte, so that a test can also write ones that lie."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qtool.formats.gguf_values import STRUCT, Kind


def text(value: str | bytes, length: int | None = None) -> bytes:
    """A string; with `length`, one that says another length than it has."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def payload(kind: int, value: Any) -> bytes:
    """A value without its kind."""
    if kind == Kind.STRING:
        return text(value)
    return struct.pack("<" + STRUCT[Kind(kind)], value)


def entry(key: str | bytes, kind: int, value: Any) -> bytes:
    """A metadata entry of one value; bytes are taken as they are."""
    body = value if isinstance(value, bytes) and kind != Kind.STRING else payload(kind, value)
    return text(key) + struct.pack("<I", kind) + body


def array(key: str, element: int, values: Sequence[Any] | bytes, count: int | None = None) -> bytes:
    """A metadata entry of an array; with `count`, one that says another count than it has."""
    known = isinstance(values, bytes)
    body = values if isinstance(values, bytes) else b"".join(payload(element, v) for v in values)
    stated = len(values) if count is None else count
    assert count is not None or not known
    return text(key) + struct.pack("<IIQ", Kind.ARRAY, element, stated) + body


def info(
    name: str | bytes, shape: Sequence[int], kind: int = 0, offset: int = 0, dims: int | None = None
) -> bytes:
    """A tensor's entry; shape as numpy has it."""
    extents = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    dims = len(shape) if dims is None else dims
    return text(name) + struct.pack("<I", dims) + extents + struct.pack("<IQ", kind, offset)


@dataclass(frozen=True)
class Gguf:
    """A file to be; the counts are what the lists hold unless stated."""

    entries: Sequence[bytes] = (entry("general.architecture", Kind.STRING, "llama"),)
    infos: Sequence[bytes] = (info("x", [2, 4]),)
    data: bytes = bytes(32)
    magic: bytes = b"GGUF"
    version: int = 3
    tensors: int | None = None
    keys: int | None = None
    alignment: int = 32
    tail: bytes = field(default=b"")

    def header(self) -> bytes:
        counts = (
            len(self.infos) if self.tensors is None else self.tensors,
            len(self.entries) if self.keys is None else self.keys,
        )
        head = self.magic + struct.pack("<IQQ", self.version, *counts)
        return head + b"".join(self.entries) + b"".join(self.infos)

    def __bytes__(self) -> bytes:
        head = self.header()
        return head + bytes(-len(head) % self.alignment) + self.data + self.tail
