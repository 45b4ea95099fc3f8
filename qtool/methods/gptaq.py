"""GPTAQ: matrices compensate for what rounding the blocks before them has lost.

GPTQ asks a matrix for what it gives the input that quantized blocks hand on, X [tokens, in]. What
the original model computes there is of another input, Y. The codes Q that come nearest to that,

    ||X Q' - Y W'||^2  =  ||X (Q - W*)'||^2 + what no Q changes
    W* = W + W C H^-1           C = (Y - X)'X,  H = X'X

are those of GPTQ for W* in the place of W. C and H are of a small text, and the whole way to W*
goes by its chances, too: part of it is taken, and a tenth of H's mean diagonal is added to H.

Source: Li et al., GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration, 2025,
which goes the same way column by column, within the sweep.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.methods import gptq
from qtool.methods.tiles import TILE, Spread, in_turn

Floats = NDArray[np.float32]

# What is damped are the chances of the text, of which GPTQ's own sweep has less to fear.
OPTIONS = gptq.Options(act_order=False, damp_percent=0.1, token_damping=False)


@dataclass(frozen=True)
class Step:
    """C H^-1 as matrices [in, in] to be multiplied with one after another."""

    factors: tuple[torch.Tensor, ...]
    notes: tuple[str, ...] = ()


def step_of(
    gram: torch.Tensor,
    cross: torch.Tensor,
    rows: int,
    on_device: bool = False,
    spread: Spread = in_turn,
) -> Step:
    """From H and C, [in, in], on one device; C is written over. rows: of all matrices that the step
    is for. on_device: where they are is no CPU. SourceError where H is no Gram matrix of finite
    numbers."""
    diagonal = torch.diagonal(gram)
    mean = float(diagonal[diagonal > 0].double().mean()) if bool((diagonal > 0).any()) else 1.0
    if on_device:
        from qtool.methods import gptq_device

        there = gptq_device.factor(gram, OPTIONS)
        upper, notes = there.upper, there.notes
    else:
        given = gptq.factor(gram.numpy(), OPTIONS, spread=spread)
        upper, notes = torch.from_numpy(np.ascontiguousarray(given.upper)), given.notes
    notes = tuple(note for note in notes if "damping" in note)  # others are the sweep's, too
    cross /= mean  # as H is where it is factored
    if rows <= len(gram):
        return Step((cross, upper.mT, upper), notes)
    return Step((_product(_product(cross, upper.mT, spread), upper, spread),), notes)


def moved(weight: Floats, step: Step, part: float, spread: Spread = in_turn) -> Floats:
    """`part` of the way from a matrix [out, in] to W*."""
    way = torch.from_numpy(weight).to(step.factors[0].device)
    for factor in step.factors:
        way = _product(way, factor, spread)
    return np.asarray(weight + np.float32(part) * way.cpu().numpy())


def _product(left: torch.Tensor, right: torch.Tensor, spread: Spread) -> torch.Tensor:
    """Some rows at a time, always as many: the bits do not depend on threads."""
    made = torch.empty(len(left), right.shape[1], device=left.device)

    def rows(first: int) -> None:
        torch.mm(left[first : first + TILE], right, out=made[first : first + TILE])

    spread(rows, range(0, len(left), TILE))
    return made
