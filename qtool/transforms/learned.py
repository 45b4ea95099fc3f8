"""Learned rotations: R1 and R2 turned, step by step, to where rounding the weights costs least.

    minimize over orthogonal R    sum over matrices  u / tr(W H W') * sum over rows, groups  e(w')
    e(w') = min over c  g s^2 / 12 + sum of relu(|w'| - c)^2,    s = 2 c / (2^bits - 1)

e is the square error that a group of g rotated weights w' expects of rounding to a range c: that of
even noise within a step, and of what the range cuts off. (The noise of a step is not correlated
with the input, so that its cost in the output, tr(E H E'), is e times the mean square of the
input, which no rotation changes: what a rotation can change is the range.) H is the Gram matrix of
calibration inputs, so each matrix counts by its relative output error, times u: how large what its
branch adds to the residual stream is beside the stream.

The way: the gradient G at R gives the direction A = R'G - G'R, antisymmetric, and with momentum M

    R <- R (I + t/2 M)^-1 (I - t/2 M)          (Cayley: orthogonal for every t)

from the Hadamard start on. A step looks at a few blocks of rows; the matrix with the least cost on
all of them is kept. R2 of each block follows, with R1 as it then is. Rows are kept in 16 bits, at
most _BANK_BYTES of them.

Source: Liu et al., SpinQuant, 2024, section 3.2 (the aim: a rotation fitted to the quantized
network); Li et al., Efficient Riemannian Optimization on the Stiefel Manifold via the Cayley
Transform, 2020. The cost above is our own: it needs no pass through the network for a step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.calibrating.linears import Matrix, ObserveLinears, WeightIndex
from qtool.calibrating.single_thread import single_thread
from qtool.calibrating.sites import Tracer
from qtool.calibrating.skeleton import Skeleton
from qtool.calibrating.stream import LoadedBlock, Stream
from qtool.runs.progress import Progress
from qtool.scheme import Scheme
from qtool.transforms import rotation as rotations
from qtool.transforms.hadamard import Reals
from qtool.transforms.residual import BlockRoles
from qtool.transforms.rotate import Rotations
from qtool.transforms.rotated import Rotated
from qtool.transforms.rotation import Rotation

TOKENS = 2048  # of the calibration samples, for how much each matrix counts
_BANK_BYTES = 512 << 20
_BLOCKS_A_STEP = 4
_MOMENTUM = 0.8
_LOOK = 10  # steps between two looks at the whole cost
_STEPS_R2 = 30
_RANGES = torch.tensor([1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55])


@dataclass(frozen=True)
class Rows:
    """Vectors of the stream, and how much each counts.

    along: they are rows as stored, groups run along them; otherwise they are columns of a matrix
    that writes the stream, and groups run across them.
    """

    vectors: torch.Tensor  # [rows, n] or [n, columns], float16
    weight: float
    along: bool
    scheme: Scheme


@dataclass(frozen=True)
class HeadRows:
    """What R2 of a block turns: values [heads * size, n], with R1 in them; the reader [out, in]."""

    values: torch.Tensor
    reader: torch.Tensor
    weights: tuple[float, float]
    schemes: tuple[Scheme, Scheme]


def expected_cost(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """The sum of e over groups [..., g] of weights."""
    size = groups.abs()
    top = size.amax(dim=-1, keepdim=True)
    step = 2.0 / (2**bits - 1)
    with torch.no_grad():
        best = torch.full_like(top, float("inf"))
        chosen = torch.ones_like(top)
        for share in _RANGES:
            c = top * share
            cut = (size - c).clamp_min(0).square().sum(dim=-1, keepdim=True)
            cost = groups.shape[-1] * (c * step).square() / 12 + cut
            better = cost < best
            best = torch.where(better, cost, best)
            chosen = torch.where(better, share, chosen)
    c = top * chosen
    cut = (size - c).clamp_min(0).square().sum()
    cost_of_all: torch.Tensor = groups.shape[-1] * (c * step).square().sum() / 12 + cut
    return cost_of_all


def _cost(rows: Rows, matrix: torch.Tensor) -> torch.Tensor:
    vectors = rows.vectors.float()
    turned = vectors @ matrix if rows.along else matrix.T @ vectors
    return rows.weight * expected_cost(_grouped(turned, rows.scheme), rows.scheme.bits)


def _grouped(matrix: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    size = scheme.group_size if 0 < scheme.group_size <= matrix.shape[1] else matrix.shape[1]
    whole = matrix.shape[1] // size * size
    return matrix[:, :whole].reshape(matrix.shape[0], -1, size)


def learn(
    view: Rotated,
    found: Rotations,
    schemes: Mapping[str, Scheme],
    tokens: NDArray[np.int64],  # [samples, length]
    steps: int,
    rate: float,
    progress: Progress,
) -> Rotations:
    """The rotations that `found` becomes.

    view: with the changes of `found`. schemes: of the matrices that will be quantized.
    """
    with single_thread():
        bank, heads = _gather(view, found, schemes, tokens, progress)
        said: list[str] = []
        r1 = found.r1
        if r1 is not None and bank:
            learned, first, last = _learn_stream(r1, bank, steps, rate, progress)
            said.append(f"of the residual stream {_percent(first, last)}")
            found = replace(found, r1=learned)
            found.apply(view)
        r2s: dict[int, Rotation] = dict(found.r2)
        total = [0.0, 0.0]
        for index in heads:
            rows = _head_rows(view, found, index, schemes, heads[index])
            if rows is None:
                continue
            r2s[index], first, last = _learn_heads(found.r2[index], rows, rate)
            total[0] += first
            total[1] += last
        if total[0]:
            said.append(f"of values {_percent(*total)}")
    changed = "learning changed the expected error " + " and ".join(said) if said else None
    return replace(found, r2=r2s, learned=changed)


def _percent(first: float, last: float) -> str:
    return f"by {100 * (last / first - 1):+.1f} %"


def _gather(
    view: Rotated,
    found: Rotations,
    schemes: Mapping[str, Scheme],
    tokens: NDArray[np.int64],
    progress: Progress,
) -> tuple[list[list[Rows]], dict[int, dict[str, float]]]:
    """The rows that R1 turns, by block, and how much each matrix that R2 turns counts."""
    skeleton = Skeleton.open(view.original)
    stream = skeleton.embed(tokens)
    tracer = Tracer()
    bank: list[list[Rows]] = []
    heads: dict[int, dict[str, float]] = {}
    wanted = sum(
        2 * int(np.prod(view.tensors[name].shape))
        for roles in found.blocks.values()
        for name in (*roles.readers, *roles.writers)
        if name in schemes
    )
    every = max(1, -(-wanted // _BANK_BYTES))
    for index in range(skeleton.count):
        block = skeleton.block(index)
        roles = found.blocks[index]
        energies, shares = _weights(block, stream, tracer)
        counts = {
            name: shares[name] / energies[name]
            for name in energies
            if name in schemes and energies[name] > 0
        }
        if found.r1 is not None:
            bank.append([*_block_rows(view, found, block, roles, schemes, counts, every)])
        if roles.values is not None:
            heads[index] = counts
        for number, hidden in enumerate(stream.hidden):
            stream.hidden[number] = block.run(hidden, stream.calls[index][number])
    return bank, heads


def _weights(
    block: LoadedBlock, stream: Stream, tracer: Tracer
) -> tuple[dict[str, float], dict[str, float]]:
    """Of each matrix the energy of its output, and the share of its branch in the stream."""
    found = tracer.sites(block, stream)
    order = [call.matrix for call in found.linears]
    energy: dict[Matrix, float] = {}
    index = WeightIndex(block.module)

    def observe(matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        weight = block.module.get_parameter(matrix.parameter)
        whole = weight if matrix.expert is None else weight[matrix.expert]
        out = torch.nn.functional.linear(x, whole)
        energy[matrix] = energy.get(matrix, 0.0) + float(out.square().sum(dtype=torch.float64))

    size = 0.0
    for number, hidden in enumerate(stream.hidden):
        with ObserveLinears(index, observe):
            output = block.run(hidden, stream.calls[block.index][number])
        size += float(output.square().sum(dtype=torch.float64))
    width = stream.hidden[0].shape[-1]
    inner = {site.id for site in found.sites if site.producer is None}
    writes = {c.matrix for c in found.linears if c.site in inner and c.out_features == width}
    energies: dict[str, float] = {}
    shares: dict[str, float] = {}
    for number, call in enumerate(found.linears):
        if call.matrix not in energy:
            continue
        branch = next((m for m in order[number:] if m in writes and m in energy), None)
        for reader in call.readers:
            energies[reader.name] = energy[call.matrix]
            shares[reader.name] = energy[branch] / size if branch is not None and size else 0.0
    return energies, shares


def _block_rows(
    view: Rotated,
    found: Rotations,
    block: LoadedBlock,
    roles: BlockRoles,
    schemes: Mapping[str, Scheme],
    counts: Mapping[str, float],
    every: int,
) -> Iterator[Rows]:
    """The block's rows before R1: gains in them, and R2 too."""
    values = roles.values
    r2 = found.r2.get(block.index)
    for name, norm in roles.readers.items():
        if name not in counts:
            continue
        matrix = block.weights[name].double() * torch.from_numpy(view.gain(norm))
        if values is not None and r2 is not None and name == values.producer:
            for start in values.starts:
                part = matrix[start : start + values.size].numpy()
                matrix[start : start + values.size] = torch.from_numpy(r2.turn(part.copy()))
        yield Rows(_half(matrix[::every]), counts[name] * every, True, schemes[name])
    for name in roles.writers:
        if name not in counts:
            continue
        matrix = block.weights[name].double()
        if values is not None and r2 is not None and name == values.reader:
            matrix = torch.from_numpy(_turn_runs(matrix.numpy(), r2))
        if name in found.online.inputs:
            online = rotations.sylvester(found.online.inputs[name])
            matrix = torch.from_numpy(_turn_runs(matrix.numpy(), online))
        size = max(1, schemes[name].group_size)
        groups = torch.arange(matrix.shape[1]) // size % every == 0
        kept = matrix[:, groups] if every > 1 else matrix
        yield Rows(_half(kept), counts[name] * every, False, schemes[name])


def _half(matrix: torch.Tensor) -> torch.Tensor:
    """In 16 bits: exact enough for a cost, and half the memory."""
    return matrix.float().contiguous().half()


def _turn_runs(matrix: Reals, turned: Rotation) -> Reals:
    runs = np.ascontiguousarray(matrix).reshape(-1, turned.size)
    return np.ascontiguousarray(turned.turn(np.ascontiguousarray(runs.T)).T).reshape(matrix.shape)


def _learn_stream(
    start: Rotation, bank: list[list[Rows]], steps: int, rate: float, progress: Progress
) -> tuple[Rotation, float, float]:
    """R1, its cost at the start and at the end."""
    fixes = start.reflected is not None

    def whole(matrix: torch.Tensor) -> float:
        with torch.no_grad():
            single = matrix.float()
            return sum(float(_cost(rows, single)) for block in bank for rows in block)

    current = torch.from_numpy(start.dense())
    first = least = whole(current)
    best = current
    momentum = torch.zeros_like(current)
    order = np.random.default_rng(0)
    queue: list[int] = []
    for step in progress.blocks(steps, "step"):
        while len(queue) < min(_BLOCKS_A_STEP, len(bank)):
            queue += order.permutation(len(bank)).tolist()
        chosen, queue = queue[:_BLOCKS_A_STEP], queue[_BLOCKS_A_STEP:]
        matrix = current.float().requires_grad_(True)
        for number in chosen:
            for rows in bank[number]:
                _cost(rows, matrix).backward()  # type: ignore[no-untyped-call]
        assert matrix.grad is not None
        size = rate * 0.5 * (1 + np.cos(np.pi * step / steps))
        current, momentum = _cayley(current, matrix.grad.double(), momentum, size, fixes)
        if (step + 1) % _LOOK == 0 or step + 1 == steps:
            cost = whole(current)
            if cost < least:
                least, best = cost, current
    return rotations.learned(np.ascontiguousarray(best.numpy())), first, least


def _cayley(
    current: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor, rate: float, fixes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step down: each direction turns by about `rate` / sqrt(n) of a radian at most."""
    size = current.shape[0]
    direction = current.T @ gradient
    direction = direction - direction.T
    if fixes:  # nothing turns the all-ones vector
        direction = direction - direction.mean(dim=0, keepdim=True)
        direction = direction - direction.mean(dim=1, keepdim=True)
    length = float(direction.norm())
    if length == 0:
        return current, momentum
    momentum = _MOMENTUM * momentum + (1 - _MOMENTUM) * direction / length
    half = 0.5 * rate * momentum
    unit = torch.eye(size, dtype=torch.float64)
    turned = torch.linalg.solve(unit + half, unit - half)
    return current @ turned, momentum


def _head_rows(
    view: Rotated,
    found: Rotations,
    index: int,
    schemes: Mapping[str, Scheme],
    counts: Mapping[str, float],
) -> HeadRows | None:
    """What R2 of a block turns, without its R2."""
    values = found.blocks[index].values
    if values is None or values.producer not in counts or values.reader not in counts:
        return None
    r2 = found.r2[index]
    backwards = Rotation(r2.size, "random", matrix=np.ascontiguousarray(r2.dense().T))
    made = view.float32(values.producer).astype(np.float64)
    rows = [backwards.turn(made[start : start + values.size].copy()) for start in values.starts]
    read = _turn_runs(view.float32(values.reader).astype(np.float64), backwards)
    return HeadRows(
        torch.from_numpy(np.concatenate(rows)).float(),
        torch.from_numpy(read).float(),
        (counts[values.producer], counts[values.reader]),
        (schemes[values.producer], schemes[values.reader]),
    )


def _learn_heads(start: Rotation, rows: HeadRows, rate: float) -> tuple[Rotation, float, float]:
    """R2 of one block, its cost at the start and at the end."""

    def cost(matrix: torch.Tensor) -> torch.Tensor:
        size = matrix.shape[0]
        values = rows.values.reshape(-1, size, rows.values.shape[1])
        made = (matrix.T @ values).reshape(rows.values.shape)
        read = (rows.reader.reshape(-1, size) @ matrix).reshape(rows.reader.shape)
        pairs = zip((made, read), rows.weights, rows.schemes, strict=True)
        return sum(
            (w * expected_cost(_grouped(m, s), s.bits) for m, w, s in pairs), torch.zeros(())
        )

    current = torch.from_numpy(start.dense())
    momentum = torch.zeros_like(current)
    with torch.no_grad():
        first = least = float(cost(current.float()))
    best = current
    for step in range(_STEPS_R2):
        matrix = current.float().requires_grad_(True)
        value = cost(matrix)
        if float(value.detach()) < least:
            least, best = float(value.detach()), current
        value.backward()  # type: ignore[no-untyped-call]
        assert matrix.grad is not None
        size = rate * 0.5 * (1 + np.cos(np.pi * step / _STEPS_R2))
        current, momentum = _cayley(current, matrix.grad.double(), momentum, size, False)
    return rotations.learned(np.ascontiguousarray(best.numpy())), first, least
