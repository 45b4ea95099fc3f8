"""Hidden states on their way through the blocks, and the block that they pass.

Micro-batches have a fixed number of tokens, each is computed by one thread, and what is summed over
them is summed in their order: the number of threads changes no bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from qtool.calibrating.online import Online
from qtool.errors import UnsupportedError
from qtool.names import Binding

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Call:
    """What a block is called with beside the hidden states; equal tensors are shared."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class States(Protocol):
    """Hidden states by micro-batch, each [samples, length, width] float32: a list of them, or
    something like one that keeps them elsewhere."""

    def append(self, states: torch.Tensor, /) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[torch.Tensor]: ...
    def __getitem__(self, number: int, /) -> torch.Tensor: ...
    def __setitem__(self, number: int, states: torch.Tensor, /) -> None: ...


@dataclass
class Stream:
    """Hidden states on their way through the blocks."""

    hidden: States
    calls: Sequence[list[Call]]  # by block, then micro-batch
    probe_calls: list[Call]  # by block, for probe()
    probe_tokens: int
    place: torch.device = CPU  # where blocks are that pass it

    def probe(self, block: int) -> tuple[torch.Tensor, Call]:
        """The first few positions of the first sample, [1, probe_tokens, width]: a small input.

        In a causal model the hidden states of a prefix are a prefix of the hidden states.
        """
        return self.hidden[0][:1, : self.probe_tokens].clone(), self.probe_calls[block]

    @property
    def tokens(self) -> int:
        """Positions in all micro-batches."""
        return sum(hidden.shape[0] * hidden.shape[1] for hidden in self.hidden)


@dataclass(eq=False)
class LoadedBlock:
    """One block with its weights. Writing into a tensor of `weights` changes the block."""

    index: int
    prefix: str  # of its parameters in the model, "model.layers.3."
    module: nn.Module
    bindings: Mapping[str, Binding]  # by checkpoint name
    weights: Mapping[str, torch.Tensor]  # by checkpoint name, float32 views
    online: Online = field(default_factory=Online)  # what is rotated while it runs

    def run(self, hidden: torch.Tensor, call: Call) -> torch.Tensor:
        """The block's output, [samples, length, width]."""
        with torch.no_grad():
            return self.outputs(self.module, hidden, call)

    def outputs(self, module: nn.Module, hidden: torch.Tensor, call: Call) -> torch.Tensor:
        """What the block's module, or a copy that shares its weights, makes of hidden states."""
        with self.online.inside(self):
            output = module(hidden, *call.args, **call.kwargs)
        result = output[0] if isinstance(output, tuple) else output
        if not isinstance(result, torch.Tensor) or result.shape != hidden.shape:
            raise UnsupportedError(
                f"{self.prefix[:-1]}: {type(self.module).__name__} returns other hidden states "
                "than the ones it is given; calibrated methods cannot stream it, RTN can quantize "
                "it (it needs no forward pass)"
            )
        return result

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
                f"({type(error).__name__}: {said}); calibrated methods cannot stream it, RTN can "
                "quantize it (it needs no forward pass)"
            ) from error

    def no_gradient(self, error: RuntimeError, so: str) -> Exception:
        """What is to be raised where torch could not go back through it. so: what follows."""
        said = " ".join(str(error).split())[:200]
        if "alloc" in said:
            return MemoryError(said)
        return UnsupportedError(
            f"{self.prefix[:-1]}: torch has no gradient of what {type(self.module).__name__} "
            f"computes ({said}), so {so}"
        )

    @property
    def nbytes(self) -> int:
        """Memory of its parameters."""
        return sum(p.numel() * p.element_size() for p in self.module.parameters())
