"""Hidden states on their way through the blocks, and the block that they pass.

Micro-batches have a fixed number of tokens, each is computed by one thread, and what is summed over
them is summed in their order: the number of threads changes no bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from qtool.checkpoints.names import Binding
from qtool.errors import RTN_CAN, NoGradientError, UnsupportedError
from qtool.streaming.joined_rows import RowsOf
from qtool.streaming.layout import Layout
from qtool.streaming.online import Online

CPU = torch.device("cpu")
Structure = tuple[tuple[str, tuple[int, ...]], ...]  # of a block


@dataclass(frozen=True)
class Call:
    """What a block is called with beside the states; equal tensors are shared."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    layout: Layout  # of the states that it takes and returns


class States(Protocol):
    """States by micro-batch, each [samples, length, columns] float32: something like a list of
    them, wherever it keeps them. What is read is not written into, and good until its number is
    set: nobody keeps it."""

    def append(self, states: torch.Tensor, /) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[torch.Tensor]: ...
    def __getitem__(self, number: int, /) -> torch.Tensor: ...
    def __setitem__(self, number: int, states: torch.Tensor, /) -> None: ...


class InMemory:
    """States in memory that stay where they are: what replaces them is copied there.

    New tensors in their stead would leave the heap in pieces between the activations that come and
    go, and the process with up to as much again as the states are.
    """

    def __init__(self) -> None:
        self._states: list[torch.Tensor] = []

    def append(self, states: torch.Tensor) -> None:
        """A copy of one more micro-batch, which other threads may write to whatever mode the caller
        is in: inference mode is of a thread."""
        with torch.inference_mode(False):
            self._states.append(states.clone(memory_format=torch.contiguous_format))

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._states)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._states[number]

    def __setitem__(self, number: int, states: torch.Tensor) -> None:
        here = self._states[number]
        assert (states.shape, states.dtype) == (here.shape, here.dtype)
        here.copy_(states)


@dataclass
class Stream:
    """Hidden states, and what else blocks hand on, on their way through the blocks."""

    hidden: States
    layout: Layout
    calls: Sequence[list[Call]]  # by block, then micro-batch
    probe_calls: list[Call]  # by block, for probe()
    probe_tokens: int
    place: torch.device = CPU  # where blocks are that pass it

    def probe(self, block: int) -> tuple[torch.Tensor, Call]:
        """The first few positions of the first sample, [1, probe_tokens, columns]: a small input.

        In a causal model the states of a prefix are a prefix of the states.
        """
        return self.hidden[0][:1, : self.probe_tokens].clone(), self.probe_calls[block]

    @property
    def tokens(self) -> int:
        """Positions in all micro-batches."""
        return sum(hidden.shape[0] * hidden.shape[1] for hidden in self.hidden)


# What torch says where it cannot go back, and not where a device or a block has failed.
_NO_GRADIENT = ("derivative", "backward", "require grad", "requires grad", "inplace", "in-place")


def raise_if_of_memory(error: RuntimeError) -> None:
    """What comes of too little memory is raised as such: bytes do not depend on how much there
    is."""
    if isinstance(error, torch.OutOfMemoryError):  # of a device, which explains it
        raise error
    if "alloc" in (said := " ".join(str(error).split())[:200]).lower():
        raise MemoryError(said) from error


@dataclass(eq=False)
class LoadedBlock:
    """One block with its weights. Writing into a tensor of `weights` changes the block."""

    index: int
    prefix: str  # of its parameters in the model, "model.layers.3."
    module: nn.Module
    bindings: Mapping[str, Binding]  # by checkpoint name
    weights: Mapping[str, torch.Tensor]  # by checkpoint name, float32 views
    online: Online = field(default_factory=Online)  # what is rotated while it runs

    def run(self, states: torch.Tensor, call: Call) -> torch.Tensor:
        """The block's hidden states, [samples, length, columns]."""
        return call.layout.hidden(self.passed(states, call))

    def passed(self, states: torch.Tensor, call: Call) -> torch.Tensor:
        """The states behind the block, [samples, length, columns]."""
        with torch.no_grad():
            return self.outputs(self.module, states, call)

    def outputs(self, module: nn.Module, states: torch.Tensor, call: Call) -> torch.Tensor:
        """What the block's module, or a copy that shares its weights, makes of states."""
        given = call.layout.given(states)
        args = [given.put(argument) for argument in call.args]
        kwargs = {name: given.put(argument) for name, argument in call.kwargs.items()}
        with self.online.inside(self.index, self.weights):
            output = module(given.hidden, *args, **kwargs)
        try:
            return call.layout.after(states, given, output, type(self.module).__name__)
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.prefix[:-1]}: {error}; {RTN_CAN}") from None

    def try_out(self, hidden: torch.Tensor, call: Call) -> torch.Tensor:
        """run() where it is not known yet whether this block can be run on its own."""
        try:
            return self.run(hidden, call)
        # What a model's own code raises when it is not called as it expects.
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError,
                TypeError, ValueError) as error:  # fmt: skip
            said = " ".join(str(error).split())[:200]
            raise UnsupportedError(
                f"{self.prefix[:-1]}: {type(self.module).__name__} cannot be run on its own "
                f"({type(error).__name__}: {said}); {RTN_CAN}"
            ) from error

    def no_gradient(self, error: RuntimeError, so: str) -> Exception:
        """What is to be raised where torch could not backpropagate through it. so: what follows."""
        raise_if_of_memory(error)
        said = " ".join(str(error).split())[:200]
        if any(words in said for words in _NO_GRADIENT):
            return NoGradientError(
                f"{self.prefix[:-1]}: torch has no gradient of what {type(self.module).__name__} "
                f"computes ({said}), so {so}"
            )
        return UnsupportedError(
            f"{self.prefix[:-1]}: {type(self.module).__name__} cannot be run forwards and back "
            f"({said}), so {so}"
        )

    def not_finite(self) -> Exception:
        """What is to be raised where a gradient is not finite."""
        return NoGradientError(
            f"{self.prefix[:-1]}: a gradient is not finite on this text; the model is broken, "
            "or overflows in float32"
        )

    @property
    def structure(self) -> Structure:
        """Equal for blocks whose matrices are called alike: parameters, and what has which rows."""
        shapes = [(name, tuple(one.shape)) for name, one in self.module.named_parameters()]
        rows = [
            (path, (one.rows.start, one.rows.stop))
            for path, one in self.module.named_modules()
            if isinstance(one, RowsOf)
        ]
        return (*shapes, *rows)
