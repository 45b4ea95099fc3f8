"""Learned rotations: R1 and R2 moved, step by step, to where rounding the weights costs least.

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
all of them is kept. R2 of each block follows, with R1 as it then is. Where inputs are rounded too,
to integers, their noise joins the cost (`qtool.transforms.learned_inputs`).

Source: Liu et al., SpinQuant, 2024, section 3.2 (the aim: a rotation fitted to the quantized
network); Li et al., Efficient Riemannian Optimization on the Stiefel Manifold via the Cayley
Transform, 2020. The cost above is our own: it needs no pass through the network for a step.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.messages.progress import Progress
from qtool.recipe.weights import Activations
from qtool.scheme import Scheme
from qtool.streaming.single_thread import single_thread
from qtool.transforms import rotation as rotations
from qtool.transforms.learned_inputs import Inputs
from qtool.transforms.learned_rows import HeadRows, Rows, gather, head_rows
from qtool.transforms.rotated import Rotated
from qtool.transforms.rotation import Rotation
from qtool.transforms.rotations import Rotations

TOKENS = 2048  # of the calibration samples, for how much each matrix counts
_BLOCKS_A_STEP = 4
_MOMENTUM = 0.8
_LOOK = 10  # steps between two looks at the whole cost
_STEPS_R2 = 30
_RANGES = torch.tensor([1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55])


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


def _cost(rows: Rows | Inputs, matrix: torch.Tensor) -> torch.Tensor:
    if isinstance(rows, Inputs):
        return rows.cost(matrix)
    vectors = rows.vectors.float()
    rotated = vectors @ matrix if rows.along else matrix.T @ vectors
    return rows.weight * expected_cost(_grouped(rotated, rows.scheme), rows.scheme.bits)


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
    rounded: Activations | None = None,
) -> Rotations:
    """The rotations that `found` becomes.

    view: with the changes of `found`. schemes: of the matrices that will be quantized. rounded:
    what becomes of their inputs; of integers the noise is looked at too.
    """
    if rounded is not None and rounded.type != "int":
        rounded = None
    with single_thread():
        bank, heads = gather(view, found, schemes, tokens, rounded)
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
            rows = head_rows(view, found, index, schemes, *heads[index])
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


def _learn_stream(
    start: Rotation, bank: list[list[Rows | Inputs]], steps: int, rate: float, progress: Progress
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
    if fixes:  # nothing rotates the all-ones vector
        direction = direction - direction.mean(dim=0, keepdim=True)
        direction = direction - direction.mean(dim=1, keepdim=True)
    length = float(direction.norm())
    if length == 0:
        return current, momentum
    momentum = _MOMENTUM * momentum + (1 - _MOMENTUM) * direction / length
    half = 0.5 * rate * momentum
    unit = torch.eye(size, dtype=torch.float64)
    rotated = torch.linalg.solve(unit + half, unit - half)
    return current @ rotated, momentum


def _learn_heads(start: Rotation, rows: HeadRows, rate: float) -> tuple[Rotation, float, float]:
    """R2 of one block, its cost at the start and at the end."""

    def cost(matrix: torch.Tensor) -> torch.Tensor:
        size = matrix.shape[0]
        values = rows.values.reshape(-1, size, rows.values.shape[1])
        made = (matrix.T @ values).reshape(rows.values.shape)
        read = (rows.reader.reshape(-1, size) @ matrix).reshape(rows.reader.shape)
        pairs = zip((made, read), rows.weights, rows.schemes, strict=True)
        given = torch.zeros(()) if rows.inputs is None else rows.inputs.cost(matrix)
        return sum((w * expected_cost(_grouped(m, s), s.bits) for m, w, s in pairs), given)

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
