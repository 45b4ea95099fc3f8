"""gptq.yaqa: rows not yet rounded make up for what rows before them have lost.

GPTQ's columns make up for each other's errors, row by row, as the Gram matrix of the input says.
What a matrix gives has one, too: with g the slopes of the model's loss by its outputs at a token,

    H = sum over tokens of g g' / |g|                       [out, out]

says which errors of rows add up and which cancel. With both, the loss of an error E is taken for
tr(H E G E'), and once some rows are rounded, the best values of the rest are known in closed form:
what GPTQ does along columns is done along rows, with every row swept along its columns. Rows are
rounded some at a time, those whose errors cost most first.

    slopes behind every block (qtool.fitting.ends), of the first samples
    -> back through the block, as it is by then -> H of each matrix
    -> its rows, each with what those before it lost -> the sweep, as ever

Slopes are few and noisy, H most of all of a wide matrix, so that its mean diagonal is added to it
(once; a tenth of that does 1 % to 7 % worse on other text), and tokens count by |g|, not its square
(4 to 10 % better). Embeddings, heads and routed experts are left out.

Source: Tseng, Sun and De Sa, Model-Preserving Adaptive Rounding (YAQA), 2025.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.calibrating.linears import Matrix, ObserveLinears, WeightIndex
from qtool.calibrating.placed import Passage
from qtool.calibrating.single_thread import single_thread
from qtool.calibrating.sites import BlockSites
from qtool.calibrating.stream import LoadedBlock
from qtool.calibrating.workers import Workers
from qtool.fitting.ends import Ends
from qtool.fitting.passing import Passing
from qtool.methods import gptq
from qtool.methods.tiles import Spread, in_turn
from qtool.verification.sentences import count

Floats = NDArray[np.float32]
Rows = dict[str, Floats]  # H [out, out] by checkpoint tensor

TOGETHER = 16  # rows that are rounded before others make up for them
_BLOCK = 256  # and rows after which all that are left are told
_OPTIONS = gptq.Options(act_order=True, damp_percent=1.0, token_damping=False)
FED_BACK = "rows of a block made up for each other, by slopes over "  # a note; told() counts


@dataclass(frozen=True)
class Feedback:
    """What rows of a run are to make up for, block by block."""

    ends: Ends

    @property
    def note(self) -> str:
        """Of a block."""
        return f"{FED_BACK}{count(self.ends.samples, 'sample')}"

    def of(
        self, block: LoadedBlock, passage: Passage, found: BlockSites, names: Collection[str]
    ) -> Rows:
        """H of some of the block's matrices, through the block as it is now; of those that read
        each token once. UnsupportedError where torch has no gradient, SourceError where one is not
        finite."""
        ids = {one.id for one in found.sites if one.per_token == 1 and one.expert is None}
        linears = {
            one.matrix: one
            for one in found.linears
            if one.site in ids and any(reader.name in names for reader in one.readers)
        }
        ends = self.ends.behind(block.index, passage.workers)
        index, workers = WeightIndex(block.module), passage.workers
        sums: dict[Matrix, torch.Tensor] = {}

        def one(number: int) -> dict[Matrix, torch.Tensor]:
            return _slopes(block, index, passage, number, linears.keys(), ends)

        for first in range(0, len(ends), workers.threads):
            last = min(len(ends), first + workers.threads)
            _add(sums, workers.map(one, range(first, last)), workers)
        rows: Rows = {}
        for matrix, total in sums.items():
            for reader in linears[matrix].readers if total.any() else ():
                own = slice(*reader.rows)
                if reader.name in names:
                    rows[reader.name] = np.ascontiguousarray(total[own, own].numpy())
        return rows


def _add(
    sums: dict[Matrix, torch.Tensor], batches: list[dict[Matrix, torch.Tensor]], workers: Workers
) -> None:
    """Products of some micro-batches' slopes, in their order: float32, of which damping leaves no
    digit that float64 would have."""

    def add(matrix: Matrix) -> None:
        for slopes in (batch[matrix] for batch in batches if matrix in batch):
            sums[matrix].addmm_(slopes.T, slopes)

    every = {matrix: one.shape[1] for batch in batches for matrix, one in batch.items()}
    for matrix, out in every.items():
        if matrix not in sums:
            sums[matrix] = torch.zeros(out, out)
    workers.map(add, every)


def _slopes(
    block: LoadedBlock,
    index: WeightIndex,
    passage: Passage,
    number: int,
    wanted: Collection[Matrix],
    ends: Passing,
) -> dict[Matrix, torch.Tensor]:
    """Of a micro-batch, g / sqrt |g| [tokens, out], by each matrix that is called once."""
    stream = passage.stream
    outputs: dict[Matrix, list[torch.Tensor]] = {}

    def note(matrix: Matrix, output: torch.Tensor, _: object) -> None:
        if matrix in wanted and output.requires_grad:
            outputs.setdefault(matrix, []).append(output)

    states = stream.hidden[number].detach().requires_grad_()
    call = stream.calls[block.index][number]
    tokens = states.shape[0] * states.shape[1]
    try:
        with torch.enable_grad(), ObserveLinears(index, lambda *_: None, note):
            given = block.outputs(block.module, states.clone(), call)
        once = {
            matrix: made[0]
            for matrix, made in outputs.items()
            if len(made) == 1 and made[0].numel() == tokens * made[0].shape[-1]
        }
        if not once:
            return {}
        slopes = torch.autograd.grad(given, [*once.values()], ends[number], materialize_grads=True)
    except RuntimeError as error:
        raise block.no_gradient(error, "what its rows' errors cost cannot be told") from error
    if not all(bool(torch.isfinite(one).all()) for one in slopes):
        raise block.not_finite()
    return {matrix: _counted(one) for matrix, one in zip(once, slopes, strict=True)}


def _counted(slopes: torch.Tensor) -> torch.Tensor:
    rows = slopes.reshape(-1, slopes.shape[-1])
    size = rows.square().mean(-1, keepdim=True).sqrt_()
    return torch.where(size > 0, rows / size.sqrt(), 0.0)


def fed_back(
    weight: Floats,
    rows: Floats,
    rounded: Callable[[Floats], Floats],
    spread: Spread = in_turn,
) -> Floats:
    """The rows of weight [out, in] as they are to be rounded, each with what those before it lost.

    rows: H [out, out]. rounded: of some rows, what becomes of each, whatever the others are.
    """
    factor = gptq.factor(rows, _OPTIONS, spread=spread)
    upper, order = torch.from_numpy(np.asarray(factor.upper)), factor.order
    left = np.ascontiguousarray(weight[order], np.float32)
    there = torch.from_numpy(left)
    told = torch.empty(min(_BLOCK, len(left)), left.shape[1])  # of a block, ready to be taken off
    with single_thread():
        for start in range(0, len(left), _BLOCK):
            stop = min(len(left), start + _BLOCK)
            for first in range(start, stop, TOGETHER):
                last = min(stop, first + TOGETHER)
                now = left[first:last]
                lost = torch.from_numpy(now - rounded(now))
                own = upper[first:last, first:last].T.contiguous()
                part = told[first - start : last - start]
                part.copy_(torch.linalg.solve_triangular(own, lost, upper=False))
                there[last:stop] -= upper[first:last, last:stop].T @ part
            there[stop:] -= upper[start:stop, stop:].T @ told[: stop - start]
    made = np.empty_like(left)
    made[order] = left
    return made


def told(notes: Sequence[str], blocks: int) -> list[str]:
    """Notes of all blocks, with how many of them were fed back in one sentence."""
    done = [note.removeprefix(FED_BACK) for note in notes if note.startswith(FED_BACK)]
    rest = [note for note in notes if not note.startswith(FED_BACK)]
    if done:
        rest.append(
            f"rows of matrices made up for each other in {len(done)} of {blocks} blocks, by slopes "
            f"over {done[0]} (gptq.yaqa): relative errors of matrices are larger for it"
        )
    return rest
