"""Parameters onto a device: quantized matrices go there as they are stored, and become float32
there."""

from dataclasses import dataclass
from functools import cached_property

import torch

from qtool.cuda.device import Device
from qtool.cuda.uploads import Uploads
from qtool.quality.packed import Packed, packed
from qtool.streaming.reading import OnHost, copy_tensor, require_finite
from qtool.streaming.weights import Weights


@dataclass(frozen=True)
class OnDevice:
    """See qtool.streaming.reading.Reading; for one thread at a time, whose stream does the work.
    The numbers are the CPU's, bit for bit."""

    weights: Weights
    device: Device

    @property
    def place(self) -> torch.device:
        """Where parameters are."""
        return self.device.place

    @cached_property
    def _put(self) -> Uploads:
        return Uploads(self.device)

    def packed(self, name: str) -> Packed | None:
        """A matrix as it is stored; None where the CPU has to dequantize it, or it is dense."""
        return packed(self.weights, name, self._put.array)

    def copy(self, name: str, target: torch.Tensor) -> None:
        """SourceError for NaN and infinity, in `copy_tensor`'s words."""
        found = self.packed(name)
        if found is None:
            copy_tensor(self.weights, name, target, self._put)
            return
        # A matrix may be a part of a parameter, whose rows do not lie side by side.
        out = torch.empty(found.shape, device=self.place)
        self.device.launch(found.dense(out))
        target.copy_(out)
        require_finite(self.weights, name, target)


def reading_onto(device: Device | None, weights: Weights) -> OnHost | OnDevice:
    """How a model's parameters come to a device; None is the CPU."""
    return OnHost(weights) if device is None else OnDevice(weights, device)
