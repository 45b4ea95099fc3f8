"""Text and values from a file, made safe to show."""

import json
import math
import sys
from typing import Any


def printable(text: str) -> str:
    """Text with everything escaped that could move a terminal's cursor or change its colours."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(nbytes: float) -> str:
    """Decimal megabytes; gigabytes from 10 on, kilobytes below one megabyte."""
    if nbytes < 1e6:
        return f"{nbytes / 1e3:.1f} kB"
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e10 else f"{nbytes / 1e6:.1f} MB"


def in_json(value: Any, most: int = 80) -> str:
    """A value as JSON has it (null, true, "text"), cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= most else f"{text[:most]}..."


def sayable(value: Any) -> Any:
    """A value of JSON; infinities and NaN, which Python reads in it and JSON lacks, as words."""
    if isinstance(value, list):
        return [sayable(one) for one in value]
    if isinstance(value, dict):
        return {key: sayable(one) for key, one in value.items()}
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_json(value: Any) -> None:
    """One line of JSON on stdout, written in pieces: of a list of numbers, whole text and what it
    is joined from would take twenty times the list's own text. ValueError for NaN and infinities.
    """
    for piece in json.JSONEncoder(allow_nan=False).iterencode(value):
        sys.stdout.write(piece)
    sys.stdout.write("\n")
    sys.stdout.flush()
