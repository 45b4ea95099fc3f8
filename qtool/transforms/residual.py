"""Who reads and who writes a decoder's residual stream, told from one run of each block.

A block's matrices that read a norm's output read the stream; those that read something else and
have as many rows as the stream is wide write it. That is a guess by structure, which
`qtool.transforms.rotate` proves, by running the blocks with what it makes of the guess.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from qtool.calibrating.sites import BlockSites
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import LoadedBlock
from qtool.transforms import fold
from qtool.transforms.rotated import Change, Heads, Norm
from qtool.transforms.rotation import Rotation

HANDS_ON = "its blocks hand on more than one stream of hidden states"


class NotRotatableError(Exception):
    """The stream cannot be rotated; its text says why."""


@dataclass(frozen=True)
class NormRole:
    """A norm of the stream."""

    norm: Norm
    bias: str | None
    centers: bool  # takes the mean out


@dataclass(frozen=True)
class Values:
    """The rows that make each head's values, and the matrix that reads them."""

    producer: str
    bias: str | None
    bias_offset: int
    size: int  # of a head
    starts: tuple[int, ...]  # first row of each head of keys and values
    reader: str

    def changes(self, rotation: Rotation) -> dict[str, Change]:
        """Both halves of a rotation of all heads alike."""
        found = {
            self.producer: Change(row_heads=Heads(rotation, self.starts)),
            self.reader: Change(column_heads=rotation),
        }
        if self.bias is not None:
            starts = tuple(self.bias_offset + start for start in self.starts)
            found[self.bias] = Change(row_heads=Heads(rotation, starts))
        return found


@dataclass(frozen=True)
class BlockRoles:
    """What the tensors of one block do with the stream."""

    readers: Mapping[str, Norm]
    norms: tuple[NormRole, ...]
    writers: tuple[str, ...]  # matrices and biases
    values: Values | None = None

    def changes(self, rotation: Rotation) -> dict[str, Change]:
        """The block's part of a rotation of the stream."""
        found = {name: Change(gain=norm, columns=rotation) for name, norm in self.readers.items()}
        found |= {name: Change(rows=rotation) for name in self.writers}
        return found | norm_changes(self.norms, rotation)


@dataclass(frozen=True)
class OuterRoles:
    """What is before and after the blocks."""

    embeddings: tuple[str, ...]
    norm: NormRole
    module: nn.Module = field(repr=False)  # of that norm
    head: str

    def changes(self, rotation: Rotation) -> dict[str, Change]:
        """Its part of a rotation of the stream."""
        found = {name: Change(columns=rotation) for name in self.embeddings}
        found[self.head] = Change(gain=self.norm.norm, columns=rotation)
        return found | norm_changes((self.norm,), rotation)


def norm_changes(norms: tuple[NormRole, ...], rotation: Rotation) -> dict[str, Change]:
    """Gains that went elsewhere, and biases as the readers then want them."""
    found: dict[str, Change] = {}
    for role in norms:
        found[role.norm.weight] = Change(fill=0.0 if role.norm.plus_one else 1.0)
        if role.bias is not None:
            found[role.bias] = Change(divide=role.norm, rows=rotation)
    return found


def outer_roles(
    skeleton: Skeleton, width: int, head: str | None, shape: tuple[int, ...]
) -> OuterRoles:
    """Embeddings, last norm and head, of this name and shape.

    NotRotatableError where they are not the usual ones.
    """
    if head is None:
        raise NotRotatableError("the checkpoint has no output head that could take the last gain")
    tables = {name for table in skeleton._tables().values() for name in table}
    beside = tables | {head}
    for name, piece in skeleton.names.of_tensor.items():
        inside = piece.parameter_name.startswith(skeleton.prefix)
        if not inside and len(piece.shape) > 1 and name not in beside:
            raise NotRotatableError(
                f"{name}, outside of the blocks, reads the residual stream or writes into it"
            )
    odd = [name for name in sorted(tables) if skeleton.checkpoint.tensors[name].shape[1] != width]
    if odd:
        raise NotRotatableError(f"{odd[0]} is not as wide as the residual stream")
    norms = [
        (path, module)
        for path, module in skeleton.model.named_modules()
        if not f"{path}.".startswith(skeleton.prefix)
        and (weight := module._parameters.get("weight")) is not None
        and tuple(weight.shape) == (width,)
    ]
    if len(norms) != 1:
        names = ", ".join(path for path, _ in norms) or "none"
        raise NotRotatableError(
            f"outside of the blocks one norm is expected, before the head; found: {names}"
        )
    path, module = norms[0]
    pieces = skeleton.names.of_parameter
    bias = pieces.get(f"{path}.bias")
    weight = pieces[f"{path}.weight"][0].checkpoint_name
    role = _norm_role(weight, bias[0].checkpoint_name if bias else None, module, width)
    if shape[1:] != (width,):
        raise NotRotatableError(f"{head} does not read the residual stream as it is")
    return OuterRoles(tuple(sorted(tables)), role, module, head)


def block_roles(block: LoadedBlock, found: BlockSites, width: int) -> BlockRoles:
    """What reads and writes the stream in a block. NotRotatableError where a norm is odd."""
    readers: dict[str, Norm] = {}
    norms: dict[str, NormRole] = {}
    for weight, sites in found.fold_groups().items():
        if sites[0].in_features != width or tuple(block.weights[weight].shape) != (width,):
            continue
        path = block.bindings[weight].parameter_name.removeprefix(block.prefix)
        module = block.module.get_submodule(path.removesuffix(".weight"))
        role = _norm_role(weight, sites[0].producer_bias, module, width)
        gain = block.weights[weight] + (1.0 if role.norm.plus_one else 0.0)
        if not bool((gain != 0).all()) and role.bias is not None:
            raise NotRotatableError(
                f"{weight} has gains of zero, by which its bias cannot be divided"
            )
        norms[weight] = role
        readers |= {name: role.norm for site in sites for name in site.names}
    if not norms:
        raise NotRotatableError(f"no norm of {block.prefix[:-1]} was seen to feed a matrix")
    inner = {site.id for site in found.sites if site.producer is None}
    writers: list[str] = []
    for call in found.linears:
        if call.site in inner and call.out_features == width:
            writers += [reader.name for reader in call.readers]
            if call.bias is not None:
                writers.append(call.bias)
    for name in found.unread:
        if width in block.weights[name].shape:
            raise NotRotatableError(
                f"{name} was not seen to be read, so that it is unknown what it does"
            )
    return BlockRoles(readers, tuple(norms.values()), tuple(dict.fromkeys(writers)))


def value_candidates(block: LoadedBlock, found: BlockSites) -> Iterator[Values]:
    """Pairs that may make and read the values of attention, the likeliest first."""
    size = fold._head_dim(block)
    if size is None:
        return
    for site in found.sites:
        if site.producer is not None or site.expert is not None or site.in_features % size:
            continue
        if len(site.readers) != 1:
            continue
        for candidate in fold.projection_folds(block, found, site):
            assert candidate.rows is not None
            heads = candidate.rows.reshape(-1, size)
            if (heads != heads[:, :1] + np.arange(size)).any():
                continue
            starts = tuple(sorted({int(start) for start in heads[:, 0]}))
            yield Values(
                candidate.producer,
                candidate.bias,
                candidate.bias_offset,
                size,
                starts,
                site.readers[0].name,
            )


def _norm_role(weight: str, bias: str | None, module: nn.Module, width: int) -> NormRole:
    """How a norm's module uses its weight, seen by calling it."""
    module = copy.deepcopy(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(torch.zeros(width), requires_grad=False)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((4, width))).float()
    with torch.no_grad():
        plus_one = bool(module(x).abs().max() > 0)
        module._parameters["weight"] = nn.Parameter(torch.ones(width), requires_grad=False)
        plain, shifted = module(x), module(x + 3.0)
    centers = bool((plain - shifted).abs().max() < 1e-3 * plain.abs().max())
    return NormRole(Norm(weight, plus_one), bias, centers)
