"""Matrices known by where they lie, and by rows of one."""

import torch

from qtool.streaming.by_address import ByAddress
from qtool.streaming.joined_rows import Joined
from qtool.streaming.linears import Matrix, WeightIndex


def test_rows_are_known_as_the_whole_is() -> None:
    first, second = torch.zeros(12, 8), torch.zeros(6, 8)
    found = ByAddress.of([(first, "first"), (second, "second")])
    for weight in (first, first[:4], first[4:8], first[8:]):
        assert found.find(weight) == "first"
    assert found.find(second[2:]) == "second"


def test_other_parts_are_not() -> None:
    whole = torch.zeros(12, 8)
    found = ByAddress.of([(whole, True)])
    assert found.find(whole[:, 4:]) is None
    assert found.find(whole[4:8].t()) is None
    assert found.find(whole[1::2]) is None
    assert found.find(whole.view(6, 16)[1:]) is None
    assert found.find(torch.zeros(12, 8)) is None
    assert not ByAddress.of([]) and found


def test_what_begins_where_one_does_is_that_one() -> None:
    """A product with gate and up at once, of which each is known; or with a transposed one."""
    both = torch.zeros(8, 4)
    found = ByAddress.of([(both[:4], "gate"), (both[4:], "up")])
    assert found.find(both) == found.find(both.t()) == "gate"


def test_rows_of_a_joined_parameter_are_matrices_of_their_own() -> None:
    module = Joined()
    module.register_parameter("weight", torch.nn.Parameter(torch.zeros(12, 8)))
    module.register_parameter("bias", torch.nn.Parameter(torch.zeros(12)))
    outer = torch.nn.Module()
    outer.add_module("qkv", module)
    index, weight = WeightIndex(outer), module.weight
    assert index.matrix(weight[4:8]) == Matrix("qkv.weight", None, rows=(4, 8))
    assert index.matrix(weight[4:8]).of(weight).data_ptr() == weight[4:].data_ptr()  # type: ignore[union-attr]
    assert index.matrix(weight[4:8].t()) is None
    assert index.matrix(weight[4:8, :4]) is None
    assert index.matrix(weight.view(6, 16)[2:]) is None
    assert index.bias(module.bias[4:8]) == "qkv.bias"
