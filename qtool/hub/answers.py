"""What a server answers to a request for bytes of a file, checked before a byte of it is read.

    GET path      Range: bytes=first-last
    206           Content-Range: bytes first-last/total

A server that answers with the whole file, with another range, with a file of another length than
before or with compressed bytes is refused. Source: RFC 9110, sections 14 and 15.
"""

from __future__ import annotations

import http.client
import re
import time
from dataclasses import dataclass

from qtool.errors import FormatError, SourceError

_PASSING = (408, 425, 429, 500, 502, 503, 504)
_MAX_PAUSE = 5.0  # seconds before the second attempt
_PIECE = 1 << 16
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)


class RefusedError(SourceError):
    """The server gives nothing to us; `code` is what a hub says why."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class MissingError(RefusedError):
    """There is nothing at this address."""


class PassingError(Exception):
    """A failure that may pass, and is worth a second attempt after some seconds."""

    def __init__(self, why: str, pause: float = 0.0) -> None:
        super().__init__(why)
        self.pause = pause


@dataclass(frozen=True)
class Wish:
    """A range of a file, or a whole one (first is None) of at most `count` bytes."""

    first: int | None
    count: int
    total: int | None = None  # the length that the file had before


def shown(url: str) -> str:
    """An address without what may be secret: its query and its user."""
    scheme, mark, rest = url.partition("://")
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}"


def announced(
    where: str, response: http.client.HTTPResponse, wish: Wish
) -> tuple[int | None, int | None]:
    """From the head of an answer: bytes of its body, and of the whole file, where it says so."""
    status, length = response.status, response.length
    if status not in (200, 206):
        if status == 416 and wish.first == 0 and wish.total is None:
            return None, 0  # an empty file has no first byte; what comes is a page about that
        raise _refusal(where, response, wish)
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise SourceError(f"{where}: the server sends it compressed ({encoding[:40]}), unasked")
    if wish.first is None:
        if status == 206:
            raise SourceError(f"{where}: the server answers with a part, and was asked for all")
        if length is not None and length > wish.count:
            raise SourceError(f"{where}: {length} bytes; at most {wish.count} are fetched")
        return length, length
    if status == 200:
        if wish.first or length is None or length > wish.count:
            size = "" if length is None else f" of {length} bytes"
            raise SourceError(
                f"{where}: the server does not answer range requests and would send the whole "
                f"file{size}; download it, and inspect the copy"
            )
        return length, length
    return _part(where, response, wish.first, wish)


def _part(
    where: str, response: http.client.HTTPResponse, start: int, wish: Wish
) -> tuple[int, int]:
    """The same of a part of a file."""
    stated = response.headers.get("Content-Range", "")
    asked = f"{where}: asked for {wish.count} bytes from byte {start} on"
    found = _RANGE.fullmatch(stated)
    if found is None:
        raise SourceError(f"{asked}, the server answers with the range {stated[:80]!r}")
    first, last, total = map(int, found.groups())
    if wish.total not in (None, total):
        raise FormatError(
            f"{where}: was {wish.total} bytes long and now is {total}: it changed meanwhile, try "
            "again"
        )
    if first != start or last != min(first + wish.count, total) - 1:
        raise SourceError(f"{asked}, the server answers with {stated!r}")
    if response.length not in (None, last - first + 1):
        raise SourceError(
            f"{where}: the server answers with {stated!r} and a body of {response.length} bytes"
        )
    return last - first + 1, total


def _refusal(where: str, response: http.client.HTTPResponse, wish: Wish) -> Exception:
    status, code = response.status, response.headers.get("X-Error-Code", "")
    if status in _PASSING:
        after = response.headers.get("Retry-After", "")
        pause = float(after) if re.fullmatch(r"\d{1,6}", after, re.ASCII) else 1.0
        return PassingError(f"status {status}", min(pause, _MAX_PAUSE))
    if status in (401, 403, 407, 451):
        return RefusedError(f"{where}: the server refuses it (status {status})", code)
    if status in (404, 410):
        return MissingError(f"{where}: not there (status {status})", code)
    if status == 416:
        return FormatError(f"{where}: ends before byte {wish.first}, and should be longer")
    return SourceError(f"{where}: the server answers with status {status}; expected the file")


def body(
    where: str,
    response: http.client.HTTPResponse,
    expected: int | None,
    most: int,
    deadline: float,
) -> bytes:
    """The body, of exactly `expected` bytes, or of at most `most`."""
    data = bytearray()
    limit = most if expected is None else expected
    while len(data) <= limit and (piece := response.read1(_PIECE)):
        data += piece
        if time.monotonic() > deadline:
            raise SourceError(f"{where}: too slow; {len(data)} of {limit} bytes came in time")
    if len(data) > limit:
        raise SourceError(f"{where}: longer than the {limit} bytes that were to come")
    if expected is not None and len(data) < expected:
        raise PassingError(f"the connection broke off after {len(data)} of {expected} bytes")
    if response.length == 0:
        response.read()  # marks the answer as read, and the connection as free
    return bytes(data)
