"""Streams of a device on which threads work side by side: what one copies passes while another's
kernels run. Each thread has a stream for as long as it has a lane, and all that it makes there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import LifoQueue
from threading import RLock
from typing import Any

import torch

from qtool.streaming.device import Device

LANES = 4
_HELD = f"rows of {LANES} matrices and their codes"


class Lanes:
    """Lent to threads, the last one that came back first; each is made when it is first needed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: LifoQueue[Device | None] = LifoQueue()
        for _ in range(LANES):
            self._free.put(None)

    @contextmanager
    def one(self) -> Iterator[Device]:
        """The device by a stream of its own; waits where all are in use. Nothing of it may be used
        afterwards, but for what is in the host's memory."""
        if not self._device.pins:
            yield self._device
            return
        lane = self._free.get()
        try:
            if lane is None:
                api: Any = torch.cuda
                stream = api.Stream(self._device.place)
                lane = replace(self._device, stream=stream, holds=_HELD, alone=RLock())
            yield lane
        finally:
            self._free.put(lane)
