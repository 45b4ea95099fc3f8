"""Folding: scales on the input of some matrices, taken out of what makes that input.

    y = (x / s) (W s)'          s > 0 per channel; x / s comes from a changed producer

Who can take 1 / s is proposed by structure and then proved by numbers:

    norm         the norm whose output rows are read: its weight (and bias) divided by s, or, where
                 the module multiplies by 1 + weight, the weight that makes 1 + weight smaller
    projection   rows of an earlier matrix, where channel j of the input is linear in row r(j) of
                 its output: up_proj before down_proj, fc1 before a ReLU, v_proj before o_proj.
                 Where heads are shared, several channels come from one row and share a scale.

Proof: random scales between 1/2 and 2 are folded in, the block runs on a probe, and the output
must be the same; and it must change once the scales of the readers are left out, or the probe
says nothing. What lies before a clamp (clip_qkv, swiglu_limit) passes that where the clamp has
nothing to do on the probe, and scales that are found are larger: rows of a matrix have to take
powers of two from 2^-10 to 2^10, too, which change no bit of what is exact.

A norm is stored in 16 bits, so its divided weight is rounded. The ratio of the old weight to the
new one is then what multiplies the readers, and the product is exact again. A bias that is
divided along is rounded to its dtype, as the source's own was.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.calibrating.sites import BlockSites, Site
from qtool.formats.dtypes import written_dtype
from qtool.streaming.linears import Matrix, ObserveLinears, WeightIndex
from qtool.streaming.stream import Call, LoadedBlock
from qtool.transforms.places import row_maps

Scales = NDArray[np.float32]

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # as written
_TOLERANCE = 1e-3  # of the change that unpaired scales make
_NOISE = 1e-6  # of the largest output: what float32 sums lose
_FARTHEST = 10  # the exponent of the largest power of two: AWQ's scales end at 2^7


@dataclass(frozen=True)
class Fold:
    """A producer that may take the scales of an input, and all matrices that read the input."""

    readers: tuple[str, ...]  # checkpoint names
    producer: str
    bias: str | None
    rows: NDArray[np.int64] | None  # [in], row of the producer behind each channel; None: a norm
    bias_offset: int = 0  # where the producer's rows begin in the bias
    plus_one: bool = False  # the norm multiplies by 1 + weight

    def tied(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """The mean over all channels that come from the same row, [in]."""
        if self.rows is None:
            return values
        count = np.bincount(self.rows)
        total = np.bincount(self.rows, weights=values)
        return (total[self.rows] / count[self.rows]).astype(np.float32)

    def largest(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """The largest of all channels that come from the same row, [in]."""
        if self.rows is None:
            return values
        most = np.zeros(int(self.rows.max()) + 1, np.float32)
        np.maximum.at(most, self.rows, values)
        return most[self.rows]


def norm_folds(norm: str, sites: Sequence[Site]) -> list[Fold]:
    """How a norm may take the scales of all sites that read its output."""
    readers = tuple(name for site in sites for name in site.names)
    bias = sites[0].producer_bias
    return [Fold(readers, norm, bias, None, plus_one=plus_one) for plus_one in (False, True)]


def projection_folds(block: LoadedBlock, found: BlockSites, site: Site) -> Iterator[Fold]:
    """How matrices that are read before a site may take its scales, the likeliest first."""
    own = next(number for number, call in enumerate(found.linears) if call.site == site.id)
    head_dim = _head_dim(block)
    for call in reversed(found.linears[:own]):
        if call.matrix.expert != site.expert:
            continue
        for reader in reversed(call.readers):
            for rows in row_maps(reader.rows[1] - reader.rows[0], site.in_features, head_dim):
                there = rows + reader.first
                yield Fold(site.names, reader.name, call.bias, there, reader.rows[0])


def _head_dim(block: LoadedBlock) -> int | None:
    for module in block.module.modules():
        for name in ("head_dim", "head_size"):
            found = getattr(module, name, None)
            if isinstance(found, int) and found > 0:
                return found
    return None


@dataclass(frozen=True)
class Shown:
    """What a block passes on, and what each of its matrices gives meanwhile."""

    parts: list[torch.Tensor]
    outputs: Mapping[Matrix, list[torch.Tensor]]  # of each call


def shown(block: LoadedBlock, states: torch.Tensor, call: Call) -> Shown:
    """Run the block and watch."""
    outputs: dict[Matrix, list[torch.Tensor]] = {}

    def made(matrix: Matrix, output: torch.Tensor, rows: Any) -> None:
        outputs.setdefault(matrix, []).append(output[rows].clone())

    with ObserveLinears(WeightIndex(block.module), lambda *_: None, made):
        after = block.passed(states, call)
    return Shown(call.layout.parts(after), outputs)


def proved(
    block: LoadedBlock, fold: Fold, states: torch.Tensor, call: Call, expected: Shown
) -> bool | None:
    """Whether the block still shows `expected` with random scales folded in. Undone after.

    None where the probe cannot tell, since not even unpaired scales change what it passes on.
    """
    channels = block.weights[fold.readers[0]].shape[1]
    random = np.random.default_rng(0)
    scale = fold.tied(np.exp2(random.uniform(-1, 1, channels)).astype(np.float32))
    with restored(block, (fold.producer, *([fold.bias] if fold.bias else []), *fold.readers)):
        exact = _divide_producer(block, fold, scale, None)
        unpaired = shown(block, states, call)
        _multiply_readers(block, fold, exact)
        paired = shown(block, states, call)
    scaled = [Scaled(parameter_of(block, fold.producer), fold.rows)]
    answer = undone(unpaired, paired, expected, scaled)
    if answer is not True or fold.rows is None:
        return answer
    with restored(block, (fold.producer, *([fold.bias] if fold.bias else []), *fold.readers)):
        far = far_scales(int(fold.rows.max()) + 1)[fold.rows]
        _multiply_readers(block, fold, _divide_producer(block, fold, far, None))
        return same(shown(block, states, call), expected, scaled)


def far_scales(rows: int) -> Scales:
    """Powers of two as far apart as scales that are found, and somewhat farther, [rows]."""
    exponents = np.random.default_rng(1).integers(-_FARTHEST, _FARTHEST + 1, rows)
    return np.ldexp(np.float32(1), exponents).astype(np.float32)


def parameter_of(block: LoadedBlock, name: str) -> str:
    """The block's own name of the parameter that a checkpoint tensor is a part of."""
    return block.bindings[name].parameter_name.removeprefix(block.prefix)


@dataclass(frozen=True)
class Scaled:
    """Rows of a parameter, or all of it."""

    parameter: str
    rows: NDArray[np.int64] | None

    def has(self, matrix: Matrix) -> bool:
        """Whether some of a matrix is among them."""
        if matrix.parameter != self.parameter:
            return False
        if matrix.rows is None or self.rows is None:
            return True
        first, last = matrix.rows
        return bool(((first <= self.rows) & (self.rows < last)).any())


def undone(
    unpaired: Shown, paired: Shown, expected: Shown, scaled: Sequence[Scaled]
) -> bool | None:
    """Whether paired scales undo what unpaired ones change: in all that a block passes on, and in
    what each matrix gives but the scaled ones. What is chosen by some of it, such as positions to
    attend to of more than the probe has, is not to change either.

    None where unpaired ones change nothing that is passed on.
    """
    told, right = _judged(unpaired, paired, expected, scaled)
    return right if told else None


def same(paired: Shown, expected: Shown, scaled: Sequence[Scaled]) -> bool:
    """Whether all is as it was but for what float32 sums lose, and but for the scaled matrices."""
    return _judged(expected, paired, expected, scaled)[1]


def _judged(
    unpaired: Shown, paired: Shown, expected: Shown, scaled: Sequence[Scaled]
) -> tuple[bool, bool]:
    """Whether unpaired scales change what is passed on, and whether paired ones change nothing."""
    told, right = False, True
    for without, both, wanted in zip(unpaired.parts, paired.parts, expected.parts, strict=True):
        change, good = _compared(without, both, wanted)
        told, right = told or change, right and good
    for matrix, wanted_calls in expected.outputs.items():
        if any(one.has(matrix) for one in scaled):
            continue
        calls = [one.outputs.get(matrix, []) for one in (unpaired, paired)]
        if len(calls[1]) != len(wanted_calls):
            right = False
            continue
        alike = len(calls[0]) == len(wanted_calls)
        first: Sequence[torch.Tensor | None] = calls[0] if alike else [None] * len(wanted_calls)
        for one, both, wanted in zip(first, calls[1], wanted_calls, strict=True):
            right = right and _compared(one, both, wanted)[1]
    return told, right


def _compared(
    unpaired: torch.Tensor | None, paired: torch.Tensor, expected: torch.Tensor
) -> tuple[bool, bool]:
    """Whether unpaired scales change it, and whether paired ones do not.

    Where unpaired ones send other tokens to an expert, all of what it gives has changed.
    """
    if paired.shape != expected.shape:
        return True, False
    if not expected.numel():
        return False, True
    largest = float(expected.abs().max())
    change = largest
    if unpaired is not None and unpaired.shape == expected.shape:
        change = float((unpaired - expected).abs().max())
    difference = float((paired - expected).abs().max())
    noise = _NOISE * largest
    return change > 10 * noise, difference <= _TOLERANCE * change + noise


def apply(
    block: LoadedBlock, fold: Fold, scale: Scales, dtype_of: Callable[[str], str] | None
) -> Scales:
    """Fold scale [in] in for good; the scales that the readers really got, [in].

    dtype_of: the stored dtype of a tensor that will be written as it is, to which it is rounded
    here; None rounds nothing.
    """
    exact = _divide_producer(block, fold, scale, dtype_of)
    _multiply_readers(block, fold, exact)
    return exact


def _divide_producer(
    block: LoadedBlock, fold: Fold, scale: Scales, dtype_of: Callable[[str], str] | None
) -> Scales:
    weight = block.weights[fold.producer]
    if fold.rows is None:
        exact = torch.from_numpy(scale).double()
        one = 1.0 if fold.plus_one else 0.0
        old = weight.double() + one
        new = _rounded(old / exact - one, fold.producer, dtype_of)
        ratio = old / (new + one)
        kept = (ratio > 0) & torch.isfinite(ratio) & torch.isfinite(new)
        weight.copy_(torch.where(kept, new, weight.double()))
        exact = torch.where(kept, ratio, torch.ones_like(ratio))
        if fold.bias is not None:
            bias = block.weights[fold.bias]
            bias.copy_(_rounded(bias.double() / exact, fold.bias, dtype_of))
        return np.asarray(exact.float().numpy())
    per_row = torch.ones(weight.shape[0])
    per_row[torch.from_numpy(fold.rows)] = torch.from_numpy(scale)
    weight.div_(per_row[:, None])
    if fold.bias is not None:
        part = block.weights[fold.bias][fold.bias_offset : fold.bias_offset + len(per_row)]
        part.copy_(_rounded(part.double() / per_row, fold.bias, dtype_of))
    return scale


def _rounded(value: torch.Tensor, name: str, dtype_of: Callable[[str], str] | None) -> torch.Tensor:
    return value if dtype_of is None else value.to(_DTYPES[written_dtype(dtype_of(name))]).double()


def _multiply_readers(block: LoadedBlock, fold: Fold, scale: Scales) -> None:
    for name in fold.readers:
        block.weights[name].mul_(torch.from_numpy(scale))


@contextmanager
def restored(block: LoadedBlock, names: Sequence[str]) -> Iterator[None]:
    saved: Mapping[str, torch.Tensor] = {name: block.weights[name].clone() for name in names}
    try:
        yield
    finally:
        for name, value in saved.items():
            block.weights[name].copy_(value)
