"""Scales that were folded into what a GGUF file was converted from (AWQ, SmoothQuant), which it
does not record: the source with them, so that the file is compared with what it was made of.

    norm    new = old / c                    what reads it     W diag(c)
    rows    diag(r) W  of attn_v, ffn_up     what reads them   W diag(1 / r)

A norm tells c exactly. Rows are told by least squares, and believed where what reads them has the
inverse. A matrix takes the scales that bring it nearer; a norm that no matrix makes up for stays as
the source has it, and is far from it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from qtool.gguf.hf_tensor import floats_of
from qtool.gguf.source import GgufSource, SourceTensor
from qtool.gguf_types import BY_NAME, F32, FLOATS
from qtool.verification.finding import Finding
from qtool.verification.pairs import MATCH
from qtool.verification.scaling import Floats, least_squares, norm, uneven
from qtool.verification.sentences import count as counted

SCALES = "smoothing"
_ROWS = 64  # of a matrix, which tell whether it reads a norm
_BETTER = 0.9  # of the error: scales that leave more of it are chance
_CHUNK = 256  # rows
# What makes an input, and what reads it: of the experts each its own.
_PAIRS = (
    ("attn_v", "attn_output"), ("ffn_up", "ffn_down"), ("ffn_up_exps", "ffn_down_exps"),
    ("ffn_up_shexp", "ffn_down_shexp"),
)  # fmt: skip
Tensors = Mapping[str, SourceTensor]


@dataclass(frozen=True)
class Scales:
    """What a tensor of the source is multiplied by."""

    columns: Floats | None = None  # [matrices, in]
    rows: Floats | None = None  # [rows]

    def of(self, tensor: SourceTensor, first: int, last: int) -> Floats:
        """Rows of it as float32."""
        values = floats_of(tensor, first, last)
        if self.columns is not None:
            each = tensor.rows // len(self.columns)
            values = values * self.columns[np.arange(first, last) // each]
        return values if self.rows is None else values * self.rows[first:last, None]


def with_scales(
    file: GgufSource, source: GgufSource | None
) -> tuple[GgufSource | None, list[Finding], frozenset[str]]:
    """The source as the file has it scaled, a note where that is so, and names of matrices whose
    numbers are computed, and no copies."""
    if source is None or source.architecture != file.architecture:
        return source, [], frozenset()
    new = {t.name: t for t in file.tensors if _has_weights(t)}
    old = {t.name: t for t in source.tensors if t.name in new and new[t.name].shape == t.shape}
    old = {name: tensor for name, tensor in old.items() if _has_weights(tensor)}
    with np.errstate(all="ignore"):  # what is not finite is told of elsewhere
        ratios = _changed_norms(new, old)
        if not ratios:
            return source, [], frozenset()
        found, norms = _readers(new, old, ratios)
        found = _pairs(new, old, found, _heads(file))
    if not found:
        return source, [], frozenset()
    views = {name: _view(old[name], scales) for name, scales in found.items()}
    views |= {name: new[name] for name in norms}
    tensors = tuple(views.get(tensor.name, tensor) for tensor in source.tensors)
    said = (
        f"{counted(len(norms), 'norm')} and {counted(len(found), 'matrix')} have scales folded in "
        "(AWQ, smoothing), as what the file was made of had: compared with the source scaled so"
    )
    note = Finding("note", SCALES, "", said)
    return replace(source, tensors=tensors), [note], frozenset(found)


def _has_weights(tensor: SourceTensor) -> bool:
    return tensor.type in FLOATS or tensor.type.name in BY_NAME


def _view(tensor: SourceTensor, scales: Scales) -> SourceTensor:
    def read(first: int, last: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        return np.ascontiguousarray(scales.of(tensor, first, last)).view(np.uint8)

    return replace(tensor, type=F32, read=read, fill=None, stored=tensor.type_in_file)


def _block(name: str) -> str:
    """blk.3 of blk.3.ffn_up.weight; "" of what is in none."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blk" else ""


def _changed_norms(new: Tensors, old: Tensors) -> dict[str, Floats]:
    """old / new of norms that are not the source's."""
    found = {}
    for name, tensor in old.items():
        if len(tensor.shape) != 1 or not name.endswith("norm.weight"):
            continue
        there, here = (floats_of(one, 0, one.rows).reshape(-1) for one in (tensor, new[name]))
        ratio = there / here
        if not (np.isfinite(ratio) & (ratio > 0)).all() or uneven(ratio) <= MATCH:
            continue
        found[name] = ratio
    return found


def _readers(
    new: Tensors, old: Tensors, ratios: Mapping[str, Floats]
) -> tuple[dict[str, Scales], set[str]]:
    """Columns of what reads a norm, and the norms that are read."""
    blocks: dict[str, list[str]] = defaultdict(list)
    for name in ratios:
        blocks[_block(name)].append(name)
    found, norms = {}, set()
    for name, tensor in old.items():
        if len(tensor.shape) < 2 or not name.endswith(".weight"):
            continue
        best = norm(_left(new[name], tensor, Scales())) * _BETTER
        for one in blocks.get(_block(name), ()):
            if ratios[one].size != tensor.in_features:
                continue
            scales = Scales(columns=ratios[one][None])
            left = norm(_left(new[name], tensor, scales))
            if left < best:
                best, found[name] = left, scales
                norms.add(one)
    return found, norms


def _left(new: SourceTensor, old: SourceTensor, scales: Scales) -> Floats:
    """What is left of the first rows, which may have scales of their own."""
    last = min(_ROWS, old.rows)
    there, here = scales.of(old, 0, last), floats_of(new, 0, last)
    return there * least_squares(here, there, 1)[:, None] - here


def _heads(file: GgufSource) -> int:
    """Of queries; 0 where it is not one number."""
    value = file.metadata.get(f"{file.architecture}.attention.head_count")
    return value.value if value is not None and type(value.value) is int else 0


def _pairs(
    new: Tensors, old: Tensors, found: Mapping[str, Scales], heads: int
) -> dict[str, Scales]:
    """The same, and rows of what makes an input, columns of what reads it."""
    found = dict(found)
    for made, read in _named_pairs(old):
        known = found.get(made, Scales())
        rows = _rows_of(new[made], old[made], known)
        columns = _inverse(rows, old[read], heads)
        if columns is None or uneven(rows) <= MATCH:
            continue
        scales = Scales(columns=columns)
        plain, scaled = (_far(new[read], old[read], one) for one in (Scales(), scales))
        if scaled < _BETTER * plain:
            found[made], found[read] = Scales(known.columns, rows), scales
    return found


def _named_pairs(old: Tensors) -> Iterator[tuple[str, str]]:
    for name in old:
        for made, read in _PAIRS:
            if name.endswith(f".{made}.weight"):
                other = name.removesuffix(f"{made}.weight") + f"{read}.weight"
                if other in old:
                    yield name, other


def _rows_of(new: SourceTensor, old: SourceTensor, scales: Scales) -> Floats:
    parts: list[Floats] = []
    for first in range(0, old.rows, _CHUNK):
        last = min(first + _CHUNK, old.rows)
        parts.append(least_squares(floats_of(new, first, last), scales.of(old, first, last), 1))
    return np.concatenate(parts)


def _inverse(rows: Floats, reader: SourceTensor, heads: int) -> Floats | None:
    """Columns [matrices, in] that undo rows of a producer: of each expert its own; those of values,
    which several heads of queries read, once for each."""
    matrices, width = prod(reader.shape[:-2]), reader.in_features
    undone = np.asarray(1 / rows, np.float32)
    if rows.size == matrices * width:
        return undone.reshape(matrices, width)
    if not heads or width % heads or rows.size % (width // heads) or width % rows.size:
        return None
    each = undone.reshape(-1, width // heads)
    return each.repeat(width // rows.size, axis=0).reshape(1, width)


def _far(new: SourceTensor, old: SourceTensor, scales: Scales) -> float:
    """How far the first rows of every matrix are from the source scaled so."""
    each = old.shape[-2]
    starts: Sequence[int] = range(0, old.rows, each)
    total = 0.0
    for first in starts:
        last = first + min(_ROWS, each)
        total += norm(scales.of(old, first, last) - floats_of(new, first, last)) ** 2
    return total
