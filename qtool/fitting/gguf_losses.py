"""What it costs to store each tensor of a GGUF file as each type: errors weighed by sensitivities.

    loss = 1/2 sum over matrices of rows[o] * columns[k] * (W - Q)[o, k]^2

Blocks lie within rows, so that some rows speak for all: of a large tensor pieces are taken from
all over it, and what they lose is counted up by the weights of the rows that they have. Encoding
goes as `quantize` does it, with importance where the recipe measures it; GPTQ and AWQ, which make
every error smaller by a good part, are not gone through, since it is the order that counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qtool import native_gguf
from qtool.errors import FormatError
from qtool.gguf.importance.measured import matrices_reading
from qtool.gguf.planned import PlannedTensor
from qtool.gguf.source import SourceTensor, as_floats
from qtool.gguf_mixtures.kinds import EMBEDDING_OF_TOKENS, EMBEDDINGS, HEAD
from qtool.gguf_mixtures.rules import fallback, needs_importance
from qtool.gguf_types import BlockType
from qtool.gradients.sampled import by_weight, checked, pieces
from qtool.gradients.sensitivity import Sensitivities, Sensitivity
from qtool.recipe.gguf import GgufRecipe
from qtool.streaming.workers import Workers

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Weighed:
    """A tensor and what errors in it cost."""

    tensor: PlannedTensor
    rows: NDArray[np.float64]  # [rows], of all matrices one after another
    columns: NDArray[np.float64]  # [matrices, in]
    remains: float = 1.0  # of what rounding loses this way, by methods that come later

    def importance(self) -> Floats:
        """As an encoder has it, [matrices, in]."""
        return self.columns.astype(np.float32)


def weighed(
    tensor: PlannedTensor, sensitivities: Sensitivities, tied: bool, remains: float = 1.0
) -> list[Weighed]:
    """Of each way in which the network reads it, that of an embedding and of a head, say; none
    where nothing was measured. tied: the embedding is the head, too. remains: of what rounding
    loses by such a head; rows that are looked up lose what they lose."""
    source, found = tensor.source, []
    shape = (source.rows, source.in_features)
    table = sensitivities.tables.get(source.origin[0]) if len(source.origin) == 1 else None
    if source.name in EMBEDDINGS and table is not None and table.columns.shape == shape[1:]:
        rows = table.rows
        if rows.size != shape[0]:  # of another vocabulary: each alike
            rows = np.full(shape[0], 1 / shape[0])
        found.append(Weighed(tensor, rows, table.columns[None]))
    head = sensitivities.head
    is_head = source.name == HEAD or (source.name == EMBEDDING_OF_TOKENS and tied)
    if is_head and head is not None and (head.rows.size, head.columns.size) == shape:
        share = remains if source.name == EMBEDDING_OF_TOKENS else 1.0
        found.append(Weighed(tensor, head.rows, head.columns[None], share))
    if (
        source.name not in (*EMBEDDINGS, HEAD)
        and (one := _of_block(tensor, sensitivities)) is not None
    ):
        found.append(one)
    return found


def _of_block(tensor: PlannedTensor, sensitivities: Sensitivities) -> Weighed | None:
    source = tensor.source
    found = matrices_reading(
        source, sensitivities.matrices, lambda sensitivity: sensitivity.columns.size
    )
    if not found:
        return None
    columns = np.stack([sensitivity.columns for sensitivity in found])
    if source.columns is not None:
        columns = columns[:, source.columns]
    return Weighed(tensor, _rows(source, sensitivities, found), columns)


def _rows(
    source: SourceTensor, sensitivities: Sensitivities, found: Sequence[Sensitivity]
) -> NDArray[np.float64]:
    """Of each row; alike within a matrix where it is not known which one it is."""
    parts = [
        one.rows
        for name in source.origin
        for _, one in sorted(sensitivities.matrices.get(name, {}).items())
    ]
    every = np.concatenate(parts) if parts else np.empty(0)
    rows = np.arange(source.rows, dtype=np.int64)
    order = rows if source.order is None else source.order(rows)
    each = source.rows // len(found)
    cut = source.cut
    if cut is not None and not cut.transposed:
        order = rows // each * (every.size // len(found)) + cut.first + rows % each
    known = cut is None or not cut.transposed or cut.only_transposed
    if known and order.size and int(order.max()) < every.size:
        return every[order]
    return np.repeat([one.rows.mean() for one in found], each)


def losses_of(
    ways: Sequence[Weighed], types: Sequence[BlockType], importance: bool, workers: Workers
) -> NDArray[np.float64]:
    """[types], of a tensor; infinite where a type cannot hold it. ways: of weighed(), not none.
    types: of usable_types()."""
    use = importance and _measured(ways[0].tensor.source)
    found: NDArray[np.float64] = np.sum(
        [one.remains * _losses(one, types, use, workers) for one in ways], axis=0
    )
    return found


def _losses(
    one: Weighed, types: Sequence[BlockType], importance: bool, workers: Workers
) -> NDArray[np.float64]:
    """[types], of pieces, as all rows would have it."""
    source = one.tensor.source
    if source.name in (*EMBEDDINGS, HEAD):
        return _of_table(one, types, importance, workers)
    spans = pieces(source.rows, source.in_features, len(one.columns))
    found = workers.map(lambda span: _lost(one, types, importance, *span), spans)
    lost = np.sum(found, axis=0)
    share = float(one.rows.sum()) / lost[-1] if lost[-1] > 0 else 0.0
    scaled: NDArray[np.float64] = np.where(np.isfinite(lost[:-1]), lost[:-1] * share, np.inf)
    return scaled


def _of_table(
    one: Weighed, types: Sequence[BlockType], importance: bool, workers: Workers
) -> NDArray[np.float64]:
    """The same of a table, of which few rows count for much."""
    spans = by_weight(one.rows, one.tensor.source.in_features)
    found = np.array(workers.map(lambda span: _lost(one, types, importance, *span[:2]), spans))
    spoken = np.array([weight for _, _, weight in spans])
    own = found[:, -1]
    share = np.divide(spoken, own, out=np.zeros_like(own), where=own > 0)
    held = np.isfinite(found)
    lost: NDArray[np.float64] = share @ np.where(held, found, 0.0)
    return np.where(held.all(axis=0), lost, np.inf)[:-1]


def usable_types(
    source: SourceTensor, types: Sequence[BlockType], recipe: GgufRecipe
) -> list[BlockType]:
    """What a tensor may be stored as, smallest first: in place of a type whose blocks do not divide
    its rows the one that llama.cpp falls back to."""
    found = {fallback(kind, source.in_features, source.name) for kind in types}
    use = recipe.importance and _measured(source)
    usable = [
        kind for kind in found if use or not needs_importance(source.name, kind, recipe.file_type)
    ]
    return sorted(usable, key=lambda kind: (kind.bits_per_weight, kind.number))


def _measured(source: SourceTensor) -> bool:
    """Whether importance of what it reads is measured: llama.cpp looks at blocks alone."""
    return source.name.startswith("blk.")


def _lost(
    one: Weighed, types: Sequence[BlockType], importance: bool, first: int, last: int
) -> list[float]:
    """What each type loses in some rows; last the weights of these rows."""
    source, rows = one.tensor.source, one.rows[first:last]
    matrix = first // (source.rows // len(one.columns))
    raw = np.ascontiguousarray(source.read(first, last))
    weight = checked(source.name, as_floats(source, raw, threads=1), first)
    chosen = one.importance()[matrix] if importance else None
    columns = one.columns[matrix]
    found = []
    for kind in types:
        try:
            blocks = native_gguf.encode(weight, kind, chosen, threads=1)
        except FormatError:  # weights that this type cannot hold
            found.append(float("inf"))
            continue
        back = native_gguf.dequantize(blocks, kind, source.in_features, threads=1)
        errors = np.square(weight - back, dtype=np.float64) @ columns
        found.append(0.5 * float(errors @ rows))
    return [*found, float(rows.sum())]
