"""What readers are tried with and asked, whatever they read."""

import json
from collections.abc import Callable
from typing import Any

import lies

LONG = 2_000_000  # bytes of the inputs of readers of JSON, for what grows with the text


def quietly(read: Callable[[], Any]) -> Any:
    """What `read` gives; None where it refuses."""
    from qtool.errors import QtoolError

    try:
        return read()
    except QtoolError as error:
        assert len(str(error)) < 4000, error
        return None


def tellable(value: Any) -> None:
    """What commands print as JSON, in pieces as they do; ValueError for NaN and infinities."""
    for _ in json.JSONEncoder(allow_nan=False).iterencode(value):
        pass


def prefixed(lie: lies.Lie) -> lies.Lie:
    """A lie about what follows the first byte, which says what kind of input it is."""

    def told(data: bytes, choose: Any) -> bytes:
        first = bytes([choose.randrange(256)]) if not data or choose.random() < 0.03 else data[:1]
        return first + lie(data[1:], choose)

    return told
