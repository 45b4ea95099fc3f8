"""The model's own forward around its blocks, observed with each block's forward replaced."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from qtool.errors import RTN_CAN, UnsupportedError
from qtool.streaming.arguments import Arguments
from qtool.streaming.layout import Layout, Returned
from qtool.streaming.stream import Call


class _EndedError(Exception):
    """Ends the outer forward of embed(): what comes after the blocks is of no use there."""


class _OtherLoopError(Exception):
    """A block got something else than the block before it returned."""


class _RepeatedError(Exception):
    """A block was run before."""


# What loops take a block's output from: it as it is, the first of a tuple, the first of a pair.
RESULTS = (0, 1, 2)


def recorded(
    model: Any,
    prefix: str,
    blocks: nn.ModuleList,
    tokens: NDArray[np.int64],
    kept: Arguments | None,
    *,
    to_head: bool = False,
) -> tuple[torch.Tensor, list[Call], int]:
    """Run the outer forward on one micro-batch; the first hidden states and all blocks' arguments.

    Last, of how many values the model's loop takes a block's result apart, 0 where it does not;
    where it hands one of them to the next block, the arguments have Returned. The calls' layout is
    that of hidden states alone. prefix: the blocks' own. kept: arguments so far; without, they stay
    as they are, and torch can backpropagate through them. to_head: go on from the last block to the
    head, to see that no block comes again, as in models that run some of them several times; an
    error on the way there says nothing.
    """
    seen: list[tuple[torch.Tensor, Call]] = []

    def record(index: int, hidden: torch.Tensor, call: Call) -> torch.Tensor:
        if index < len(seen):
            raise _RepeatedError
        if index > len(seen) or (seen and not _same(hidden, seen[-1][0])):
            raise _OtherLoopError
        seen.append((hidden, call))
        if index == len(blocks) - 1 and not to_head:
            raise _EndedError
        return hidden

    def end(*_: object) -> None:
        if len(seen) == len(blocks):
            raise _EndedError

    # Most loops take a block's output as it is, some its first element: whichever makes the
    # next block see what the one before it returned.
    said = ""
    heads = heads_of(model) if to_head else []
    for results in RESULTS:
        seen.clear()
        try:
            with (
                replaced(blocks, record, results),
                _before(heads, end),
                torch.set_grad_enabled(kept is None),
            ):
                model(input_ids=torch.from_numpy(tokens), use_cache=False)
        except _EndedError:
            pass
        except _RepeatedError:
            raise UnsupportedError(
                f"{type(model).__name__} runs blocks of {prefix!r} several times; {RTN_CAN}"
            ) from None
        except _OtherLoopError:
            continue
        # What a loop does that got another kind of return value than it takes apart.
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            if len(seen) < len(blocks):
                said = f" ({(str(error).splitlines() or [''])[0]})"
                continue
        if len(seen) < len(blocks):
            break
        first = seen[0][0]
        # Several streams come before the samples or behind the length.
        places = [0] if first.ndim == 3 else [0, 1] if first.ndim == 4 else []
        if not any(first.shape[at : at + 2] == tokens.shape for at in places):
            raise UnsupportedError(
                f"{type(model).__name__} gives its blocks hidden states of shape "
                f"{list(first.shape)} for tokens of shape {list(tokens.shape)}, not "
                f"[samples, length, width]; {RTN_CAN}"
            )
        calls = [call if kept is None else kept.kept(call) for _, call in seen]
        return first, calls, results
    raise UnsupportedError(
        f"{type(model).__name__} does not hand its hidden states from block to block "
        f"of {prefix!r} unchanged{said}; {RTN_CAN}"
    )


def heads_of(model: nn.Module) -> list[nn.Module]:
    """What makes logits, of the model and of models within it."""
    said = [getattr(module, "get_output_embeddings", None) for module in model.modules()]
    found = [head() for head in said if head is not None]
    return [*{id(head): head for head in found if head is not None}.values()]


@contextmanager
def _before(modules: Sequence[nn.Module], call: Callable[..., None]) -> Iterator[None]:
    """Within, this is called before one of them is, and before its weights are read."""
    hooks = [module.register_forward_pre_hook(call, prepend=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _same(one: object, other: torch.Tensor) -> bool:
    """Whether they are one tensor, or views of all of one."""
    return one is other or (
        isinstance(one, torch.Tensor)
        and one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
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
            output = function(index, hidden, Call(args[1:], kwargs, Layout(hidden.shape[-1:])))
            return (output, *map(Returned, range(1, results))) if results else output

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
    layout: Layout,
    rows: Callable[[NDArray[np.int64]], AbstractContextManager[Any]],
) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Within, a function of the states behind the last block: the logits that the model makes of
    them.

    rows: within which rows of other tables are there, at such positions. Several threads may call
    the function, where the model has its weights.
    """
    embedding = model.get_input_embeddings()
    given = threading.local()

    def pass_on(index: int, ignored: torch.Tensor, call: Call) -> torch.Tensor:
        hidden: torch.Tensor = layout.as_model(given.states)
        return hidden if index == len(blocks) - 1 else ignored

    def nothing(ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        width = getattr(embedding, "embedding_dim", layout.shape[-1])
        return torch.zeros(*ids.shape, width)

    def head(states: torch.Tensor) -> torch.Tensor:
        given.states = states
        ids = torch.zeros(states.shape[:2], dtype=torch.int64)
        with rows(np.arange(states.shape[1])), torch.set_grad_enabled(states.requires_grad):
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
