"""Sizes that people type: 5GB, 500MB, 4GiB."""

import re

from qtool.errors import UnsupportedError

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_FACTORS |= {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(text: str) -> int:
    """Bytes in a size such as `5GB`, `500MB` or `4GiB`.

    Raises UnsupportedError for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or match[2] == "I" or float(match[1]) <= 0:
        raise UnsupportedError(f"size {text!r}: expected a number and a unit, such as 5GB or 4GiB")
    return int(float(match[1]) * _FACTORS[match[2]])
