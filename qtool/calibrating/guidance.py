"""gptq.guided: in GPTQ's sums of what keys and values read, tokens count by what is read of them.

    gram = sum over tokens of weight(token) x x'
    weight(token) = (g^2 / their mean)^power / the mean of that, and the mean of keys' and values'
    g^2 = mean of the squared gradients, by what the matrix gives at the token, of a random sum of
    all
          numbers that the first matrix behind the attention gives, each drawn from N(0, 1)

Attention reads some tokens many times, the first of a text most of all, and others hardly ever: an
error in their keys and values costs as much more or less. Plain GPTQ counts all alike. Which
matrices other tokens read of, whatever a model calls them, is seen on the probe: those on whose
outputs at earlier tokens the block's last output depends. What else reads the same input, as
queries do, counts tokens likewise. All other inputs keep to plain sums, and so do blocks without
attention: the backward pass through the steps of a state space takes many times the forward pass.

Gradients are of the block as it is before its matrices are quantized, on what comes of those before
it: one pass through its first matrices and back.

Source: Kim et al., GuidedQuant: Large Language Model Quantization via Exploiting End Loss Guidance,
2025, whose gradients are of the whole model's loss, for all matrices; Sung et al., RSQ: Learning
from Important Tokens Leads to Better Quantized LLMs, 2025, who count tokens by the attention they
get.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from qtool.calibrating.placed import Passage
from qtool.calibrating.sites import BlockSites
from qtool.calibrating.stats import Weights
from qtool.errors import NoGradientError, UnsupportedError
from qtool.streaming.allocator import give_back
from qtool.streaming.linears import Matrix, ObserveLinears, WeightIndex
from qtool.streaming.stream import Call, LoadedBlock, Stream, raise_if_of_memory
from qtool.streaming.torch_calls import TorchCalls


@dataclass(frozen=True)
class Mixing:
    """How tokens meet in a block."""

    read: tuple[Matrix, ...] = ()  # whose outputs later tokens read, in the order of the pass
    behind: Matrix | None = None  # the first that all of these come to; None: the block's output


# Notes of a block, which told() counts.
GUIDED = "the tokens of a block were guided"
ALIKE = "the tokens of a block count alike: "
_ATTEND = {
    F.scaled_dot_product_attention,
    F.softmax,
    torch.softmax,
    torch.Tensor.softmax,
}


class _SeenError(Exception):
    """Ends a forward pass of which nothing more is needed."""


@dataclass(frozen=True)
class Guidance:
    """What tokens count in a run, block by block."""

    power: float
    seed: int
    alike: dict[int, str] = field(default_factory=dict)  # why tokens of a block count so

    def said(self, index: int, guided: bool) -> list[str]:
        """Notes of block `index`. guided: whether tokens of it counted by anything."""
        if index in self.alike:
            return [f"{ALIKE}{self.alike[index]}"]
        return [GUIDED] if guided else []

    def weights(self, block: LoadedBlock, passage: Passage, found: BlockSites) -> Weights:
        """How much tokens count for the inputs of keys and values, by site id, 1 in the mean; none
        where there is no attention, where torch has no gradient, or where gradients say nothing."""
        how = mixing(block, *passage.stream.probe(block.index))
        if not how.read:
            return {}
        with passage.placed(block) as (there, stream, workers):
            index = WeightIndex(there.module)

            def one(number: int) -> dict[Matrix, torch.Tensor]:
                return _gradients(there, index, stream, number, how, self._noise(block, number))

            try:
                batches = workers.map(one, range(len(stream.hidden)))
            except RuntimeError as error:
                why = block.no_gradient(error, "what is read of its tokens cannot be told")
                if not isinstance(why, NoGradientError):
                    without = "--set gptq.guided=0 does without"
                    raise UnsupportedError(f"{why}; {without}") from error
                self.alike[block.index] = str(why)
                return {}
        give_back()  # what the backward pass took
        weights: dict[str, Sequence[torch.Tensor]] = {}
        for site in found.sites:
            read = [one.matrix for one in found.linears if one.site == site.id]
            own = [one for one in read if one in how.read and all(one in b for b in batches)]
            if site.per_token != 1 or not own:
                continue
            every = [self._counts(torch.cat([batch[one] for batch in batches])) for one in own]
            known = [one for one in every if one is not None]
            if known:
                counts = torch.stack(known).mean(0)
                weights[site.id] = torch.split(counts, [len(batch[own[0]]) for batch in batches])
        return weights

    def _counts(self, squares: torch.Tensor) -> torch.Tensor | None:
        """By one matrix, [tokens], of mean 1; None where gradients say nothing."""
        mean = squares.double().mean()
        if not (torch.isfinite(mean) and mean > 0):
            return None
        found = (squares.double() / mean) ** self.power
        return (found / found.mean()).float()

    def _noise(self, block: LoadedBlock, number: int) -> torch.Generator:
        """Of a micro-batch, whichever thread computes it."""
        seed = np.random.SeedSequence([self.seed, block.index, number]).generate_state(1)
        return torch.Generator().manual_seed(int(seed[0]))


def told(notes: Sequence[str], blocks: int) -> list[str]:
    """Notes of all blocks, with how many of them were guided in one sentence."""
    guided = notes.count(GUIDED)
    alike = [note.removeprefix(ALIKE) for note in notes if note.startswith(ALIKE)]
    rest = [note for note in notes if note != GUIDED and not note.startswith(ALIKE)]
    if guided:
        rest.append(
            f"tokens were guided in {guided} of {blocks} blocks (gptq.guided): for keys, values "
            "and what else reads their input they count by what others read of them, and so they "
            "do in the relative errors of these"
        )
    if alike:
        first = "the first, " if len(alike) > 1 else ""
        rest.append(f"all tokens count alike in {len(alike)} of {blocks} blocks: {first}{alike[0]}")
    return rest


class _Attention(TorchCalls):
    """Within, whether something attends is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.met = False

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.met |= func in _ATTEND
        return func(*args, **kwargs)


def mixing(block: LoadedBlock, hidden: torch.Tensor, call: Call) -> Mixing:
    """How tokens meet, seen on a small input of one sample; as if they did not where nothing
    attends before the end of it, or torch has no gradient."""
    index, length = WeightIndex(block.module), hidden.shape[1]
    made: dict[Matrix, list[torch.Tensor]] = {}
    attended: set[Matrix] = set()  # called once something has attended
    attention = _Attention()

    def note(matrix: Matrix, output: torch.Tensor, _: Any) -> None:
        if matrix.expert is None:
            made.setdefault(matrix, []).append(output)
        if attention.met:
            attended.add(matrix)

    states = hidden.detach().requires_grad_()
    try:
        with torch.enable_grad(), attention, ObserveLinears(index, lambda *_: None, note):
            last = block.outputs(block.module, states.clone(), call)
        once = {matrix: outputs[0] for matrix, outputs in made.items() if len(outputs) == 1}
        whole = {m: o for m, o in once.items() if o.requires_grad and _rows(o) == length}
        read = _read_by_the_last(last.flatten(0, 1), whole)
        order = [*whole]
        behind = order[order.index(read[-1]) + 1 :] if read else []
        for matrix in behind:
            rows = whole[matrix].reshape(length, -1)
            if set(read) <= {*_read_by_the_last(rows, {one: whole[one] for one in read})}:
                return Mixing(tuple(read), matrix) if matrix in attended else Mixing()
    except RuntimeError as error:
        raise_if_of_memory(error)
        return Mixing()
    return Mixing(tuple(read)) if attention.met else Mixing()


def _rows(output: torch.Tensor) -> int:
    return output.numel() // output.shape[-1]


def _read_by_the_last(rows: torch.Tensor, outputs: Mapping[Matrix, torch.Tensor]) -> list[Matrix]:
    """The matrices on whose outputs at earlier tokens the last of `rows` [tokens, columns]
    depends."""
    noise = torch.randn(rows.shape[-1], generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad(
        rows[-1], [*outputs.values()], noise, retain_graph=True, allow_unused=True
    )
    pairs = zip(outputs, gradients, strict=True)
    return [m for m, one in pairs if one is not None and one.reshape(len(rows), -1)[:-1].any()]


def _gradients(
    block: LoadedBlock,
    index: WeightIndex,
    stream: Stream,
    number: int,
    how: Mixing,
    noise: torch.Generator,
) -> dict[Matrix, torch.Tensor]:
    """Of a micro-batch the mean square of each token's gradients, of matrices that are called
    once."""
    outputs: dict[Matrix, list[torch.Tensor]] = {}
    ends: list[torch.Tensor] = []

    def note(matrix: Matrix, output: torch.Tensor, _: Any) -> None:
        if matrix == how.behind:
            ends.append(output)
            raise _SeenError
        if matrix in how.read:
            outputs.setdefault(matrix, []).append(output)

    states = stream.hidden[number].detach()
    call = stream.calls[block.index][number]
    try:
        with torch.enable_grad(), ObserveLinears(index, lambda *_: None, note):
            ends.append(block.outputs(block.module, states.requires_grad_().clone(), call))
    except _SeenError:
        pass
    tokens = states.shape[0] * states.shape[1]
    found = {m: o[0] for m, o in outputs.items() if len(o) == 1 and _rows(o[0]) == tokens}
    if not found:  # they are called otherwise than on the probe
        return {}
    end = ends[0]
    drawn = torch.randn(end.shape, generator=noise).to(end.device)
    gradients = torch.autograd.grad(end, [*found.values()], drawn, materialize_grads=True)
    return {
        matrix: one.reshape(tokens, -1).square().mean(-1).cpu()
        for matrix, one in zip(found, gradients, strict=True)
    }
