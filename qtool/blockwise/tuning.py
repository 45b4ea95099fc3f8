"""A block's matrices until they are tuned, and then into the artifact."""

from dataclasses import dataclass, field
from typing import NamedTuple

from qtool.blockwise.originals import Originals
from qtool.messages.summary import TunedReport
from qtool.methods.tune import Grouped
from qtool.planned import Planned
from qtool.recipe.methods import TuneOptions
from qtool.runs.sink import Sink
from qtool.scheme import GroupQuant
from qtool.streaming.stream import LoadedBlock


class _Held(NamedTuple):
    planned: Planned
    quant: GroupQuant
    input_scale: float | None


@dataclass(frozen=True)
class Tuning:
    """Of all blocks of a run, one after another."""

    originals: Originals
    options: TuneOptions
    _held: dict[str, _Held] = field(default_factory=dict)

    def hold(self, planned: Planned, quant: GroupQuant, input_scale: float | None) -> None:
        """Instead of writing a matrix; from several threads for different ones."""
        self._held[planned.name] = _Held(planned, quant, input_scale)

    def finish(self, block: LoadedBlock, sink: Sink) -> list[TunedReport]:
        """Move the scales of what is held, and write it; a block without any is left alone."""
        held = {name: self._held[name] for name in sorted(self._held)}  # jobs end in any order
        self._held.clear()
        # Matrices that the model class has no place for are in no block.
        matrices = {n: Grouped(one.quant) for n, one in held.items() if n in block.weights}
        tuned = self.originals.tune(block, matrices, self.options) if matrices else None
        for name in list(held):
            planned, quant, input_scale = held.pop(name)
            if tuned is not None and name in tuned.matrices:
                quant = tuned.matrices[name].quant
            sink.quantized(planned, quant, input_scale)
        return [] if tuned is None else [TunedReport(block.index, tuned.before, tuned.after)]
