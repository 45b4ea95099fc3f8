"""A checkpoint seen as its rotated self: one more checkpoint, whose tensors are made when read.

Scales that other transforms found (`qtool.checkpoints.scaled`) are put over what rotations make.

    row vectors:  x -> x R       matrices as stored, W [out, in], y = x W'

    writes the residual stream   R' W, R' b        embedding rows          E R
    reads a norm with gain g     W diag(g) R       its head                likewise
    the norm                     gain 1, and its bias (b / g) R
    a head's values              S' W of the rows that make them, S' b; W S of the columns that
                                 read them

The network computes what it did before (proved by `qtool.transforms.rotate`): a norm without gain
only scales, or takes the mean out, with which R then commutes, as it fixes the all-ones vector.
A head that is tied to the embedding reads the gain of the last norm and so becomes a tensor of its
own: `untied` adds it, from headers alone.

Numbers are computed in float64, a part of a tensor at a time, and rounded to the tensor's own
dtype. A part that is read alone has the bytes that it has in the whole.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints import structure
from qtool.checkpoints.checkpoint import Checkpoint, View
from qtool.checkpoints.roles import outside_reason
from qtool.checkpoints.scaled import Scaled
from qtool.errors import SourceError
from qtool.formats import safetensors_file as st
from qtool.formats.safetensors_file import FLOAT_DTYPES, TensorInfo, from_float32
from qtool.streaming.online import Online
from qtool.transforms.hadamard import Reals
from qtool.transforms.rotation import Rotation

_AFTER = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_self_attn_layernorm")
_OF_EMBEDDING = ("word_embeddings_layernorm", "embed_layer_norm", "emb_norm")
_POSITIONS = ("position", "wpe", "token_type")
_ROWS = 64  # made at a time; parts begin at multiples of it, so that their bytes do not vary
_PART_NUMBERS = 1 << 20  # made at a time of a matrix whose rows are mixed


@dataclass(frozen=True)
class Norm:
    """A norm whose gain goes into its readers."""

    weight: str
    plus_one: bool = False  # it multiplies by 1 + weight


@dataclass(frozen=True)
class Heads:
    """Rows of a matrix that a rotation changes, a run of them for each head."""

    rotation: Rotation
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Change:
    """What becomes of one tensor: scaled columns, then rotated columns, then rotated rows.

    A vector is a matrix of one column.
    """

    gain: Norm | None = None  # columns are multiplied by it
    columns: Rotation | None = None
    column_heads: Rotation | None = None  # each run of as many columns as it is large
    row_heads: Heads | None = None
    rows: Rotation | None = None
    divide: Norm | None = None  # a norm's bias is divided by its gain
    fill: float | None = None  # the gain that is left

    @property
    def mixes_rows(self) -> bool:
        """Whether a row is made of other rows too."""
        return self.rows is not None or self.row_heads is not None


@dataclass(frozen=True)
class Rotated(View):
    """See Checkpoint. Without changes it is the source, but for the head that is no longer tied."""

    changes: dict[str, Change] = field(default_factory=dict, repr=False)
    scales: dict[str, Scaled] = field(default_factory=dict, repr=False)  # after the changes
    head: tuple[str, str] | None = None  # the tensor that untying adds, and the embedding
    refused: str | None = None  # why, by its names alone, the stream cannot be rotated
    online: Online = field(default_factory=Online)  # what is rotated while it runs
    _gains: dict[str, Reals] = field(default_factory=dict, repr=False)
    _mixed: dict[str, NDArray[np.float32]] = field(default_factory=dict, repr=False)
    _lock: Any = field(default_factory=Lock, repr=False, compare=False)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 [nbytes]."""
        info = self.tensors[self._known(name)]
        if self._as_it_is(name):
            return self.original.raw(self._origin(name))
        return self.part(name, 0, info.shape[0]) if info.shape else self._scalar(name)

    def part(self, name: str, first: int, last: int) -> NDArray[np.uint8]:
        """The bytes of a tensor, from `first` to `last` of its leading axis."""
        info = self.tensors[self._known(name)]
        if self._as_it_is(name):
            return self.original.part(self._origin(name), first, last)
        changed = name in self.changes
        values = self._rows(name, first, last) if changed else self._values(name, first, last)
        if (scaled := self.scales.get(name)) is not None:
            values = scaled.of(values, first)
        return from_float32(values, info.dtype, name)

    def stretch(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of a tensor from `start` to `stop`."""
        if self._as_it_is(name):
            return self.original.stretch(self._origin(name), start, stop)
        return self._stretch_of_part(name, start, stop)

    def float32(self, name: str) -> NDArray[np.float32]:
        """A float tensor as float32, of its own shape."""
        if self._as_it_is(name):
            return self.original.float32(self._origin(name))
        info = self.tensors[self._known(name)]
        return st.to_float32(self.raw(name), info.dtype, info.shape)

    def _as_it_is(self, name: str) -> bool:
        """Whether the source has these bytes."""
        source = self.original.tensors[self._origin(name)]
        made = name in self.changes or name in self.scales
        return not made and source.dtype == self.tensors[name].dtype

    def _origin(self, name: str) -> str:
        """The tensor of the source that a tensor is made of."""
        self._known(name)
        return self.head[1] if self.head is not None and name == self.head[0] else name

    def _scalar(self, name: str) -> NDArray[np.uint8]:
        return from_float32(self.original.float32(name), self.tensors[name].dtype, name)

    def _rows(self, name: str, first: int, last: int) -> NDArray[np.float32]:
        """Changed rows in float32, before they are rounded to their dtype."""
        change = self.changes[name]
        info = self.tensors[name]
        shape = (last - first, *info.shape[1:])
        if change.fill is not None:
            return np.full(shape, change.fill, np.float32)
        if change.mixes_rows or len(info.shape) == 1:
            with self._lock:  # one at a time: each takes memory
                if name not in self._mixed:
                    while len(self._mixed) > 1:
                        del self._mixed[next(iter(self._mixed))]
                    self._mixed[name] = self._whole(name, change)
                found = self._mixed[name][first:last].copy()
                if last == info.shape[0]:  # parts are asked for in their order
                    self._mixed.pop(name, None)
            return found
        start = first // _ROWS * _ROWS
        stop = min(-(-last // _ROWS) * _ROWS, info.shape[0])
        found = np.empty((stop - start, *info.shape[1:]), np.float32)
        for at in range(start, stop, _ROWS):
            end = min(at + _ROWS, stop)
            found[at - start : end - start] = self._rotate_columns(name, change, at, end)
        return found[first - start : last - start]

    def _whole(self, name: str, change: Change) -> NDArray[np.float32]:
        """A tensor whose rows are mixed: columns are rotated first, a few rows at a time."""
        info = self.tensors[name]
        matrix = np.empty((info.shape[0], prod(info.shape[1:])), np.float32)
        for at in range(0, info.shape[0], _ROWS):
            end = min(at + _ROWS, info.shape[0])
            if len(info.shape) == 1:
                matrix[at:end, 0] = self._values(name, at, end)
            else:
                matrix[at:end] = self._rotate_columns(name, change, at, end)
        gain = None if change.divide is None else self.gain(change.divide)[:, None]
        step = max(1, _PART_NUMBERS // matrix.shape[0])
        step = -(-step // _ROWS) * _ROWS
        for at in range(0, matrix.shape[1], step):
            part = matrix[:, at : at + step].astype(np.float64)
            if gain is not None:
                part /= gain
            if change.row_heads is not None:
                size = change.row_heads.rotation.size
                for start in change.row_heads.starts:
                    rows = part[start : start + size].copy()
                    part[start : start + size] = change.row_heads.rotation.apply(rows)
            if change.rows is not None:
                part = change.rows.apply(part)
            matrix[:, at : at + step] = part
        return matrix.reshape(info.shape)

    def _rotate_columns(self, name: str, change: Change, first: int, last: int) -> Reals:
        """Rows of a matrix with their columns scaled and rotated, [last - first, in]."""
        values = self._values(name, first, last).astype(np.float64)
        if change.gain is not None:
            values *= self.gain(change.gain)
        if change.columns is not None:
            values = change.columns.apply(np.ascontiguousarray(values.T)).T
        if change.column_heads is not None:
            size = change.column_heads.size
            runs = np.ascontiguousarray(values).reshape(-1, size)
            rotated = change.column_heads.apply(np.ascontiguousarray(runs.T)).T
            values = np.ascontiguousarray(rotated).reshape(values.shape)
        return values

    def unchanged_rows(self, name: str, first: int, last: int) -> NDArray[np.float32]:
        """Rows of the source, under this view's names."""
        return self._values(name, first, last)

    def _values(self, name: str, first: int, last: int) -> NDArray[np.float32]:
        """Rows of the source, unchanged."""
        name = self._origin(name)
        info = self.original.tensors[name]
        raw = self.original.part(name, first, last)
        return st.to_float32(raw, info.dtype, (last - first, *info.shape[1:]))

    def stored_dtype(self, name: str) -> str:
        """Of a tensor once it is written, also where this view shows it in float32."""
        return self.original.tensors[self._origin(name)].dtype

    def gain(self, norm: Norm) -> Reals:
        """What a norm of the source multiplies by, [in]."""
        if norm.weight not in self._gains:
            weight = self.original.float32(norm.weight).astype(np.float64)
            self._gains[norm.weight] = weight + 1.0 if norm.plus_one else weight
        return self._gains[norm.weight]

    def forget(self) -> None:
        """Drop what was made under other changes."""
        self._mixed.clear()

    def as_float32(self) -> "Rotated":
        """The same view with every float tensor in float32; the changes are shared."""
        return self._in_float32(lambda info: True)

    def with_exact_vectors(self) -> "Rotated":
        """The same view with float vectors in float32: of a norm that multiplies by 1 + weight,
        16 bits could not hold what is left once it is scaled."""
        return self._in_float32(lambda info: len(info.shape) == 1)

    def _in_float32(self, wanted: Callable[[TensorInfo], bool]) -> "Rotated":
        tensors = {
            name: TensorInfo(name, "F32", info.shape, 0, 4 * prod(info.shape))
            if info.dtype in FLOAT_DTYPES and wanted(info)
            else info
            for name, info in self.tensors.items()
        }
        return replace(self, tensors=tensors, _mixed={}, _lock=Lock())


def change_all(view: Rotated, changes: Iterable[Mapping[str, Change]]) -> None:
    """Add changes to a view; a tensor may be changed from both sides."""
    for some in changes:
        for name, change in some.items():
            known = view.changes.get(name)
            view.changes[name] = change if known is None else _both(known, change)
    view.forget()


def _both(one: Change, other: Change) -> Change:
    given = {f.name: v for f in fields(Change) if (v := getattr(other, f.name)) is not None}
    return replace(one, **given)


def untied(checkpoint: Checkpoint, *, stream: bool = True) -> Rotated:
    """The view of a checkpoint before anything is rotated: only a tied head is a tensor already,
    if the residual `stream` is going to be rotated, and names do not tell that it cannot be.

    Reads headers only. SourceError where there is no embedding to take the head from.
    """
    tensors = dict(checkpoint.tensors)
    file_of: dict[str, Path] = {name: checkpoint.file_of(name) for name in tensors}
    config: Mapping[str, Any] = checkpoint.config
    head = None
    refused = _refused(checkpoint.tensors) if stream else None
    if not stream or refused is not None:
        pass
    elif not any(outside_reason(name) == "output head" for name in tensors):
        embedding = _embedding(checkpoint)
        name = head_name(embedding)
        info = tensors[embedding]
        tensors[name] = TensorInfo(name, info.dtype, info.shape, 0, info.nbytes)
        file_of[name] = file_of[embedding]
        head = name, embedding
    unties = stream and refused is None
    if unties and (head is not None or config.get("tie_word_embeddings") is not False):
        config = structure.untied(config)
    return Rotated(
        checkpoint.path,
        config,
        tensors,
        checkpoint.metadata,
        checkpoint.files,
        file_of,
        checkpoint.readable,
        source=checkpoint,
        head=head,
        refused=refused,
    )


def _refused(tensors: Mapping[str, TensorInfo]) -> str | None:
    """Why the residual stream of this model cannot be rotated, where names tell."""
    towers = (name for name in tensors if structure.OTHER_TOWERS.search(name))
    if (tower := next(towers, None)) is not None:
        return f"{tower} is of a vision or audio tower, whose outputs would have to be rotated, too"
    for name in tensors:
        parts = name.split(".")
        if any(part in _AFTER for part in parts):
            return f"{name} is the gain of a norm between a projection and the stream"
        if any(part in _OF_EMBEDDING for part in parts):
            return f"{name} is the gain of a norm between the embedding and the stream"
    return None


def head_name(embedding: str) -> str:
    """What a model class calls the head that belongs to an embedding."""
    if embedding.endswith("embed_in.weight"):
        return "embed_out.weight"
    inside = "language_model." if embedding.startswith("language_model.") else ""
    return f"{inside}lm_head.weight"


def _embedding(checkpoint: Checkpoint) -> str:
    """The table of words: of those outside of the blocks that are not of positions, the largest."""
    found = {
        name: info.shape[0]
        for name, info in checkpoint.tensors.items()
        if len(info.shape) == 2
        and outside_reason(name) == "embedding"
        and not any(part in name for part in _POSITIONS)
    }
    if not found:
        raise SourceError(
            f"{checkpoint.path}: no embedding among the tensors, from which a head could be taken; "
            "leave `rotate` out"
        )
    return max(found, key=lambda name: found[name])
