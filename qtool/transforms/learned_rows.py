"""What rotations are learned from: a bank of rows of weights, and a few inputs, in 16 bits.

One pass over the stream tells how much each matrix counts; at most _BANK_BYTES of rows are kept.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.calibrating.sites import Tracer
from qtool.recipe.weights import Activations
from qtool.scheme import Scheme
from qtool.streaming.linears import Matrix, ObserveLinears, WeightIndex
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import LoadedBlock, Stream
from qtool.transforms import rotation as rotations
from qtool.transforms.hadamard import Reals
from qtool.transforms.learned_inputs import Inputs, spaced
from qtool.transforms.residual import BlockRoles
from qtool.transforms.rotated import Rotated
from qtool.transforms.rotation import Rotation
from qtool.transforms.rotations import Rotations

_BANK_BYTES = 512 << 20


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
    """What R2 of a block rotates: values [heads * size, n], with R1 in them; the reader [out,
    in]."""

    values: torch.Tensor
    reader: torch.Tensor
    weights: tuple[float, float]
    schemes: tuple[Scheme, Scheme]
    inputs: Inputs | None  # of the reader, where they are rounded


@dataclass(frozen=True)
class Seen:
    """What a pass through a block tells of its matrices, by name."""

    energies: dict[str, float]  # of the outputs
    shares: dict[str, float]  # of the branch in the stream
    inputs: dict[str, torch.Tensor]  # a few tokens each, [tokens, in]


def gather(
    view: Rotated,
    found: Rotations,
    schemes: Mapping[str, Scheme],
    tokens: NDArray[np.int64],
    rounded: Activations | None,
) -> tuple[list[list[Rows | Inputs]], dict[int, tuple[dict[str, float], Inputs | None]]]:
    """What R1 rotates, by block; how much each matrix that R2 rotates counts, and what it reads."""
    skeleton = Skeleton.open(view.original)
    stream = skeleton.embed(tokens)
    tracer = Tracer()
    bank: list[list[Rows | Inputs]] = []
    heads: dict[int, tuple[dict[str, float], Inputs | None]] = {}
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
        seen = _weights(block, stream, tracer)
        counts = {
            name: seen.shares[name] / energy
            for name, energy in seen.energies.items()
            if name in schemes and energy > 0
        }
        if found.r1 is not None:
            bank.append([*_block_rows(view, found, block, roles, schemes, counts, every)])
            if rounded is not None:
                bank[-1] += _read(view, block, roles, counts, seen, rounded)
        if roles.values is not None:
            reader, read = roles.values.reader, None
            if rounded is not None and reader in counts:
                passed = counts[reader] * float(block.weights[reader].square().sum())
                read = Inputs(seen.inputs[reader], passed, rounded)
            heads[index] = counts, read
        for number, hidden in enumerate(stream.hidden):
            stream.hidden[number] = block.passed(hidden, stream.calls[index][number])
    return bank, heads


def _read(
    view: Rotated,
    block: LoadedBlock,
    roles: BlockRoles,
    counts: Mapping[str, float],
    seen: Seen,
    rounded: Activations,
) -> Iterator[Inputs]:
    """What each norm hands to matrices, without its gain."""
    first: dict[str, str] = {}
    passed: dict[str, float] = {}
    for name, norm in roles.readers.items():
        if name in counts:
            gained = block.weights[name].double() * torch.from_numpy(view.gain(norm))
            first.setdefault(norm.weight, name)
            more = counts[name] * float(gained.square().sum())
            passed[norm.weight] = passed.get(norm.weight, 0.0) + more
    for weight, name in first.items():
        gain = torch.from_numpy(view.gain(roles.readers[name]))
        plain = seen.inputs[name] / torch.where(gain == 0, torch.inf, gain)
        yield Inputs(spaced(plain), passed[weight], rounded)


def _weights(block: LoadedBlock, stream: Stream, tracer: Tracer) -> Seen:
    """One pass over the stream."""
    found = tracer.sites(block, stream)
    order = [call.matrix for call in found.linears]
    energy: dict[Matrix, float] = {}
    kept: dict[Matrix, torch.Tensor] = {}
    index = WeightIndex(block.module)

    def observe(matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        weight = matrix.of(block.module.get_parameter(matrix.parameter))
        out = torch.nn.functional.linear(x, weight)
        if matrix not in kept and x.numel():
            kept[matrix] = spaced(x.reshape(-1, x.shape[-1]))
        energy[matrix] = energy.get(matrix, 0.0) + float(out.square().sum(dtype=torch.float64))

    size = 0.0
    for number, hidden in enumerate(stream.hidden):
        with ObserveLinears(index, observe):
            output = block.run(hidden, stream.calls[block.index][number])
        size += float(output.square().sum(dtype=torch.float64))
    width = stream.hidden[0].shape[-1]
    inner = {site.id for site in found.sites if site.producer is None}
    writes = {c.matrix for c in found.linears if c.site in inner and c.out_features == width}
    said = Seen({}, {}, {})
    for number, call in enumerate(found.linears):
        if call.matrix not in energy:
            continue
        branch = next((m for m in order[number:] if m in writes and m in energy), None)
        for reader in call.readers:
            before = 0.0 if call.matrix.rows is None else said.energies.get(reader.name, 0.0)
            said.energies[reader.name] = before + energy[call.matrix]
            share = energy[branch] / size if branch is not None and size else 0.0
            said.shares[reader.name] = share
            if call.matrix in kept:
                said.inputs[reader.name] = kept[call.matrix]
    return said


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
                matrix[start : start + values.size] = torch.from_numpy(r2.apply(part.copy()))
        yield Rows(_half(matrix[::every]), counts[name] * every, True, schemes[name])
    for name in roles.writers:
        if name not in counts:
            continue
        matrix = block.weights[name].double()
        if values is not None and r2 is not None and name == values.reader:
            matrix = torch.from_numpy(_rotate_runs(matrix.numpy(), r2))
        if name in found.online.inputs:
            online = rotations.sylvester(found.online.inputs[name])
            matrix = torch.from_numpy(_rotate_runs(matrix.numpy(), online))
        size = max(1, schemes[name].group_size)
        groups = torch.arange(matrix.shape[1]) // size % every == 0
        kept = matrix[:, groups] if every > 1 else matrix
        yield Rows(_half(kept), counts[name] * every, False, schemes[name])


def _half(matrix: torch.Tensor) -> torch.Tensor:
    """In 16 bits: exact enough for a cost, and half the memory."""
    return matrix.float().contiguous().half()


def _rotate_runs(matrix: Reals, rotation: Rotation) -> Reals:
    runs = np.ascontiguousarray(matrix).reshape(-1, rotation.size)
    return np.ascontiguousarray(rotation.apply(np.ascontiguousarray(runs.T)).T).reshape(
        matrix.shape
    )


def head_rows(
    view: Rotated,
    found: Rotations,
    index: int,
    schemes: Mapping[str, Scheme],
    counts: Mapping[str, float],
    inputs: Inputs | None,
) -> HeadRows | None:
    """What R2 of a block rotates, without its R2."""
    values = found.blocks[index].values
    if values is None or values.producer not in counts or values.reader not in counts:
        return None
    r2 = found.r2[index]
    backwards = Rotation(r2.size, "random", matrix=np.ascontiguousarray(r2.dense().T))
    made = view.float32(values.producer).astype(np.float64)
    rows = [backwards.apply(made[start : start + values.size].copy()) for start in values.starts]
    read = _rotate_runs(view.float32(values.reader).astype(np.float64), backwards)
    return HeadRows(
        torch.from_numpy(np.concatenate(rows)).float(),
        torch.from_numpy(read).float(),
        (counts[values.producer], counts[values.reader]),
        (schemes[values.producer], schemes[values.reader]),
        inputs,
    )
