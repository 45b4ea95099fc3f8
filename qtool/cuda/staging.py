"""A place to work on batches: memory of a device, memory of this machine beside it, and a queue.

What is asked of a place is done in the order in which it was asked; only `finish` waits. Several
places work side by side, so that while one copies another computes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qtool.cuda.tasks import Task
from qtool.errors import UnsupportedError


@dataclass(frozen=True)
class Host:
    """Bytes of this machine that a device copies from and to without a detour."""

    array: NDArray[np.uint8]
    handle: Any  # the same, as the device knows it


class Place(Protocol):
    """One queue of a device."""

    def host(self, nbytes: int) -> Host: ...

    def room(self, nbytes: int) -> Any:
        """Bytes on the device, uint8 [nbytes]."""

    def view(self, room: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        """The beginning of a room as an array of another dtype."""

    def put(self, room: Any, host: Host, nbytes: int) -> None:
        """The first bytes, to the device."""

    def get(self, host: Host, room: Any, nbytes: int) -> None:
        """The first bytes, from the device."""

    def launch(self, *tasks: Task) -> None: ...

    def finish(self) -> None:
        """Returns when all of that is done."""


Places = Callable[[], Place]


class CudaPlace:
    """A stream of a GPU."""

    def __init__(self, index: int) -> None:
        import torch

        self._torch: Any = torch
        self._stream = self._torch.cuda.Stream(index)

    def host(self, nbytes: int) -> Host:
        """Pinned memory, for the stream's GPU also where another is current."""
        with self._torch.cuda.stream(self._stream):
            pinned = self._torch.empty(
                nbytes, dtype=self._torch.uint8, device="cpu", pin_memory=True
            )
        return Host(pinned.numpy(), pinned)

    def room(self, nbytes: int) -> Any:
        """UnsupportedError where the GPU has no more memory."""
        try:
            with self._torch.cuda.stream(self._stream):
                return self._torch.empty(nbytes, dtype=self._torch.uint8, device="cuda")
        except self._torch.cuda.OutOfMemoryError:
            raise UnsupportedError(
                f"the GPU has no {nbytes:,} bytes left for a batch of weights; end what else uses "
                "it, or leave --device out to stay on the CPU"
            ) from None

    def view(self, room: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        kind = getattr(self._torch, dtype)
        nbytes = kind.itemsize * int(np.prod(shape))
        return room[:nbytes].view(kind).reshape(shape)

    def put(self, room: Any, host: Host, nbytes: int) -> None:
        with self._torch.cuda.stream(self._stream):
            room[:nbytes].copy_(host.handle[:nbytes], non_blocking=True)

    def get(self, host: Host, room: Any, nbytes: int) -> None:
        with self._torch.cuda.stream(self._stream):
            host.handle[:nbytes].copy_(room[:nbytes], non_blocking=True)

    def launch(self, *tasks: Task) -> None:
        """UnsupportedError where the GPU has no memory for the kernels' own arrays."""
        from qtool.cuda.running import launch

        try:
            with self._torch.cuda.stream(self._stream):
                launch(*tasks)
        except self._torch.cuda.OutOfMemoryError as error:
            said = " ".join(str(error).split())[:160]
            raise UnsupportedError(
                f"the GPU has no memory left for what encoding takes ({said}); end what else uses "
                "it, or leave --device out to stay on the CPU"
            ) from None

    def finish(self) -> None:
        self._stream.synchronize()


def places() -> Places:
    """What makes places on torch's current GPU, which is current for this thread alone."""
    import torch

    return partial(CudaPlace, torch.cuda.current_device())
