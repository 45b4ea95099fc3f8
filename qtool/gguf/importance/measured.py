"""An importance matrix out of measured sums of squares: which GGUF tensor reads which input.

llama-imatrix looks at every matrix product of a block (`blk.*.weight`), and so does this. A GGUF
tensor knows the checkpoint tensors that it is made of, and those the site they read: its row of
the importance matrix is the site's sum of squares. Merged experts [experts, out, in] have a row
for each expert, in their order. Permuted rows of q and k do not matter, only columns are looked at.

llama-imatrix puts the BOS token at the place of each chunk's first one where the tokenizer adds
one, and so does `begin_with_bos`.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import is_
from typing import TYPE_CHECKING, TypeVar

import numpy as np

import qtool
from qtool.errors import SourceError
from qtool.formats.gguf_values import Value, string
from qtool.gguf.importance.imatrix import Counts, Floats, Importance
from qtool.gguf.source import GgufSource, SourceTensor
from qtool.gguf.tokenizer.pretokenizers import adds_bos
from qtool.gguf_mixtures.kinds import kept_reason
from qtool.provenance.record import with_gpu
from qtool.record import CALIBRATION
from qtool.texts.calibration import Calibration

if TYPE_CHECKING:  # they import torch
    from qtool.calibrating.sites import Site
    from qtool.calibrating.stats import SiteStats

Read = TypeVar("Read")  # what is known of a site

_BOS_BY_DEFAULT = {"llama": 1}  # its id, by tokenizer.ggml.model


def first_token(source: GgufSource) -> int | None:
    """The id with which llama.cpp begins every text, or None."""
    return bos_of(source.metadata)


def bos_of(metadata: Mapping[str, Value]) -> int | None:
    """The same of a file's keys."""
    found = {
        key: metadata[f"tokenizer.ggml.{key}"].value
        for key in ("add_bos_token", "bos_token_id", "model", "pre")
        if f"tokenizer.ggml.{key}" in metadata
    }
    model = found.get("model")
    bos = found.get("bos_token_id", _BOS_BY_DEFAULT.get(str(model)))
    adds = found.get("add_bos_token", adds_bos(model, found.get("pre")))
    return bos if isinstance(bos, int) and adds else None


def begin_with_bos(calibration: Calibration, source: GgufSource) -> Calibration:
    """The same chunks, each with BOS in the place of its first token where llama.cpp has it so."""
    bos = first_token(source)
    if bos is None:
        return calibration
    rows = next((t.rows for t in source.tensors if t.name == "token_embd.weight"), bos + 1)
    if bos >= rows:
        raise SourceError(
            f"{source.path}: the tokenizer's BOS is the id {bos}, and the embedding has {rows} "
            "rows; tokenizer and model do not belong together"
        )
    tokens = calibration.tokens.copy()
    tokens[:, 0] = bos
    return replace(calibration, tokens=tokens)


@dataclass(frozen=True)
class Squares:
    """A site: what was summed over how many tokens, and the checkpoint tensors that read it."""

    id: str
    names: tuple[str, ...]
    expert: int | None  # which of the experts that one tensor holds
    square: Floats  # [in]
    count: int

    @classmethod
    def of(cls, site: "Site", stats: "SiteStats") -> "Squares":
        """What was measured of a site; SourceError where it cannot be true."""
        square = stats.square
        if square is None:
            square = np.zeros(site.in_features, dtype=np.float32)
        if not np.isfinite(square).all():
            raise SourceError(
                f"the input of {site.id} is not finite on the calibration text, so its importance "
                "cannot be measured; the checkpoint is damaged, or overflows in float32"
            )
        return cls(site.id, site.names, site.expert, square, stats.count)


def matrices_reading(
    tensor: SourceTensor, sites: Mapping[str, Mapping[int, Read]], width_of: Callable[[Read], int]
) -> list[Read]:
    """What each of a tensor's matrices reads, in their order; empty where it is not known of all.

    sites: by checkpoint tensor, then by the expert's number, or -1.
    """
    found = [sites.get(name) or _of_each(name, sites) for name in tensor.origin]
    if not all(found):
        return []
    seen = [experts[number] for experts in found for number in sorted(experts)]
    matrices = tensor.shape[0] if len(tensor.shape) == 3 else 1
    if matrices == 1 and all(one is seen[0] for one in seen):
        seen = seen[:1]
    if len(seen) == 2 * matrices and all(map(is_, seen[::2], seen[1::2])):
        seen = seen[::2]  # gate and up of each expert, which read the same
    if tensor.cut is not None and tensor.cut.matrices:  # rows of a matrix, by head
        seen = [] if tensor.cut.transposed else seen * matrices
    fits = all(width_of(one) == tensor.in_features for one in seen)
    return seen if fits and len(seen) == matrices else []


def _of_each(stack: str, sites: Mapping[str, Mapping[int, Read]]) -> dict[int, Read]:
    """What is read by the experts in one tensor, where they were measured one by one."""
    layer, _, kind = stack.rpartition(".")
    each = (sites.get(f"{layer}.{number}.{kind}.weight") for number in itertools.count())
    there = itertools.takewhile(lambda one: one is not None, each)
    return {n: read for n, one in enumerate(there) if one and (read := one.get(n)) is not None}


@dataclass
class Gathered:
    """Sums of squares by the checkpoint tensors that read them."""

    # By tensor, then by the expert's number, of which one tensor may hold all.
    _seen: dict[str, dict[int, Squares]] = field(default_factory=dict)

    def add(self, squares: Squares) -> None:
        """What was measured of a site."""
        number = -1 if squares.expert is None else squares.expert
        for name in squares.names:
            self._seen.setdefault(name, {})[number] = squares

    def importance(
        self, source: GgufSource, calibration: Calibration, gpu: str | None = None
    ) -> Importance:
        """Of every matrix in a block of `source` that reads a site. gpu: what did the work, if not
        the CPU."""
        sums: dict[str, Floats] = {}
        counts: dict[str, Counts] = {}
        unmeasured: list[str] = []
        said = source.metadata.get("general.architecture")
        architecture = "" if said is None else str(said.value)
        for tensor in source.tensors:
            if not tensor.name.startswith("blk.") or not tensor.name.endswith(".weight"):
                continue
            rows = matrices_reading(tensor, self._seen, lambda squares: squares.square.size)
            if rows:
                squares = np.stack([row.square for row in rows])
                sums[tensor.name] = (
                    squares if tensor.columns is None else squares[:, tensor.columns]
                )
                counts[tensor.name] = np.array([row.count for row in rows], dtype=np.int64)
            elif kept_reason(tensor, architecture) is None:  # norms are no matrices
                unmeasured.append(tensor.name)
        if not sums:
            raise SourceError(
                f"{source.path}: none of its matrices reads an input that could be measured"
            )
        chunks, chunk_size = calibration.tokens.shape
        known = {"version": qtool.__version__, "environment": with_gpu(gpu)}
        record = {**calibration.record(), **known}
        return Importance(
            sums,
            counts,
            (calibration.source,),
            chunks,
            chunk_size,
            unmeasured=tuple(unmeasured),
            extra={CALIBRATION: string(json.dumps(record, sort_keys=True))},
        )
