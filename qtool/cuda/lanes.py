"""Streams of a device on which threads work side by side: what one copies passes while another's
kernels run. Each thread has a stream for as long as it has a lane, and all that it makes there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock
from typing import Any

import torch

from qtool.cuda.device import Device
from qtool.cuda.lent import Lent

LANES = 4
_HELD = f"rows of {LANES} matrices and their codes"


class Lanes:
    """A device, lent to several threads."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lent = Lent(self._lane, LANES)

    @contextmanager
    def one(self) -> Iterator[Device]:
        """The device by a stream of its own; waits where all are in use. Nothing of it may be used
        afterwards, but for what is in the host's memory."""
        if not self._device.pins:
            yield self._device
            return
        with self._lent.one() as lane:
            yield lane

    def _lane(self) -> Device:
        api: Any = torch.cuda
        stream = api.Stream(self._device.place)
        return replace(self._device, stream=stream, holds=_HELD, alone=RLock())
