"""Matrices that a checkpoint keeps in one tensor, and a model in several modules.

Molmo 2 and Sarvam's mixtures of experts have queries, keys and values above one another in one
tensor; transformers cuts it as it reads it. Engines keep it whole, with the scales that it has as a
whole. So it is the other way round here: the modules that would have parts of it are replaced by
some that multiply by rows of a parameter which they have in common, and that is the tensor:

    self_attn.att_proj.weight [q + k + v, hidden]    a Joined, the tensor as it is
    self_attn.q_proj, k_proj, v_proj                 a RowsOf each, of those rows

Whatever reads, measures, scales or tunes that parameter needs to know of no parts.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qtool.checkpoints.conversions import Split

_KINDS = ("weight", "bias")


class Joined(nn.Module):
    """A matrix, and its bias if it has one, of which others have rows; never called."""

    weight: nn.Parameter
    bias: nn.Parameter


class RowsOf(nn.Module):
    """A linear layer by rows of a Joined."""

    joined: Joined

    def __init__(self, layer: nn.Linear, whole: Joined, rows: slice) -> None:
        """rows: of the whole's weight, and of its bias if it has one."""
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.rows = rows
        # Not as a module of this one: it is one of another. Copies of both keep to each other.
        object.__setattr__(self, "joined", whole)

    @property
    def weight(self) -> torch.Tensor:
        """[out, in]."""
        return self.joined.weight[self.rows]

    @property
    def bias(self) -> torch.Tensor | None:
        """[out]."""
        return self.joined.bias[self.rows] if "bias" in self.joined._parameters else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        return F.linear(x, self.weight, self.bias)


def join(model: nn.Module, splits: Sequence[Split], prefix: str) -> dict[str, str]:
    """Replace linear layers that have parts of a tensor; the parameter of each such tensor.

    prefix: of modules that may be replaced. Others are left as they are, and so are layers of which
    a weight or a bias alone is a part.
    """
    found: dict[str, str] = {}
    by_layers: dict[tuple[str, ...], dict[str, str]] = {}  # its weight, and its bias
    for split in splits:
        layers, kinds = zip(*(name.rsplit(".", 1) for name in split.parameters), strict=True)
        if len({*kinds}) == 1 and kinds[0] in _KINDS:
            by_layers.setdefault(layers, {})[kinds[0]] = split.checkpoint_name
    for layers, tensors in by_layers.items():
        parent = layers[0].rpartition(".")[0]
        own = [model.get_submodule(layer) for layer in layers]
        beside = all(layer.rpartition(".")[0] == parent for layer in layers)
        plain = all(type(one) is nn.Linear and _kinds(one) == {*tensors} for one in own)
        if not (beside and plain and f"{parent}.".startswith(prefix)):
            continue
        owner = model.get_submodule(parent)
        name = next(iter(tensors.values())).rsplit(".", 2)[-2]
        while hasattr(owner, name):
            name = f"{name}_"
        owner.add_module(name, _joined(owner, layers, own, [*tensors]))
        found |= {tensor: f"{parent}.{name}.{kind}" for kind, tensor in tensors.items()}
    return found


def _joined(
    owner: nn.Module, layers: Sequence[str], own: Sequence[Any], kinds: Sequence[str]
) -> Joined:
    """The whole of some layers, which from now on have rows of it."""
    whole = Joined()
    ends = [*accumulate((len(layer.weight) for layer in own), initial=0)]
    for kind in kinds:
        part = own[0]._parameters[kind]
        meta = part.new_empty(ends[-1], *part.shape[1:])
        whole.register_parameter(kind, nn.Parameter(meta, requires_grad=False))
    for path, layer, (first, last) in zip(layers, own, pairwise(ends), strict=True):
        setattr(owner, path.rpartition(".")[2], RowsOf(layer, whole, slice(first, last)))
    return whole


def _kinds(layer: nn.Linear) -> set[str]:
    return {kind for kind, own in layer._parameters.items() if own is not None}
