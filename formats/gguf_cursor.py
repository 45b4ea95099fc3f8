"""Reading the header of a GGUF file in order, no further than it is asked for.

Of a string no more is believed than what the size of the file and the limits here allow; see
`gguf_header` for the grammar.
"""

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from qtool.errors import FormatError

MAX_HEADER_BYTES = 32_000_000  # a vocabulary of 262,144 tokens with its merges takes 16 MB
MAX_STRING_BYTES = 4_000_000  # all keys, names and single strings together
MAX_ARRAY_STRINGS = 2_000_000  # all arrays together; such a vocabulary has 780,000
READ_AHEAD = 960_000  # bytes asked for at a time

Read = Callable[[int, int], bytes]  # (offset, count) -> `count` bytes, or fewer at a file's end


def begins_as_gguf(path: Path) -> bool:
    """Whether a file begins as they do; one that cannot be read does not."""
    with suppress(OSError):
        if path.is_file():  # opening a pipe would wait for its writer
            with path.open("rb") as file:
                return file.read(4) == b"GGUF"
    return False


class Cursor:
    """A position in the header; bytes are read from the file as far as they are asked for."""

    def __init__(self, read: Read, size: int, where: str) -> None:
        self.read, self.size, self.where = read, size, where
        self.data = bytearray()
        self.position = 0
        self.certain = 0  # the header does not end before this byte, as far as is known
        self.strings = 0  # bytes of strings decoded
        self.elements = 0  # strings in arrays

    def error(self, message: str) -> FormatError:
        return FormatError(f"{self.where}: {message}")

    def take(self, count: int, what: str) -> int:
        """Step over `count` bytes, which are then in `data`; returns where they begin."""
        begin = self.position
        end = begin + count
        if end > len(self.data):
            self._read_to(end, what)
        self.position = end
        return begin

    def _read_to(self, end: int, what: str) -> None:
        if end > self.size:
            raise self.error(
                f"{what} would end at byte {end} of a file of {self.size} bytes; "
                "the file is truncated or damaged: fetch it again"
            )
        if end > MAX_HEADER_BYTES:
            raise self.error(
                f"{what} would end at byte {end}; at most {MAX_HEADER_BYTES} bytes of header are "
                "read, so the file is damaged or no model"
            )
        while len(self.data) < end:
            at = len(self.data)
            limit = min(self.size, MAX_HEADER_BYTES)
            wanted = max(end - at, self.certain - at, READ_AHEAD)
            chunk = self.read(at, min(wanted, limit - at))
            if not chunk:
                raise self.error(f"{what} cannot be read: the file became shorter meanwhile")
            self.data += chunk

    def u32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack_from("<Q", self.data, self.take(8, what))[0])

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> bytes:
        """The bytes of a string of at most `limit` bytes."""
        length = self.u64(what)
        if self.position + length > self.size:
            self.take(length, what)
        self.strings += length
        if length > limit:
            raise self.error(f"{what} is {length} bytes long; at most {limit} are read")
        if self.strings > MAX_STRING_BYTES:
            raise self.error(
                f"{what} makes {self.strings} bytes of keys, names and texts; at most "
                f"{MAX_STRING_BYTES} are read"
            )
        begin = self.take(length, what)
        return bytes(self.data[begin : begin + length])

    def label(self, what: str, limit: int) -> str:
        """A key or a tensor's name."""
        raw = self.string(what, limit)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} is {raw[:64]!r}, which is not UTF-8") from None
        if not text or "\0" in text:
            raise self.error(f"{what} is {text[:64]!r}; expected a name without null characters")
        return text

    def skip_strings(self, count: int, what: str) -> None:
        """Step over an array of strings."""
        self.elements += count
        if self.elements > MAX_ARRAY_STRINGS:
            raise self.error(
                f"{what} has {count} strings; at most {MAX_ARRAY_STRINGS} are read of all arrays"
            )
        unpack = struct.Struct("<Q").unpack_from
        done = 0
        while done < count:
            self.certain = self.position + 8 * (count - done)
            self.take(8, what)
            self.position -= 8
            data, position = self.data, self.position
            try:
                for number in range(done, count):  # noqa: B007  - used where it stops
                    position += 8 + unpack(data, position)[0]
                done = count
            except (struct.error, OverflowError):
                done = number  # its length lies behind what has been read
            # The last length may point anywhere, and what it points to may not be read yet.
            self.position = min(position, len(data))
            self.take(position - self.position, what)
