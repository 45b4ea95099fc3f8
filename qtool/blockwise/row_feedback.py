"""gptq.yaqa: rows not yet rounded compensate for what rows before them have lost.

GPTQ's columns compensate for each other's errors, row by row, as the Gram matrix of the input says.
What a matrix gives has one, too: with g the gradients of the model's loss by a token's outputs,

    H = sum over tokens of g g' / |g|                       [out, out]

says which errors of rows add up and which cancel. With both, the loss of an error E is taken for
tr(H E G E'), and once some rows are rounded, the best values of the rest are known in closed form:
what GPTQ does along columns is done along rows, with every row swept along its columns. Rows are
rounded in parts, those whose errors cost most first.

    gradients behind every block (qtool.gradients.block_gradients), of the first samples
    -> back through the block, as it is by then -> H of each matrix
    -> its rows, part by part: each with what those before it lost, then swept

Gradients are few and noisy, H most of all of a wide matrix, so that its mean diagonal is added to
it (once; a tenth of that does 1 % to 7 % worse on other text), and tokens count by |g|, not its
square (4 to 10 % better). What routed experts give is added up, in the width of what they were
given: their last matrices have one H in common. That of their other ones, of which each meets a few
of the tokens, would be of chance. These, embeddings and heads are left out.

Codes changed once more, one by one, where that lowers tr(H E G E'), and scales fitted to them, take
another 3 % to 8 % off it, and the model comes no nearer: of SmolLM2 at 4 bits the KL divergence is
0.0828 without, 0.0826 with new codes, and 0.0830 with new codes and scales.

Source: Tseng, Sun and De Sa, Model-Preserving Adaptive Rounding (YAQA), 2025.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.blockwise.row_rounding import RowFactor
from qtool.calibrating.placed import Passage
from qtool.calibrating.sites import BlockSites, LinearCall
from qtool.cuda.device import host
from qtool.errors import NoGradientError, UnsupportedError
from qtool.gradients.block_gradients import Ends, advised
from qtool.gradients.passing import Passing
from qtool.messages.sentences import count
from qtool.streaming.allocator import give_back
from qtool.streaming.linears import Matrix, ObserveLinears, WeightIndex
from qtool.streaming.precision import matmuls_in
from qtool.streaming.stream import LoadedBlock, Stream
from qtool.streaming.workers import Workers

Floats = NDArray[np.float32]

FED_BACK = "rows of a block compensated for each other, by gradients over "  # a note; told() counts

Rows = dict[str, Floats | RowFactor]  # H [out, out] by checkpoint tensor


@dataclass(frozen=True)
class _Kind:
    """Matrices whose gradients have one H: one, or the same of all routed experts."""

    matrix: Matrix
    routed: bool = False


@dataclass(frozen=True)
class Feedback:
    """What rows of a run are to compensate for, block by block."""

    ends: Ends
    alone: dict[int, str] = field(default_factory=dict)  # why rows of a block are rounded so
    routed: set[int] = field(default_factory=set)  # blocks of whose experts some rows are not

    def said(self, index: int, fed: bool) -> list[str]:
        """Notes of block `index`. fed: whether rows of it compensated for each other."""
        if self.ends.missing:
            left = f"rows of no matrix compensated for each other (gptq.yaqa): {self.ends.missing}"
            return [left] if not index else []
        if index in self.alone:
            why = self.alone[index]
            return [f"rows of a block did not compensate for each other (gptq.yaqa): {why}"]
        some = ", of routed experts those of their last matrices" if index in self.routed else ""
        return [f"{FED_BACK}{count(self.ends.samples, 'sample')}{some}"] if fed else []

    def of(
        self, block: LoadedBlock, passage: Passage, found: BlockSites, names: Collection[str]
    ) -> Rows:
        """H of some of the block's matrices, through the block as it is now; of those that read
        each token once, and the last ones of routed experts. None where there is no gradient, or
        it is not finite; UnsupportedError where a device or the block fails."""
        if self.ends.missing:
            return {}
        try:
            return self._of(block, passage, found, names)
        except NoGradientError as error:
            self.alone[block.index] = str(error)
            return {}
        except UnsupportedError as error:
            raise advised(error) from error

    def _of(
        self, block: LoadedBlock, passage: Passage, found: BlockSites, names: Collection[str]
    ) -> Rows:
        kinds = _kinds(found, names)
        if any(site.expert is not None for site in found.sites):
            self.routed.add(block.index)
        widths = {
            kinds[one.matrix]: one.out_features for one in found.linears if one.matrix in kinds
        }
        give_back()  # what measuring left, between which nothing fits that comes now
        ends = self.ends.behind(block.index, passage.workers)
        room = None if passage.device is None else passage.device.sums_bytes // 2
        rows: Rows = {}
        for group in _groups(widths, room):
            with passage.placed(block) as (there, stream, workers):
                wanted = {matrix: kind for matrix, kind in kinds.items() if kind in group}
                for kind, total in _sums(there, stream, workers, ends, wanted).items():
                    if total.any():
                        with matmuls_in("float32"):
                            told = _told(kind, total, found, kinds, names, passage)
                        rows |= _whole(rows, told, kind.matrix.rows, block)
        return rows


def _kinds(found: BlockSites, names: Collection[str]) -> dict[Matrix, _Kind]:
    """What compensates for rows, of the matrices of some checkpoint tensors."""
    sites = {one.id: one for one in found.sites}
    whole = {one.id for one in found.sites if one.per_token == 1 and one.expert is None}
    widths: dict[str, int] = {}  # of what experts are given, by where they are
    first: set[str] = set()  # parameters that read that
    for one in found.linears:  # in the order in which they are called
        if one.matrix.expert is not None and _owner(one) not in widths:
            widths[_owner(one)] = sites[one.site].in_features
            first |= {other.matrix.parameter for other in found.linears if other.site == one.site}
    kinds = {}
    for one in found.linears:
        if not any(reader.name in names for reader in one.readers):
            continue
        if one.site in whole:
            kinds[one.matrix] = _Kind(one.matrix)
        elif (
            one.matrix.expert is not None
            and one.matrix.parameter not in first
            and one.out_features == widths[_owner(one)]
        ):
            kinds[one.matrix] = _Kind(replace(one.matrix, expert=None), routed=True)
    return kinds


def _owner(one: LinearCall) -> str:
    return one.matrix.parameter.rpartition(".")[0]


def _told(
    kind: _Kind,
    total: torch.Tensor,
    found: BlockSites,
    kinds: Mapping[Matrix, _Kind],
    names: Collection[str],
    passage: Passage,
) -> Rows:
    """H of a kind, by the checkpoint tensors that have it."""
    readers = [
        reader
        for one in found.linears
        if kinds.get(one.matrix) == kind
        for reader in one.readers
        if reader.name in names
    ]
    if kind.routed:
        factor = RowFactor.of(total, passage.workers.spread, passage.device)
        factor = replace(factor, upper=factor.upper.cpu())
        whole = (0, len(factor.order))
        return {reader.name: factor for reader in readers if reader.rows == whole}
    owns = {reader.name: slice(*reader.rows) for reader in readers}
    return {name: host(total[own, own].contiguous()) for name, own in owns.items()}


def _whole(before: Rows, told: Rows, own: tuple[int, int] | None, block: LoadedBlock) -> Rows:
    """The same for the tensor that has these rows and those of other matrices: rows of different
    matrices do not compensate for each other."""
    if own is None:
        return told
    every: Rows = {}
    for name, part in told.items():
        out = len(block.weights[name])
        whole = before.get(name, np.zeros((out, out), np.float32))
        assert isinstance(whole, np.ndarray) and isinstance(part, np.ndarray)
        whole[slice(*own), slice(*own)] = part
        every[name] = whole
    return every


def _groups(widths: Mapping[_Kind, int], room: int | None) -> list[list[_Kind]]:
    """Those whose H are there at once: of all, or of as many as `room` bytes hold."""
    groups: list[list[_Kind]] = []
    left = 0
    for kind, out in widths.items():
        if not groups or (room is not None and 4 * out**2 > left):
            groups.append([])
            left = room or 0
        groups[-1].append(kind)
        left -= 4 * out**2
    return groups


def _sums(
    block: LoadedBlock,
    stream: Stream,
    workers: Workers,
    ends: Passing,
    wanted: Mapping[Matrix, _Kind],
) -> dict[_Kind, torch.Tensor]:
    """H of some matrices, where the block is."""
    index = WeightIndex(block.module)
    sums: dict[_Kind, torch.Tensor] = {}

    def one(number: int) -> dict[_Kind, torch.Tensor]:
        return _gradients(block, index, stream, number, wanted, ends)

    for first in range(0, len(ends), workers.threads):
        last = min(len(ends), first + workers.threads)
        _add(sums, workers.map(one, range(first, last)), workers)
    return sums


def _add(
    sums: dict[_Kind, torch.Tensor], batches: list[dict[_Kind, torch.Tensor]], workers: Workers
) -> None:
    """Products of some micro-batches' gradients, in their order: float32, of which damping leaves
    no digit that float64 would have."""

    def add(kind: _Kind) -> None:
        for gradients in (batch[kind] for batch in batches if kind in batch):
            sums[kind].addmm_(gradients.T, gradients)

    every = {kind: one for batch in batches for kind, one in batch.items()}
    for kind, one in every.items():
        if kind not in sums:
            sums[kind] = one.new_zeros(one.shape[1], one.shape[1])
    workers.map(add, every)


def _gradients(
    block: LoadedBlock,
    index: WeightIndex,
    stream: Stream,
    number: int,
    wanted: Mapping[Matrix, _Kind],
    ends: Passing,
) -> dict[_Kind, torch.Tensor]:
    """Of a micro-batch, g / sqrt |g| [tokens, out], by each matrix that is called once, and by all
    experts that are called."""
    counted, found = _taken_back(block, index, stream, number, wanted, ends)
    if not all(bool(torch.isfinite(one).all()) for one in found.values()):
        raise block.not_finite()
    last = {output: kind for kind, made in counted.items() for output, _ in made}
    told: dict[_Kind, torch.Tensor] = {}
    for kind, made in counted.items():
        parts = [_counted(found[output][own]) for output, own in made]
        told[kind] = parts[0] if len(parts) == 1 else torch.cat(parts)
        for output in {output for output, _ in made if last[output] == kind}:
            del found[output]  # they are as many as all that is told
    return told


def _taken_back(
    block: LoadedBlock,
    index: WeightIndex,
    stream: Stream,
    number: int,
    wanted: Mapping[Matrix, _Kind],
    ends: Passing,
) -> tuple[dict[_Kind, list[tuple[int, Any]]], dict[int, torch.Tensor]]:
    """Gradients by outputs, each under a number, and which of them, and of their rows, are by a
    kind's matrices."""
    outputs: dict[_Kind, list[tuple[torch.Tensor, Any]]] = {}  # and which of its rows

    def note(matrix: Matrix, output: torch.Tensor, own: Any) -> None:
        if matrix in wanted and output.requires_grad:
            outputs.setdefault(wanted[matrix], []).append((output, own))

    states = stream.hidden[number].detach().requires_grad_()
    call = stream.calls[block.index][number]
    tokens = states.shape[0] * states.shape[1]
    try:
        with torch.enable_grad(), ObserveLinears(index, lambda *_: None, note):
            given = block.outputs(block.module, states.clone(), call)
        counted = {
            kind: made
            for kind, made in outputs.items()
            if kind.routed or (len(made) == 1 and made[0][0].shape[:-1].numel() == tokens)
        }
        if not counted:
            return {}, {}
        behind = ends[number].to(stream.place)
        by = {id(output): output for made in counted.values() for output, _ in made}
        found = torch.autograd.grad(given, [*by.values()], behind, materialize_grads=True)
    except RuntimeError as error:
        raise block.no_gradient(error, "what its rows' errors cost cannot be told") from error
    told = {kind: [(id(output), own) for output, own in made] for kind, made in counted.items()}
    return told, dict(zip(by, found, strict=True))


def _counted(gradients: torch.Tensor) -> torch.Tensor:
    rows = gradients.reshape(-1, gradients.shape[-1])
    size = rows.square().mean(-1, keepdim=True).sqrt_()
    return torch.where(size > 0, rows / size.sqrt(), 0.0)


def told(notes: Sequence[str], blocks: int) -> list[str]:
    """Notes of all blocks, with how many of them were fed back in one sentence."""
    done = [note.removeprefix(FED_BACK) for note in notes if note.startswith(FED_BACK)]
    rest = [note for note in notes if not note.startswith(FED_BACK)]
    if done:
        rest.append(
            f"rows of matrices compensated for each other in {len(done)} of {blocks} blocks, by "
            f"gradients over {max(done, key=len)} (gptq.yaqa): the model is nearer, though "
            "relative errors of matrices are larger"
        )
    return rest
