"""Scales that folds put into tensors, as powers of two: a record that can be kept and done again.

    w'_ij = w_ij * 2^(columns_j - rows_i)            a norm that multiplies by 1 + w:
                                                     w'_i = (1 + w_i) * 2^(-rows_i) - 1

No number of 16 bits loses a bit thereby. As JSON:

    {"exponents": base64 of int8, "lengths": [n, ...], "tensors": {NAME: [columns, rows, plus_one]}}

exponents: one vector after another, of these lengths; columns, rows: the number of one, or null.
A fold's readers have as columns the vector that its producer has as rows.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.errors import UnsupportedError

Exponents = NDArray[np.int8]
_LARGEST = 60  # of one fold; of two that meet in a tensor 120, which float32 holds


@dataclass(frozen=True)
class Factor:
    """What a transform multiplied the rows, or the columns, of a tensor by."""

    name: str
    by: NDArray[np.float32]  # [rows] or [columns]
    columns: bool
    plus_one: bool = False  # a norm that multiplies by 1 + weight


@dataclass(frozen=True)
class Scaled:
    """What becomes of one tensor."""

    columns: Exponents | None = None
    rows: Exponents | None = None  # that divide
    plus_one: bool = False

    def of(self, values: NDArray[np.float32], first: int) -> NDArray[np.float32]:
        """Rows of the tensor from `first` on, scaled."""
        if self.columns is not None:
            values = values * _powers(self.columns)
        if self.rows is None:
            return values
        by = _powers(-self.rows[first : first + len(values)])
        by = by.reshape(-1, *[1] * (values.ndim - 1))
        if self.plus_one:
            return ((values.astype(np.float64) + 1) * by - 1).astype(np.float32)
        return values * by


Record = Mapping[str, Scaled]  # by the checkpoint's names


def _powers(exponents: Exponents) -> NDArray[np.float32]:
    return np.ldexp(np.float32(1), exponents.astype(np.int32))


def _sum(exponents: Exponents, more: Exponents, name: str) -> Exponents:
    whole = exponents.astype(np.int16) + more.astype(np.int16)
    if np.abs(whole).max(initial=0) > _LARGEST:
        raise UnsupportedError(
            f"{name}: transforms would scale it by more than 2^{_LARGEST} together; leave one out"
        )
    return whole.astype(np.int8)


def record_of(factors: Iterable[Factor]) -> dict[str, Scaled]:
    """What factors come to, those that meet in a tensor multiplied; UnsupportedError where they are
    no powers of two, or too large ones."""
    found: dict[str, Scaled] = {}
    for one in factors:
        exponents = np.rint(np.log2(one.by)).clip(-_LARGEST, _LARGEST).astype(np.int8)
        if not (_powers(exponents) == one.by).all():
            raise UnsupportedError(
                f"{one.name}: would be scaled by {float(one.by.max()):.3g}, which a record of "
                f"powers of two up to 2^{_LARGEST} cannot hold; leave the transform out"
            )
        before = found.get(one.name, Scaled())
        if one.columns:
            columns = exponents
            if before.columns is not None:
                columns = _sum(before.columns, exponents, one.name)
            found[one.name] = Scaled(columns, before.rows, before.plus_one)
        else:
            rows = -exponents
            if before.rows is not None:
                rows = _sum(before.rows, rows, one.name)
            found[one.name] = Scaled(before.columns, rows, before.plus_one or one.plus_one)
    return found


def to_json(record: Record) -> dict[str, Any]:
    """See above."""
    vectors: dict[bytes, int] = {}

    def number(vector: Exponents | None) -> int | None:
        return None if vector is None else vectors.setdefault(vector.tobytes(), len(vectors))

    tensors = {
        name: [number(one.columns), number(one.rows), one.plus_one] for name, one in record.items()
    }
    return {
        "exponents": base64.b64encode(b"".join(vectors)).decode(),
        "lengths": [len(vector) for vector in vectors],
        "tensors": tensors,
    }


def from_json(found: object) -> dict[str, Scaled]:
    """The record that to_json() made; ValueError for anything that it never makes."""
    if not isinstance(found, Mapping):
        raise ValueError("no object")
    text, lengths, tensors = (found.get(key) for key in ("exponents", "lengths", "tensors"))
    counts = isinstance(lengths, list) and all(type(n) is int and n >= 0 for n in lengths)
    if not isinstance(text, str) or not counts or not isinstance(tensors, Mapping):
        raise ValueError("not exponents, lengths and tensors")
    try:
        raw = np.frombuffer(base64.b64decode(text, validate=True), np.int8)
    except binascii.Error:
        raise ValueError("exponents that are not base64") from None
    assert isinstance(lengths, list)
    if raw.size != sum(lengths):
        raise ValueError("exponents of another number than lengths")
    vectors = np.split(raw, np.cumsum(lengths)[:-1])
    record = {}
    for name, said in tensors.items():
        good = isinstance(said, list) and len(said) == 3 and type(said[2]) is bool
        if not good or not all(n is None or _in(n, lengths) for n in said[:2]):
            raise ValueError(f"scales of {str(name)[:80]}")
        columns, rows = (None if n is None else vectors[n] for n in said[:2])
        record[str(name)] = Scaled(columns, rows, said[2])
    return record


def _in(number: object, lengths: list[int]) -> bool:
    return type(number) is int and 0 <= number < len(lengths)


def check_fits(record: Record, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """ValueError where a tensor is not there, or has another shape than its scales."""
    for name, one in record.items():
        shape = shapes.get(name, ())
        if one.columns is not None and (len(shape) != 2 or shape[1] != one.columns.size):
            raise ValueError(f"columns of {name[:80]}")
        if one.rows is not None and (len(shape) not in (1, 2) or shape[0] != one.rows.size):
            raise ValueError(f"rows of {name[:80]}")
