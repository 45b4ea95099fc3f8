"""torch.autograd.grad where a GPU is emulated: torch's own nodes, called one after another.

The engine that calls them otherwise waits for devices, and there is none. As it does, what comes
back is summed to the shape that broadcasting has made larger, and hooks of tensors see it first.
Nodes run on the stream that is current for the caller: the engine has each run on that of its way
forwards, and what comes before and after wait for it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

Edge = tuple[Any, int]  # a node, and which of its inputs
Hooks = dict[Edge, list[Callable[[torch.Tensor], Any]]]


def grad(
    outputs: torch.Tensor | Sequence[torch.Tensor],
    inputs: torch.Tensor | Sequence[torch.Tensor],
    grad_outputs: torch.Tensor | Sequence[torch.Tensor],
    hooks: Hooks,
    retain_graph: bool | None = None,
    allow_unused: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients by inputs. hooks: of tensors on the way, used up."""
    every = (outputs, inputs, grad_outputs)
    firsts, lasts, given = ([one] if isinstance(one, torch.Tensor) else [*one] for one in every)
    wanted, roots = [edge_of(one) for one in lasts], [edge_of(one) for one in firsts]
    # What is on its way into each input of each node.
    coming: dict[Any, dict[int, torch.Tensor]] = defaultdict(dict)
    left = _waiting([node for node, _ in roots])
    found: dict[Edge, torch.Tensor] = {}
    with torch.no_grad():
        for edge, one in zip(roots, given, strict=True):
            _add(coming, edge, one)
        ready = [node for node in {node: None for node, _ in roots} if not left[node]]
        while ready:
            node = ready.pop()
            own = coming.pop(node, {})
            for number in own:
                for hook in hooks.pop((node, number), []):
                    changed = hook(own[number])
                    own[number] = own[number] if changed is None else changed
            found |= {edge: own[edge[1]] for edge in wanted if edge[0] is node and edge[1] in own}
            made = _called(node, own) if own else [None] * len(node.next_functions)
            for (after, number), one in zip(node.next_functions, made, strict=True):
                if after is None:
                    continue
                if one is not None:
                    _add(coming, (after, number), one)
                left[after] -= 1
                ready += [after] if not left[after] else []
    assert not hooks, "hooks of tensors that nothing came back to"
    back = [found.get(edge) for edge in wanted]
    if materialize_grads:
        pairs = zip(lasts, back, strict=True)
        return tuple(torch.zeros_like(last) if one is None else one for last, one in pairs)
    if not allow_unused and any(one is None for one in back):
        raise RuntimeError("One of the differentiated Tensors appears to not have been used")
    return tuple(back)


def edge_of(tensor: torch.Tensor) -> Edge:
    """Where a tensor's gradient comes in."""
    found = get_gradient_edge(tensor)
    return found.node, found.output_nr


def _waiting(roots: Sequence[Any]) -> Counter[Any]:
    """By node, of how many edges it waits for what comes in."""
    left: Counter[Any] = Counter()
    seen, ahead = {*roots}, [*roots]
    while ahead:
        for after, _ in ahead.pop().next_functions:
            if after is None:
                continue
            left[after] += 1
            if after not in seen:
                seen.add(after)
                ahead.append(after)
    return left


def _called(node: Any, own: dict[int, torch.Tensor]) -> Sequence[torch.Tensor | None]:
    if not node.next_functions:  # a leaf
        return []
    made = node(*(own.get(number) for number in range(len(node._input_metadata))))
    return made if isinstance(made, tuple) else [made]


def _add(coming: dict[Any, dict[int, torch.Tensor]], edge: Edge, one: torch.Tensor) -> None:
    node, number = edge
    shape, dtype = node._input_metadata[number].shape, node._input_metadata[number].dtype
    if one.shape != shape:
        one = one.sum_to_size(shape)
    one = one.to(dtype)
    before = coming[node].get(number)
    coming[node][number] = one if before is None else before + one
