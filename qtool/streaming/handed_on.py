"""What blocks hand to later ones beside hidden states, as the model's loop and their code show.

What a block returns besides is seen where the next one is called with it; how many numbers of a
position that are, config.json says. A mapping that all blocks are given is seen by its being empty
at first; what they keep in it, by running them on tensors without memory (torch's meta device).
"""

import copy
import inspect
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from qtool.errors import RTN_CAN, UnsupportedError
from qtool.streaming.layout import Beside, Common, Entry, Layout, Positions, Returned, mapped
from qtool.streaming.stream import Call


def mark_common(calls: Sequence[Call]) -> tuple[list[Call], type | None]:
    """The calls with Common where all have one empty mapping; and its kind, None without one."""
    named = set.intersection(*({*_common(call)} for call in calls)) if len(calls) > 1 else set()
    if not named:
        return list(calls), None
    if len(named) > 1:
        raise UnsupportedError(
            f"blocks have several mappings in common: {', '.join(sorted(n for n, _ in named))}; "
            f"{RTN_CAN}"
        )
    ((name, _),) = named
    kind = type(calls[0].kwargs[name])
    marked = [Call(call.args, {**call.kwargs, name: Common(kind)}, call.layout) for call in calls]
    return marked, kind


def _common(call: Call) -> list[tuple[str, int]]:
    """Empty mappings among a call's arguments, and which object each is."""
    return [
        (name, id(value))
        for name, value in call.kwargs.items()
        if isinstance(value, MutableMapping) and not len(value)
    ]


def layout_of(
    model: Any,
    blocks: nn.ModuleList,
    calls: Sequence[Call],
    hidden: torch.Tensor,
    common: type | None,
    samples: int,
    length: int,
) -> Layout:
    """Of the states that these calls, as marked, pass on; hidden: what the first one is given.

    samples: of the calls. length: of the longest text, which positions are chosen from.
    UnsupportedError where it cannot be told.
    """
    first = hidden.shape[:2] == (samples, length) or hidden.ndim == 3
    shape = hidden.shape[2:] if first else (hidden.shape[0], hidden.shape[-1])
    values: list[Beside | Entry] = []
    names = {
        argument.number: name
        for block, call in zip(blocks, calls, strict=True)
        for name, argument in _named(block, call)
        if isinstance(argument, Returned)
    }
    for number, name in sorted(names.items()):
        values.append(_beside(model, number, name, length))
    if common is not None:
        values += _entries(blocks, calls, hidden, common)
    return Layout(tuple(shape), not first, tuple(values), common)


def _named(block: nn.Module, call: Call) -> list[tuple[str, Any]]:
    """Arguments with their names, those that the call gives by place among them."""
    names = list(inspect.signature(type(block).forward).parameters)[2:]
    return [*zip(names, call.args, strict=False), *call.kwargs.items()]


def _beside(model: Any, number: int, name: str, length: int) -> Beside:
    """How a value of this name lies in the states."""
    config = model.config.get_text_config()
    if name == "prev_topk_indices" and isinstance(config.index_topk, int):
        # GLM-5.3 chooses pools of them, and the tail behind the last one.
        tail = getattr(config, "index_kpool", 1) - 1
        return Positions(number, min(config.index_topk + tail, length))
    if name == "prev_router_hidden_states" and isinstance(config.router_hidden_size, int):
        return Beside(number, config.router_hidden_size)
    raise UnsupportedError(
        f"{type(model).__name__} hands {name!r} from block to block, which this version does not "
        "know how to keep; calibrated methods cannot stream it, RTN can quantize it (it needs no "
        "forward pass)"
    )


def _entries(
    blocks: nn.ModuleList, calls: Sequence[Call], hidden: torch.Tensor, common: type
) -> list[Entry]:
    """What blocks keep in the mapping that they have in common."""
    kept = common()
    for block, call in zip(blocks, calls, strict=True):
        module = copy.deepcopy(block, {id(c): c for c in _configurations(block)})
        module._apply(_without_numbers)  # type: ignore[no-untyped-call]

        def there(value: Any) -> Any:
            if isinstance(value, Common):
                return kept
            # What stands for a result of the block before says nothing of what is kept.
            return None if isinstance(value, Returned) else mapped(value, _without_numbers)

        # Experts cannot be run without numbers to choose them by; they come after attention. What
        # is not found here is refused when it is kept.
        with suppress(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError,
                      ValueError), torch.no_grad():  # fmt: skip
            module(
                _without_numbers(hidden),
                *(there(value) for value in call.args),
                **{name: there(value) for name, value in call.kwargs.items()},
            )
    found = []
    for key, tensors in kept.items():
        for number, tensor in enumerate(tensors if isinstance(tensors, tuple) else (tensors,)):
            if not isinstance(tensors, tuple) or getattr(tensor, "ndim", 0) != 4:
                raise UnsupportedError(
                    f"{type(blocks[0]).__name__} keeps something for later blocks under {key!r} "
                    f"that is no tuple of keys and values; {RTN_CAN}"
                )
            found.append(Entry(key, number, tensor.shape[1], tensor.shape[3]))
    return found


def _configurations(block: nn.Module) -> list[Any]:
    return [module.config for module in block.modules() if hasattr(module, "config")]


def _without_numbers(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value
