"""Codes and scales of some matrices of each kind, read one matrix at a time.

Of a kind, SAMPLED matrices are looked at, the first, the last and some between, and of a GGUF
tensor the first rows. Embedding and head count as kinds where they are quantized.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from qtool.artifacts.artifact import Artifact
from qtool.errors import QtoolError
from qtool.float_codes import TABLES
from qtool.formats.gguf_codes import CODES, block_scales, code_counts
from qtool.formats.gguf_file import GgufFile
from qtool.gguf_types import BY_NAME
from qtool.report.facts import Codes, Scales
from qtool.report.names import kind_order
from qtool.scheme import Scheme

SAMPLED = 4
_MOST_BYTES = 1 << 22  # of a GGUF tensor
_MOST_NUMBERS = 1 << 29  # of a matrix that is read whole
_PIECE = 1 << 22
_BINS = 64
_NO_NUMBERS = ("nan", "inf", "-inf")


@dataclass(frozen=True)
class Looked:
    """What one matrix holds."""

    counts: NDArray[np.int64]  # from the lowest code to the highest
    first: int
    scales: NDArray[np.float32] | None
    book: str = "int"


@dataclass(frozen=True)
class Sample:
    """What a report says of them; `left_out` are sentences."""

    codes: tuple[Codes, ...]
    scales: tuple[Scales, ...]
    left_out: tuple[str, ...]


NO_SAMPLE = Sample((), (), ())


@dataclass
class _Group:
    """Matrices of one kind that are stored in one way."""

    names: list[str] = field(default_factory=list)
    counts: NDArray[np.int64] | None = None
    first: int = 0
    book: str = "int"
    scales: list[NDArray[np.float32]] = field(default_factory=list)
    sampled: int = 0


def of_artifact(artifact: Artifact, kinds: Mapping[str, str]) -> Sample:
    """kinds: of each entry's name."""
    entries = [entry for entry in artifact.entries.values() if entry.scheme is not None]
    stored = {entry.name: str(entry.scheme) for entry in entries}
    left_out = []
    words = [e for e in entries if not isinstance(e.scheme, Scheme)]
    if stacks := [entry.name for entry in words if entry.stacked]:
        left_out.append(f"No codes are shown of experts in one tensor ({stacks[0]}).")
    if named := sorted({e.scheme for e in words if not e.stacked}, key=str):
        left_out.append(
            f"No codes are shown of {', '.join(map(str, named))}, which this version recognises "
            "but does not decode."
        )
    large = [e.name for e in entries if e.parameters > _MOST_NUMBERS]
    if large:
        left_out.append(f"{len(large)} matrices are too large to be sampled ({large[0]}).")
    skipped = {e.name for e in entries if not isinstance(e.scheme, Scheme)} | set(large)
    names = {name: scheme for name, scheme in stored.items() if name not in skipped}
    return _sample(names, kinds, lambda name: _matrix(artifact, name), left_out)


def _matrix(artifact: Artifact, name: str) -> Looked:
    found = artifact.read(name)
    assert not isinstance(found, np.ndarray)
    scheme = found.scheme
    codes = found.codes.reshape(-1)
    counts = np.zeros(1 << scheme.bits, np.int64)
    for start in range(0, codes.size, _PIECE):  # which bincount takes as eight bytes each
        counts += np.bincount(codes[start : start + _PIECE], minlength=len(counts))
    scale = np.asarray(found.scale, np.float32).reshape(-1)
    if not scheme.is_float:
        return Looked(counts, 0, scale)
    half = len(counts) // 2  # below it the codes of positive numbers, above it of negative ones
    return Looked(np.concatenate([counts[: half - 1 : -1], counts[:half]]), 0, scale, scheme.book)


def of_gguf(file: GgufFile, kinds: Mapping[str, str]) -> Sample:
    """kinds: of each tensor's name."""
    quantized = {n: i.type.name for n, i in file.tensors.items() if i.type.name in BY_NAME}
    other = sorted({name for name in quantized.values() if name not in CODES})
    left_out = []
    if other:
        left_out.append(
            f"No codes are shown of {', '.join(other)}: their bits number vectors of a code book, "
            "not single weights."
        )
    names = {name: kind for name, kind in quantized.items() if kind in CODES}
    return _sample(names, kinds, lambda name: _tensor(file, name), left_out)


def _tensor(file: GgufFile, name: str) -> Looked:
    info = file.tensors[name]
    block = info.type
    nbytes = min(info.nbytes, max(1, _MOST_BYTES // block.nbytes) * block.nbytes)
    raw = np.empty(nbytes, np.uint8)
    file.read_into(name, 0, raw.data)
    blocks = raw.reshape(-1, block.nbytes)
    kind = CODES[block.name]
    counts = code_counts(blocks, block.name)
    book = "int" if kind.order is None else "e2m1"
    return Looked(counts, kind.first, block_scales(blocks, block.name), book)


def _sample(
    stored: Mapping[str, str],
    kinds: Mapping[str, str],
    look: Callable[[str], Looked],
    left_out: list[str],
) -> Sample:
    groups: dict[tuple[str, str], _Group] = defaultdict(_Group)
    for name, scheme in stored.items():
        groups[kinds[name], scheme].names.append(name)
    ordered = sorted(groups.items(), key=lambda item: (kind_order(item[0][0]), item[0][1]))
    for _, group in ordered:
        for name in spread(group.names, SAMPLED):
            try:
                found = look(name)
            except QtoolError as error:
                left_out.append(f"{name} could not be read: {error}.")
                continue
            group.counts = found.counts if group.counts is None else group.counts + found.counts
            group.first, group.book = found.first, found.book
            group.sampled += 1
            if found.scales is not None:
                group.scales.append(found.scales)
    return Sample(
        tuple(_codes(*key, group) for key, group in ordered if group.sampled),
        tuple(_scales(*key, group) for key, group in ordered if group.scales),
        tuple(left_out),
    )


def spread(names: Sequence[str], count: int) -> list[str]:
    """At most `count` of them, the first and the last included, evenly apart."""
    if len(names) <= count:
        return list(names)
    return [names[round(place * (len(names) - 1) / (count - 1))] for place in range(count)]


def _codes(kind: str, scheme: str, group: _Group) -> Codes:
    assert group.counts is not None
    counts = tuple(int(count) for count in group.counts)
    return Codes(kind, scheme, group.sampled, len(group.names), counts, group.first, group.book)


def _scales(kind: str, scheme: str, group: _Group) -> Scales:
    """Magnitudes: the scales of GGUF blocks have signs."""
    values = np.abs(np.concatenate(group.scales))
    good = values[np.isfinite(values) & (values > 0)]
    low, median, high = (
        (float(good.min()), float(np.median(good)), float(good.max())) if good.size else (0.0,) * 3
    )
    return Scales(kind, scheme, values.size, low, median, high, int(values.size - good.size))


def labels(codes: Codes) -> list[str]:
    """What each code stands for."""
    if codes.book == "int":
        return [str(codes.first + place) for place in range(len(codes.counts))]
    half = len(codes.counts) // 2
    table = TABLES[codes.book]
    ordered = [*table[half : 2 * half][::-1], *table[:half]]
    return [f"{value:g}" for value in ordered]


def binned(codes: Codes) -> list[tuple[str, int]]:
    """Label and count of at most _BINS bars, neighbours put together."""
    width = max(1, len(codes.counts) // _BINS)
    named = labels(codes)
    bars = []
    for start in range(0, len(codes.counts), width):
        members = named[start : start + width]
        numbers = [name for name in members if name not in _NO_NUMBERS] or members
        label = numbers[0] if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        bars.append((label, sum(codes.counts[start : start + width])))
    return bars


def ends(codes: Codes) -> tuple[str, str]:
    """The lowest and the highest number that a code stands for."""
    numbers = [name for name in labels(codes) if name not in _NO_NUMBERS]
    return numbers[0], numbers[-1]


def entropy(codes: Codes) -> float:
    """Bits that a code carries: -sum p log2 p."""
    shares = [count / codes.total for count in codes.counts if count]
    return -sum(share * math.log2(share) for share in shares)
