"""A block and a stream as a device sees them.

Hidden states stay in the host's memory, or on its disk. What the block works on is copied there a
micro-batch ahead, and what it made is copied back while the next one is computed, through pinned
memory on streams of their own. The device holds one block, two micro-batches on their way in, two
on their way out, and what the block's own forward pass takes.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from qtool.calibrating.sites import Site
from qtool.calibrating.stats import SiteStats, Weights, collect
from qtool.cuda.device import Device
from qtool.recipe.file import Precision
from qtool.streaming.arguments import tensors_in
from qtool.streaming.layout import Stored, mapped
from qtool.streaming.precision import matmuls_in
from qtool.streaming.reading import Reading
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import Call, LoadedBlock, States, Stream
from qtool.streaming.workers import Workers


def placed_block(block: LoadedBlock, place: torch.device) -> LoadedBlock:
    """A copy of the block there, as its weights are now."""
    moved: dict[int, torch.Tensor] = {}
    memo: dict[int, Any] = {}
    for module in block.module.modules():
        config = getattr(module, "config", None)
        memo[id(config)] = config
        # Tensors that a module keeps as plain attributes are part of what it computes, too.
        for tensor in (*module._parameters.values(), *module._buffers.values(), *_plain(module)):
            if tensor is None or id(tensor) in moved:
                continue
            there = _copied(tensor.detach(), place)
            if isinstance(tensor, nn.Parameter):
                there = nn.Parameter(there, requires_grad=False)
            moved[id(tensor)] = memo[id(tensor)] = there
    module = copy.deepcopy(block.module, memo)
    weights = {
        name: binding.view(module.get_parameter(binding.parameter_name.removeprefix(block.prefix)))
        for name, binding in block.bindings.items()
        if name in block.online.inputs
    }
    return replace(block, module=module, weights=weights)


def _plain(module: nn.Module) -> list[torch.Tensor]:
    return [value for value in vars(module).values() if isinstance(value, torch.Tensor)]


def _copied(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """A copy there even where it is there already."""
    return tensor.to(place, copy=True)


class Calls(Sequence[list[Call]]):
    """The arguments of every block, on the device when they are asked for.

    Most are the same tensors for all blocks and micro-batches: each is copied once.
    """

    def __init__(self, calls: Sequence[list[Call]], device: Device) -> None:
        self._calls = calls
        self._device = device
        # With the original, so that its id is that of no other tensor. What one block alone is
        # given leaves the device with it.
        self._there: dict[int, tuple[torch.Tensor | Stored, torch.Tensor]] = {}
        in_blocks = [{id(t) for call in block for t in tensors_in(call)} for block in calls]
        counts = Counter(found for block in in_blocks for found in block)
        self._common = {found for found, count in counts.items() if count > 1}
        self._last: tuple[int, list[Call]] | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, index: Any) -> Any:
        if self._last is None or self._last[0] != index:
            calls = self._calls[index]
            moved = [
                replace(
                    one,
                    args=mapped(one.args, self._moved),
                    kwargs=mapped(dict(one.kwargs), self._moved),
                )
                for one in calls
            ]
            self._last = (index, moved)
        return self._last[1]

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor | Stored):
            return value
        known = self._there.get(id(value))
        if known is not None:
            return known[1]
        here = value.read() if isinstance(value, Stored) else value
        there = _copied(here, self._device.place)
        if id(value) in self._common:
            self._there[id(value)] = (value, there)
        return there


class _Coming(NamedTuple):
    """A micro-batch on its way to the device."""

    number: int
    there: torch.Tensor


class _Leaving(NamedTuple):
    """One on its way back: what was computed must live until it is in `here`."""

    number: int
    here: torch.Tensor
    there: torch.Tensor
    arrived: Any  # an event


class Passing:
    """Hidden states as the device sees them one after another; else like a list of them.

    What is read stays as it is until the next but one is asked for. What is written is in the
    host's states after settle().
    """

    def __init__(self, states: States, device: Device) -> None:
        self._states = states
        self._device = device
        self._api = cast(Any, torch.get_device_module(device.place))
        self._in, self._out = (self._api.Stream(device.place) for _ in range(2))
        self._places: list[torch.Tensor | None] = [None, None]
        self._coming: _Coming | None = None
        self._leaving: _Leaving | None = None

    def _here(self) -> Any:
        """Where this thread computes: what is current is so for a thread, and for a device."""
        return self._api.current_stream(self._device.place)

    def append(self, states: torch.Tensor) -> None:
        """One more micro-batch, of the host."""
        self._states.append(states)

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> torch.Tensor:
        coming = self._coming
        if coming is None or coming.number != number:
            coming = self._begin(number)
        self._here().wait_stream(self._in)
        self._coming = self._begin(number + 1) if number + 1 < len(self) else None
        return coming.there

    def __setitem__(self, number: int, states: torch.Tensor) -> None:
        self.settle()
        here = torch.empty(states.shape, device="cpu", pin_memory=self._device.pins)
        self._out.wait_stream(self._here())
        arrived = self._api.Event()
        with self._api.stream(self._out):
            here.copy_(states, non_blocking=True)
            arrived.record(self._out)
        self._leaving = _Leaving(number, here, states, arrived)

    def settle(self) -> None:
        """Wait until what was written last is in the host's states."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.arrived.synchronize()
            self._states[leaving.number] = leaving.here

    def leave(self) -> None:
        """Whatever uses the memory of this next comes after all copies, also where some step has
        failed."""
        for stream in (self._in, self._out):
            self._here().wait_stream(stream)

    def _begin(self, number: int) -> _Coming:
        """Start to copy a micro-batch to where the one before the last was."""
        here = self._states[number]
        place = self._places[number % 2]
        if place is None or place.shape != here.shape:
            place = self._places[number % 2] = torch.empty(here.shape, device=self._device.place)
        here = here.pin_memory() if self._device.pins else here
        # Whatever read that place has been given to this stream before now, or is copied out.
        self._in.wait_stream(self._here())
        self._in.wait_stream(self._out)
        with self._api.stream(self._in):
            place.copy_(here, non_blocking=True)
        return _Coming(number, place)


@contextmanager
def placed(
    device: Device | None, calls: Calls | None, block: LoadedBlock, stream: Stream, workers: Workers
) -> Iterator[tuple[LoadedBlock, Stream, Workers]]:
    """What passes a stream through a block: on the device one micro-batch after another, without
    one all of it as it is. What is written to the stream is in the host's states at the end.

    calls: of the stream, kept from block to block.
    """
    if device is None or calls is None:
        yield block, stream, workers
        return
    with passed(device, calls, stream) as (there, turn):
        yield placed_block(block, device.place), there, turn


@contextmanager
def passed(device: Device, calls: Calls, stream: Stream) -> Iterator[tuple[Stream, Workers]]:
    """The same for a block that is on the device already."""
    with device.explained(), Workers(1) as turn:
        passing = Passing(stream.hidden, device)
        try:
            yield replace(stream, hidden=passing, calls=calls, place=device.place), turn
            passing.settle()
        finally:
            passing.leave()


@dataclass(frozen=True)
class Passage:
    """A stream through the blocks of a model, and where they are that it passes."""

    stream: Stream
    workers: Workers
    device: Device | None
    calls: Calls | None  # the stream's, on the device
    precision: Precision

    @classmethod
    def of(
        cls,
        stream: Stream,
        workers: Workers,
        device: Device | None,
        precision: Precision = "float32",
    ) -> "Passage":
        """Before the first block. device: None is the CPU. precision: of matmuls, as settled."""
        calls = None if device is None else Calls(stream.calls, device)
        return cls(stream, workers, device, calls, precision)

    @contextmanager
    def placed(self, block: LoadedBlock) -> Iterator[tuple[LoadedBlock, Stream, Workers]]:
        """placed() of a block, in which matmuls are of the precision."""
        with (
            matmuls_in(self.precision),
            placed(self.device, self.calls, block, self.stream, self.workers) as found,
        ):
            yield found

    def collect(
        self,
        block: LoadedBlock,
        sites: Sequence[Site],
        needs: Iterable[str],
        advance: bool = False,
        weights: Weights | None = None,
    ) -> dict[str, SiteStats]:
        """stats.collect of a block; Gram matrices stay on the device, too, as far as they fit."""
        if not sites and not advance:
            return {}
        kept_bytes = 0 if self.device is None else self.device.sums_bytes // 2
        with self.placed(block) as (there, stream, workers):
            return collect(there, stream, sites, needs, workers, advance, kept_bytes, weights)


class Ahead:
    """The blocks of a model in turn; with a device, the next one is read meanwhile."""

    def __init__(
        self, read: Callable[[int], LoadedBlock], count: int, pool: Executor | None
    ) -> None:
        self._read, self._count, self._pool = read, count, pool
        self._next: tuple[int, Future[LoadedBlock]] | None = None

    def take(self, index: int) -> LoadedBlock:
        """A block's weights, in float32; the one before it is not used any more."""
        coming, self._next = self._next, None
        if coming is not None and coming[0] == index:
            block = coming[1].result()
        else:
            block = self._read(index)
        if self._pool is not None and index + 1 < self._count:
            self._next = (index + 1, self._pool.submit(self._read, index + 1))
        return block


@contextmanager
def ahead(
    skeleton: Skeleton, device: Device | None, reading: Reading | None = None
) -> Iterator[Ahead]:
    """Ahead, with a thread of its own where there is a device.

    reading: to where, by default onto the CPU. Onto the device on a stream of its own, which has
    ended when a block is taken.
    """
    if device is None:
        yield Ahead(skeleton.block, skeleton.count, None)
        return
    api = cast(Any, torch.get_device_module(device.place))
    stream = api.Stream(device.place)

    def read(index: int) -> LoadedBlock:
        with api.stream(stream):
            block = skeleton.block(index, reading)
        there = api.Event()
        there.record(stream)
        there.synchronize()
        return block

    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield Ahead(read, skeleton.count, pool)
