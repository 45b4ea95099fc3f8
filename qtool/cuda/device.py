"""A GPU that does the work of a run, as a value that is passed along; None is the CPU.

It holds one matrix, or one block, at a time: whoever works there takes `alone`, so that its memory
does not grow with the number of threads, which read, pack and write meanwhile. Some rows at a time
are rounded by a few streams side by side (qtool.cuda.lanes), each a device of its own. The tests
pass one whose place is the CPU and whose kernels run in an emulated grid.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.errors import UnsupportedError


@dataclass(frozen=True)
class Device:
    """Where blocks run and matrices are rounded."""

    place: torch.device
    launch: Callable[..., None]  # qtool.cuda.running.launch: of tasks whose arrays are there
    name: str  # for people, and for what a resumed run compares
    sums_bytes: int  # of its memory, for sums of Gram matrices
    stream: Any = field(default=None, compare=False)  # where work is queued; None: the default one
    holds: str = "a block, a batch and the Gram matrices of its inputs"  # at most, of a run
    alone: threading.RLock = field(default_factory=threading.RLock, compare=False)

    def put(self, array: NDArray[Any]) -> torch.Tensor:
        """The array there; on the CPU its own memory. By a stream of its own it may still be on its
        way, through pinned memory, which torch keeps until it has arrived."""
        here = torch.from_numpy(array)
        if self.stream is None:
            return here.to(self.place)
        return here.pin_memory().to(self.place, non_blocking=True)

    @property
    def pins(self) -> bool:
        """Whether copies are faster from memory that the system may not move."""
        return self.place.type == "cuda"

    @contextmanager
    def explained(self, what: str | None = None) -> Iterator[None]:
        """Within, too little of its memory for that (what it holds) is an UnsupportedError, and the
        caller's thread works on the device's stream, or on that on which all other threads do."""
        try:
            with self._stream():
                yield
        except torch.OutOfMemoryError as error:
            said = " ".join(str(error).split())[:160]
            raise UnsupportedError(
                f"{self.name}: its memory does not hold {what or self.holds} ({said}); leave "
                "--device out, or end what else uses this GPU"
            ) from error

    def _stream(self) -> AbstractContextManager[Any]:
        if not self.pins:
            return nullcontext()
        api: Any = torch.cuda
        own = api.default_stream(self.place) if self.stream is None else self.stream
        there: AbstractContextManager[Any] = api.stream(own)
        return there


def open_gpu(*, ways_back: bool = True) -> Device:
    """torch's current GPU; UnsupportedError, in a sentence, where none can be used. ways_back:
    whether gradients may be wanted, which are to be the same in every run."""
    from qtool.cuda import running

    running.require()
    # What float32 means everywhere else here: 24 bits, not the 11 of TF32.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if ways_back:  # of that kernel they are sums in the order in which its parts happen to end
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    place = torch.device("cuda", torch.cuda.current_device())
    found = torch.cuda.get_device_properties(place)
    free, _ = torch.cuda.mem_get_info(place)
    name = f"{found.name} (sm_{found.major}{found.minor})"

    def launch(*tasks: Any, programmatic: bool = False) -> None:
        with torch.cuda.device(place):  # the current one is so for a thread
            running.launch(*tasks, programmatic=programmatic)

    return Device(place, launch, name, free // 2)


def explained(device: Device | None, what: str) -> AbstractContextManager[None]:
    """`Device.explained`, where there is one."""
    return nullcontext() if device is None else device.explained(what)


def host(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor's numbers in an array of the CPU."""
    return np.asarray(tensor.cpu().numpy())
