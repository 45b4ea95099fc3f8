"""The host's numbers on their way to a device, through two pinned buffers in turn.

One is filled while the other is copied, on the stream that is current for the caller: the caller
does not wait for the device but where both are under way.
"""

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.cuda.device import Device

BUFFER_BYTES = 32 << 20


class Uploads:
    """For one thread at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._api = cast(Any, torch.get_device_module(device.place))
        self._buffers: list[tuple[torch.Tensor, Any]] = []  # with the event after its last copy

    def __call__(self, here: torch.Tensor) -> torch.Tensor:
        """A copy there, for what the caller's stream does next; it begins where the allocator of
        the device likes."""
        if not self._device.pins:
            return here.to(self._device.place, copy=True).contiguous()
        there = torch.empty(here.shape, dtype=here.dtype, device=self._device.place)
        source, target = (one.reshape(-1).view(torch.uint8) for one in (here, there))
        for start in range(0, len(source), BUFFER_BYTES):
            part = source[start : start + BUFFER_BYTES]
            buffer, copied = self._turn()
            copied.synchronize()
            pinned = buffer[: len(part)]
            pinned.copy_(part)
            target[start : start + len(part)].copy_(pinned, non_blocking=True)
            copied.record(self._api.current_stream(self._device.place))
        return there

    def array(self, array: NDArray[Any]) -> torch.Tensor:
        """The same of a numpy array."""
        return self(torch.from_numpy(np.ascontiguousarray(array)))

    def _turn(self) -> tuple[torch.Tensor, Any]:
        """The buffer whose copy is the older one."""
        if len(self._buffers) < 2:
            # Named, since what reads weights may have the GPU as the device of all new tensors.
            made = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._buffers.append((made, self._api.Event()))
        else:
            self._buffers.reverse()
        return self._buffers[-1]
