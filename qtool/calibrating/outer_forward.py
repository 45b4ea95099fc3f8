"""The model's own forward around its blocks, observed with each block's forward replaced."""

import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from qtool.calibrating.stream import Call
from qtool.errors import UnsupportedError


class _LastBlockReachedError(Exception):
    """Ends the outer forward of embed(): what comes after the blocks is of no use there."""


class _OtherLoopError(Exception):
    """A block got something else than the block before it returned."""


class _Unused:
    """What stands in a block's result for values that the loop has no use for."""


# What loops take a block's output from: it as it is, the first of a tuple, the first of a pair.
RESULTS = (0, 1, 2)
_UNUSED = _Unused()


def recorded(
    model: Any,
    prefix: str,
    blocks: nn.ModuleList,
    tokens: NDArray[np.int64],
    shared: list[torch.Tensor],
) -> tuple[torch.Tensor, list[Call], int]:
    """Run the outer forward on one micro-batch; the first hidden states and all blocks' arguments.

    Last, of how many values the model's loop takes a block's result apart, 0 where it does not.
    prefix: the blocks' own. shared: tensors of arguments so far, which equal ones are replaced by.
    """
    seen: list[tuple[torch.Tensor, Call]] = []

    def record(index: int, hidden: torch.Tensor, call: Call) -> torch.Tensor:
        if index != len(seen) or (seen and hidden is not seen[-1][0]):
            shared = [
                name for name, value in call.kwargs.items() if isinstance(value, MutableMapping)
            ]
            raise _OtherLoopError(f"its blocks share {', '.join(shared)}" if shared else "")
        if any(isinstance(value, _Unused) for value in (*call.args, *call.kwargs.values())):
            raise _OtherLoopError("it hands over further values, which are not streamed")
        seen.append((hidden, call))
        if index == len(blocks) - 1:
            raise _LastBlockReachedError
        return hidden

    # Most loops take a block's output as it is, some its first element: whichever makes the
    # next block see what the one before it returned.
    said = ""
    for results in RESULTS:
        seen.clear()
        try:
            with replaced(blocks, record, results), torch.no_grad():
                model(input_ids=torch.from_numpy(tokens), use_cache=False)
        except _LastBlockReachedError:
            first = seen[0][0]
            if first.ndim != 3 or first.shape[:2] != tokens.shape:
                raise UnsupportedError(
                    f"{type(model).__name__} gives its blocks hidden states of shape "
                    f"{list(first.shape)} for tokens of shape {list(tokens.shape)}, not "
                    "[samples, length, width]; calibrated methods cannot stream it, RTN can "
                    "quantize it (it needs no forward pass)"
                ) from None
            calls = [
                Call(_share(call.args, shared), _share(dict(call.kwargs), shared))
                for _, call in seen
            ]
            return first.to(torch.float32), calls, results
        except _OtherLoopError as error:
            said = f" ({error})" if str(error) else said
            continue
        # What a loop does that got another kind of return value than it takes apart.
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            said = f" ({(str(error).splitlines() or [''])[0]})"
            continue
        break
    raise UnsupportedError(
        f"{type(model).__name__} does not hand its hidden states from block to block "
        f"of {prefix!r} unchanged{said}; calibrated methods cannot stream it, RTN can "
        "quantize it (it needs no forward pass)"
    )


@contextmanager
def replaced(
    blocks: nn.ModuleList,
    function: Callable[[int, torch.Tensor, Call], torch.Tensor],
    results: int,
) -> Iterator[None]:
    """Within, block i computes function(i, hidden, its other arguments). results: of RESULTS."""

    def forward_of(index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs.pop("hidden_states")
            output = function(index, hidden, Call(args[1:], kwargs))
            return (output, *[_UNUSED] * (results - 1)) if results else output

        return forward

    for index, block in enumerate(blocks):
        block.forward = forward_of(index)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@contextmanager
def past_blocks(
    model: Any,
    blocks: nn.ModuleList,
    results: int,
    rows: Callable[[NDArray[np.int64]], AbstractContextManager[Any]],
) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Within, a function of the last block's output: the logits that the model makes of it.

    rows: within which rows of other tables are there, at such positions. Several threads may call
    the function, where the model has its weights.
    """
    embedding = model.get_input_embeddings()
    given = threading.local()

    def pass_on(index: int, ignored: torch.Tensor, call: Call) -> torch.Tensor:
        hidden: torch.Tensor = given.hidden
        return hidden if index == len(blocks) - 1 else ignored

    def nothing(ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        width = getattr(embedding, "embedding_dim", given.hidden.shape[-1])
        return torch.zeros(*ids.shape, width)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        given.hidden = hidden
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64)
        with rows(np.arange(hidden.shape[1])), torch.set_grad_enabled(hidden.requires_grad):
            logits = model(input_ids=ids, use_cache=False).logits
        assert isinstance(logits, torch.Tensor)
        return logits

    # What enters the blocks is ignored, so nothing has to be looked up in the table.
    embedding.forward = nothing
    try:
        with replaced(blocks, pass_on, results):
            yield head
    finally:
        del embedding.forward


def _share(value: Any, shared: list[torch.Tensor]) -> Any:
    """`value` with each tensor in it replaced by an equal one seen before, if there is one."""
    if isinstance(value, torch.Tensor):
        for other in shared:
            if other.dtype == value.dtype and torch.equal(other, value):
                return other
        shared.append(value)
        return value
    if isinstance(value, tuple | list):
        return type(value)(_share(item, shared) for item in value)
    if isinstance(value, dict):
        return {key: _share(item, shared) for key, item in value.items()}
    return value
