"""Parameters onto a device: quantized matrices go there as they are stored, and become float32
there."""

from dataclasses import dataclass

import torch

from qtool.calibrating.device import Device
from qtool.calibrating.reading import copy_tensor, require_finite
from qtool.calibrating.weights import Weights
from qtool.cuda.packed import packed


@dataclass(frozen=True)
class OnDevice:
    """See qtool.calibrating.reading.Reading. The numbers are the CPU's, bit for bit."""

    weights: Weights
    device: Device

    @property
    def place(self) -> torch.device:
        """Where parameters are."""
        return self.device.place

    def copy(self, name: str, target: torch.Tensor) -> None:
        """SourceError for NaN and infinity, in `copy_tensor`'s words."""
        found = packed(self.weights, name, self.device)
        if found is None:
            copy_tensor(self.weights, name, target)
            return
        # A matrix may be a part of a parameter, whose rows do not lie side by side.
        out = torch.empty(found.shape, device=self.place)
        self.device.launch(found.dense(out))
        target.copy_(out)
        require_finite(self.weights, name, target)
