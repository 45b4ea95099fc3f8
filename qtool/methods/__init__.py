"""Methods turn a float matrix into codes, one file each.

NEEDS: frozenset[str]                                    statistics of the input it asks for
Options                                                  frozen; the recipe's table of its name
quantize(weight, stats, scheme, options) -> Result       a pure function, [out, in] float32
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from qtool.errors import QtoolError
from qtool.scheme import GroupQuant


@dataclass(frozen=True)
class Result:
    """What a method made, and what its user should be told about it."""

    quant: GroupQuant
    notes: tuple[str, ...] = ()


@contextmanager
def named(tensor: str) -> Iterator[None]:
    """Put a tensor's name before whatever is wrong with it."""
    try:
        yield
    except QtoolError as error:
        raise type(error)(f"{tensor}: {error}") from None
