"""What a conversion has kept: the record inside the output, and what the command says."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import __version__
from qtool.artifacts.lost import ACTIVATIONS
from qtool.converting.model import DTYPE_NAMES, Model
from qtool.messages.sentences import count, verb
from qtool.record import FILES, without_layers

SCHEMA = 1
CERTIFIED = "weights"  # what `exact` is about


@dataclass(frozen=True)
class Rounded:
    """One tensor whose numbers are not the source's."""

    name: str
    what: str  # was done to it
    why: str  # it could not stay what it was
    relative_error: float  # |W - Q| / |W|, Frobenius norms

    def json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "what": self.what,
            "why": self.why,
            "relative_error": self.relative_error,
        }


class Squares:
    """Sums over the pieces of a tensor: how large it is, and how far off."""

    def __init__(self) -> None:
        self.same = True
        self._size: list[float] = []
        self._lost: list[float] = []

    def add(self, source: NDArray[np.float32], found: NDArray[np.float32]) -> None:
        """One piece. numpy's own sums: those of BLAS depend on its threads."""
        if not np.array_equal(source, found):
            if np.array_equal(source, found, equal_nan=True):
                return
            self.same = False
            finite = np.isfinite(source)
            lost = np.subtract(
                source, found, dtype=np.float64, out=np.zeros(source.shape), where=finite
            )
            self._lost.append(_squares(lost))
        self._size.append(_squares(source))

    @property
    def relative_error(self) -> float:
        """|W - Q| / |W|; 1 where only the source is zero."""
        size, lost = math.fsum(self._size), math.fsum(self._lost)
        return math.sqrt(lost / size) if size else float(lost > 0)


def _squares(values: NDArray[np.floating[Any]]) -> float:
    """The sum of the squares of what is finite."""
    with np.errstate(over="ignore"):
        found = float((values * values).sum(dtype=np.float64))
    if math.isfinite(found):
        return found
    wide = values[np.isfinite(values)].astype(np.float64)
    return float((wide * wide).sum())


@dataclass(frozen=True)
class Certificate:
    """Source and output were dequantized and compared, tensor by tensor.

    It is about weights: of what engines do with inputs it only says what is lost, in `dropped`.
    """

    source: Mapping[str, Any]  # format, layout, digest, group_size, dtype
    format: str
    layout: str
    compared: int  # tensors
    matrices: int  # quantized ones in the source: some of these tensors, or parts of them
    rounded: Sequence[Rounded]
    dropped: Sequence[tuple[str, str]] = ()
    assumed: str | None = None
    experts_by: str | None = None  # what told that experts are in one tensor, and its version
    last_bit: int = 0  # matrices whose scales are multiplied in another order, or by a reciprocal

    @property
    def kept(self) -> str:
        """What the comparison found, in words."""
        every = "the one tensor" if self.compared == 1 else f"all {self.compared} tensors"
        said = f"{every} read back and compared: the same numbers"
        if self.last_bit:
            said += f", but for the last bit of those of {count(self.last_bit, 'matrix')}"
        if self.rounded:
            number = len(self.rounded)
            what = verb(number, "are not the same numbers", "is not the same numbers")
            said = f"{number} of {count(self.compared, 'tensor')} {what}"
        if any(name == ACTIVATIONS for name, _ in self.dropped):
            said += "; the source's quantized activations are dropped"
        return said

    @property
    def exact(self) -> bool:
        """Whether all weights are the same numbers."""
        return not self.rounded

    def json(self) -> dict[str, Any]:
        """As qtool.json has it, under `conversions`."""
        record: dict[str, Any] = {
            "from": dict(self.source),
            "to": {"format": self.format, "layout": self.layout},
            "certified": CERTIFIED,
            "compared": self.compared,
            "matrices": self.matrices,
            "exact": self.exact,
            "rounded": [one.json() for one in self.rounded],
        }
        if self.dropped:
            record["dropped"] = [{"name": name, "reason": why} for name, why in self.dropped]
        if self.last_bit:
            record["last_bit"] = self.last_bit
        if self.assumed is not None:
            record["assumed"] = self.assumed
        if self.experts_by is not None:
            record["experts_by"] = self.experts_by
        return record


def source_record(model: Model) -> dict[str, Any]:
    """What the output says of its source; group sizes only where there is one for all."""
    sizes = {tensor.group_size for tensor in model.quantized}
    scales = {tensor.scale_dtype for tensor in model.quantized}
    return {
        "format": model.format,
        "layout": model.layout,
        "digest": model.digest(),
        "group_size": sizes.pop() if len(sizes) == 1 else None,
        "scale_dtype": scales.pop() if len(scales) == 1 else None,
        "dtype": DTYPE_NAMES[model.dtype],
    }


def provenance(model: Model, certificate: Certificate) -> dict[str, Any]:
    """The output's qtool.json: what the source's says, and one conversion more."""
    carried = dict(model.provenance or {})
    before = carried.pop("conversions", None)
    anew = ("schema", "qtool_version", "qtool", FILES)
    kept = {key: value for key, value in carried.items() if key not in anew}
    if certificate.format in ("hf", "gguf") or not certificate.exact:
        kept = without_layers(kept)  # errors are those of other numbers, or under other names
    if certificate.format == "hf":  # what is quantized anew is known not to be the original
        source = certificate.source
        made = {key: source[key] for key in ("format", "layout", "digest")}
        kept = {"made_from": made} | kept
    return {
        "schema": SCHEMA,
        "qtool_version": __version__,
        **kept,
        "conversions": [*(before if isinstance(before, list) else []), certificate.json()],
    }


@dataclass(frozen=True)
class Converted:
    """What was written."""

    artifact: str
    certificate: Certificate
    architecture: str | None
    dtype: str
    tensors: int
    size_bytes: int
    dequantized: Mapping[str, int]  # how it was stored -> matrices that are plain numbers now
    warnings: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        """The --json object of `qtool convert`."""
        certificate = self.certificate
        return {
            "artifact": self.artifact,
            "format": certificate.format,
            "layout": certificate.layout,
            "architecture": self.architecture,
            "dtype": self.dtype,
            "source": dict(certificate.source),
            "certified": CERTIFIED,
            "exact": certificate.exact,
            "compared": certificate.compared,
            "tensors": self.tensors,
            "matrices": certificate.matrices,
            "size_bytes": self.size_bytes,
            "rounded": [one.json() for one in certificate.rounded],
            "dequantized": dict(self.dequantized),
            "dropped": [{"name": name, "reason": why} for name, why in certificate.dropped],
            "warnings": list(self.warnings),
        }


def converted_of(made: Mapping[str, Any], out: Path) -> Converted:
    """The inverse of asdict(), as JSON has it."""
    said = made["certificate"]
    rounded = [Rounded(**one) for one in said["rounded"]]
    dropped = tuple((name, reason) for name, reason in said["dropped"])
    certificate = Certificate(**{**said, "rounded": rounded, "dropped": dropped})
    now = {"artifact": str(out), "certificate": certificate}
    return Converted(**{**made, **now, "warnings": tuple(made["warnings"])})
