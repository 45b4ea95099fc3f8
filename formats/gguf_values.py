"""Metadata values of GGUF: twelve scalar kinds, strings, and arrays of either.

A file stores each value with its kind, and llama.cpp refuses a key of another kind than the one it
asks for; so a value here always carries its own. Source: the GGUF specification, ggml docs/gguf.md.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Kind(IntEnum):
    """gguf_metadata_value_type."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# struct's letters of the kinds of fixed size, little endian.
STRUCT = {
    Kind.UINT8: "B", Kind.INT8: "b", Kind.UINT16: "H", Kind.INT16: "h", Kind.UINT32: "I",
    Kind.INT32: "i", Kind.FLOAT32: "f", Kind.BOOL: "?", Kind.UINT64: "Q", Kind.INT64: "q",
    Kind.FLOAT64: "d",
}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """One metadata value; `element` is the kind of an array's elements, None for anything else."""

    kind: Kind
    value: Any  # bool, int, float, str, or a sequence of one of them
    element: Kind | None = None


def u32(value: int) -> Value:
    return Value(Kind.UINT32, value)


def f32(value: float) -> Value:
    """Rounded to what a file holds, so that a value read back equals the one written."""
    return Value(Kind.FLOAT32, struct.unpack("<f", struct.pack("<f", value))[0])


def boolean(value: bool) -> Value:
    return Value(Kind.BOOL, value)


def string(value: str) -> Value:
    return Value(Kind.STRING, value)


def array(element: Kind, values: Sequence[Any]) -> Value:
    return Value(Kind.ARRAY, values, element)


def strings(values: Sequence[str]) -> Value:
    return array(Kind.STRING, values)
