"""What is swept, in the workspace: blocks of a GGUF file, a file for each decoder block and one for
the head; the journal has their checksums."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.gguf.pieces import matrices_of
from qtool.gguf.planned import PlannedTensor
from qtool.native.sums import checksum
from qtool.quantizing.gguf.gptq.swept_site import Made, steps_of

OUTSIDE = -1  # the head's place among the blocks, as layer_of() has it


@dataclass
class SweptFiles:
    """Those of a run."""

    folder: Path  # of the workspace
    tensors: Mapping[int, Sequence[PlannedTensor]]  # to be swept, by decoder block, or OUTSIDE
    places: dict[str, tuple[int, int]] = field(default_factory=dict)  # block and byte, by name

    def path(self, index: int) -> Path:
        """The file of a block."""
        return self.folder / f"swept-{'head' if index == OUTSIDE else index}"

    def entry(self, index: int, made: Sequence[Made], notes: Sequence[str]) -> dict[str, Any]:
        """What the journal has of a block, or of the head."""
        tensors: dict[str, dict[str, Any]] = {}
        for one in sorted(made, key=lambda one: (one.name, one.matrix)):
            start = self.places[one.name][1]
            empty = {"start": start, "sums": [], "swept": 0, "signal": 0.0, "noise": 0.0}
            known = tensors.setdefault(one.name, empty)
            known["sums"].append(one.sums)
            known["swept"] += one.swept
            known["signal"] += one.signal
            known["noise"] += one.noise
        left = [t.name for t in self.tensors.get(index, ()) if t.name not in tensors]
        return {"tensors": tensors, "left": left, "notes": [*notes]}

    def is_whole(self, index: int, kept: Any) -> bool:
        """Whether a block's file is what the journal says of it, whose places are then known."""
        known = {tensor.name: tensor for tensor in self.tensors.get(index, ())}
        try:
            good = sorted([*kept["tensors"], *kept["left"]]) == sorted(known)
            good = good and all(isinstance(note, str) for note in kept["notes"])
            losses = kept.get("tuned", [0.0, 0.0])
            good = good and [type(loss) for loss in losses] == [float, float]
            for name, entry in kept["tensors"].items() if good else ():
                float(entry["signal"]), float(entry["noise"]), int(entry["swept"])
                self.places[name] = index, int(entry["start"])
                good = good and entry["sums"] == self.sums(known[name])
        except (AttributeError, KeyError, OSError, TypeError, ValueError):
            return False
        return good

    def sums(self, tensor: PlannedTensor) -> list[list[int]]:
        """The checksums of a tensor's blocks, as the file has them."""
        matrices, rows = matrices_of(tensor)
        return [
            [
                checksum(self.read(tensor, matrix * rows + first, matrix * rows + last))
                for first, last in steps_of(tensor)
            ]
            for matrix in range(matrices)
        ]

    def rows(self, tensor: PlannedTensor, first: int, last: int) -> NDArray[np.uint8] | None:
        """Blocks of some rows, uint8 [last - first, bytes of a row]; None of what is not here."""
        return self.read(tensor, first, last) if tensor.name in self.places else None

    def read(self, tensor: PlannedTensor, first: int, last: int) -> NDArray[np.uint8]:
        """The same of what is here; OSError where the file ends early."""
        index, start = self.places[tensor.name]
        row_bytes = tensor.type.row_bytes(tensor.source.in_features)
        count = (last - first) * row_bytes
        found = np.fromfile(self.path(index), np.uint8, count, offset=start + first * row_bytes)
        if found.size != count:
            raise OSError(f"{self.path(index)} ends early")
        return found.reshape(last - first, row_bytes)
