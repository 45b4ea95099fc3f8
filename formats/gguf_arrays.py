"""Arrays of a GGUF header, left as the file stores them until somebody asks for an element.

    numbers := element[count], little endian, without padding
    strings := (length:u64le  bytes[length])[count]

A vocabulary has hundreds of thousands of tokens and merges; most commands only copy them, and one
that copies needs no Python object for each. Strings are decoded as UTF-8 with `surrogateescape`:
a token of llama.cpp may be any bytes, and encoding it the same way gives those bytes back.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from qtool.formats.gguf_values import STRUCT, Kind

_LENGTH = struct.Struct("<Q").unpack_from


class StoredArray(Sequence[Any]):
    """An array inside a header; equal to any sequence of the same elements.

    Looking at one number, or at the first elements, decodes nothing else; anything more decodes the
    whole array once and keeps it.
    """

    def __init__(self, header: bytes | bytearray, first: int, last: int, kind: Kind, count: int):
        """Elements of `kind` in header[first:last]; their bounds have been checked."""
        self._header, self._first, self._last = header, first, last
        self.kind, self._count = kind, count
        self._items: Sequence[Any] | None = None

    @property
    def stored(self) -> bytes:
        """The elements as in the file, what a writer puts behind the kind and the count."""
        return bytes(memoryview(self._header)[self._first : self._last])

    def first(self, count: int) -> list[Any]:
        """The first elements, at most `count`."""
        count = min(count, self._count)
        if self._items is not None:
            return list(self._items[:count])
        if self.kind is Kind.STRING:
            return [raw.decode("utf-8", "surrogateescape") for raw in self.raw_strings(count)]
        form = f"<{count}{STRUCT[self.kind]}"
        return list(struct.unpack_from(form, self._header, self._first))

    def raw_strings(self, count: int | None = None) -> Iterator[bytes]:
        """The strings of a string array as bytes, one after another, at most `count` of them."""
        position, header = self._first, self._header
        for _ in range(self._count if count is None else min(count, self._count)):
            (length,) = _LENGTH(header, position)
            position += 8 + length
            yield bytes(header[position - length : position])

    def raw_strings_at(self, indexes: Iterable[int]) -> dict[int, bytes]:
        """Some strings of a string array, found in one pass up to the last of them."""
        position, header, here = self._first, self._header, 0
        found: dict[int, bytes] = {}
        for index in sorted(set(indexes)):
            if not 0 <= index < self._count:
                raise IndexError(f"element {index} of an array of {self._count}")
            for _ in range(here, index):
                position += 8 + _LENGTH(header, position)[0]
            here = index
            (length,) = _LENGTH(header, position)
            found[index] = bytes(header[position + 8 : position + 8 + length])
        return found

    def _all(self) -> Sequence[Any]:
        if self._items is None:
            self._items = self.first(self._count)
        return self._items

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if self._items is None and isinstance(index, int) and self.kind is not Kind.STRING:
            at = index + self._count if index < 0 else index
            if not 0 <= at < self._count:
                raise IndexError(f"element {index} of an array of {self._count}")
            form = "<" + STRUCT[self.kind]
            return struct.unpack_from(form, self._header, self._first + at * struct.calcsize(form))[
                0
            ]
        return self._all()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StoredArray):
            return self.kind is other.kind and self.stored == other.stored
        if isinstance(other, Sequence) and not isinstance(other, str | bytes):
            return len(other) == self._count and all(
                mine == theirs for mine, theirs in zip(self._all(), other, strict=True)
            )
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        dots = ", ..." if self._count > 3 else ""
        shown = ", ".join(map(repr, self.first(3)))
        return f"StoredArray({self.kind.name}[{self._count}]: {shown}{dots})"
