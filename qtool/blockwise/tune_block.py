"""A quantized block whose scales are moved until it gives back what the original block gives.

    hidden states of the quantized model -> block, quantized -> outputs \
                                                                         loss -> gradient -> scales
    hidden states of the original model  -> block, original  -> targets /

So a block also compensates for errors of those before it. The loss is that of qtool.methods.tune,
in which all tokens count alike, however large. An eighth of the micro-batches takes no part; where
the block has not come nearer on these, its scales stay as they were.

All of it is done by the CPU, a thread a micro-batch, each with a copy of the block's modules that
shares its weights; gradients are summed in the order of micro-batches, so that no bit depends on
the number of threads. A matrix's gradient by weights is there only until it is one by scales.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from qtool.errors import UnsupportedError
from qtool.methods import tune
from qtool.recipe.methods import TuneOptions
from qtool.streaming.stream import LoadedBlock, States, Stream
from qtool.streaming.workers import Workers

Own = TypeVar("Own")
Kind = TypeVar("Kind", bound="Matrix")

HELD_OUT = 8  # one micro-batch of so many takes no part


Gradients = dict[str, torch.Tensor]


class Matrix(Protocol):
    """A quantized matrix, in whatever form."""

    def scales(self) -> tune.Scales:
        """What is to be moved, at zero."""

    def tuned(self: Own, scales: tune.Scales) -> Own:
        """The matrix with them moved."""

    def dequantize(self) -> NDArray[np.float32]:
        """In the shape that the checkpoint has it in."""


@dataclass(frozen=True)
class Tuned(Generic[Kind]):
    """What became of a block."""

    matrices: Mapping[str, Kind]
    before: float  # mean loss of the micro-batches that took no part
    after: float  # likewise; of `matrices`, so never more than before


@dataclass(frozen=True)
class _Task:
    """A block, what goes in and what should come out."""

    block: LoadedBlock
    stream: Stream
    targets: States
    scales: Mapping[str, tune.Scales]

    def loss(self, module: nn.Module, number: int) -> torch.Tensor:
        """Of a micro-batch."""
        hidden, call = self.stream.hidden[number], self.stream.calls[self.block.index][number]
        target = call.layout.hidden(self.targets[number])
        return tune.lost(call.layout.hidden(self.block.outputs(module, hidden, call)), target)


def tune_block(
    block: LoadedBlock,
    matrices: Mapping[str, Kind],
    stream: Stream,
    targets: States,
    workers: Workers,
    options: TuneOptions,
) -> Tuned[Kind]:
    """The block's matrices with other scales; its weights are those of the result.

    matrices: by checkpoint name, which the block's weights are dequantized from. stream: at the
    block. targets: hidden states after the original block. UnsupportedError where torch has no
    gradient of what the block computes.
    """
    task = _Task(block, stream, targets, {name: one.scales() for name, one in matrices.items()})
    taking, held = parts(len(stream.hidden))
    before = _mean_loss(task, held, workers)
    _descend(task, taking, workers, options)
    if (moved := _moved(matrices, task.scales)) is not None:
        _put_back(block, moved)
        after = _mean_loss(task, held, workers)
        if after < before:
            return Tuned(moved, before, after)
    _put_back(block, matrices)
    return Tuned(matrices, before, before)


def parts(count: int) -> tuple[list[int], list[int]]:
    """Micro-batches that scales are tuned on, and that they are judged by; one alone is both."""
    every = list(range(count))
    held = every[-max(1, count // HELD_OUT) :]
    return every[: -len(held)] or held, held


def _moved(
    matrices: Mapping[str, Kind], scales: Mapping[str, tune.Scales]
) -> dict[str, Kind] | None:
    """None where a scale has gone to where no format has it."""
    if not all(bool(one.moved.isfinite().all()) for one in scales.values()):
        return None
    try:
        return {name: one.tuned(scales[name]) for name, one in matrices.items()}
    except UnsupportedError:
        return None


def _mean_loss(task: _Task, numbers: Sequence[int], workers: Workers) -> float:
    def one(number: int) -> float:
        with torch.no_grad():
            return float(task.loss(task.block.module, number))

    return sum(workers.map(one, numbers)) / len(numbers)


def _put_back(block: LoadedBlock, matrices: Mapping[str, Matrix]) -> None:
    for name, matrix in matrices.items():
        block.weights[name].copy_(torch.from_numpy(matrix.dequantize()))


def _descend(task: _Task, taking: Sequence[int], workers: Workers, options: TuneOptions) -> None:
    """Take all steps; the block's weights follow its scales."""
    copies: SimpleQueue[nn.Module] = SimpleQueue()
    for _ in range(min(workers.threads, options.batch)):
        copies.put(_sharing(task.block, task.scales))
    for number in range(1, options.steps + 1):
        first = (number - 1) * options.batch
        chosen = [taking[(first + one) % len(taking)] for one in range(options.batch)]
        found = workers.map(partial(_gradients, task, copies), chosen)
        rate = tune.rate_at(number, options.steps, options.rate)

        workers.map(partial(_step, task, found, number, rate), task.scales)


def _step(task: _Task, found: Sequence[Gradients], number: int, rate: float, name: str) -> None:
    """One matrix follows the gradients that micro-batches found; nothing may have read it."""
    gradients = [one[name] for one in found if name in one]
    if gradients:
        gradient = sum(gradients[1:], gradients[0])
        tune.step(task.scales[name], _flat(task.block.weights[name]), gradient, number, rate)


def _gradients(task: _Task, copies: "SimpleQueue[nn.Module]", number: int) -> Gradients:
    """dL/dp of each matrix that a micro-batch meets."""
    module = copies.get()
    try:
        with _collected(task, module) as found:
            loss = task.loss(module, number)
            try:
                torch.autograd.backward(loss)
            except RuntimeError as error:
                so = "its scales cannot be tuned; take the recipe without `tune`"
                raise task.block.no_gradient(error, so) from error
        return found
    finally:
        copies.put(module)


def _flat(weight: torch.Tensor) -> torch.Tensor:
    """A view of one matrix, or of several in one tensor, as rows."""
    return weight.view(-1, weight.shape[-1])


@contextmanager
def _collected(task: _Task, module: nn.Module) -> Iterator[Gradients]:
    """Within, each gradient by a parameter becomes one by scales as soon as it is whole."""
    found: Gradients = {}
    pieces: dict[str, list[str]] = {}
    for name in task.scales:
        inner = task.block.bindings[name].parameter_name.removeprefix(task.block.prefix)
        pieces.setdefault(inner, []).append(name)

    def take(parameter: torch.Tensor, names: Sequence[str]) -> None:
        by_weight, parameter.grad = parameter.grad, None
        assert by_weight is not None
        for name in names:
            weight, part = task.block.weights[name], task.block.bindings[name].view(by_weight)
            part = part.reshape(-1, part.shape[-1])
            found[name] = tune.gradient(task.scales[name], _flat(weight), part)

    hooks = []
    for inner, names in pieces.items():
        parameter: Any = module.get_parameter(inner)  # the hook has no types
        hooks.append(parameter.register_post_accumulate_grad_hook(partial(take, names=names)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _sharing(block: LoadedBlock, names: Mapping[str, Any]) -> nn.Module:
    """A copy of the block's modules on the same memory, whose matrices of these names have
    gradients."""
    wanted = {block.bindings[name].parameter_name.removeprefix(block.prefix) for name in names}
    memo: dict[int, Any] = {}
    for module in block.module.modules():
        config = getattr(module, "config", None)
        memo[id(config)] = config
    for name, parameter in block.module.named_parameters():
        memo[id(parameter)] = nn.Parameter(parameter.data, requires_grad=name in wanted)
    for buffer in block.module.buffers():
        memo[id(buffer)] = buffer
    return copy.deepcopy(block.module, memo)
