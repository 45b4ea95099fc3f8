"""What the work on the tensors leaves behind beside the tensors: what was found out on the way."""

from dataclasses import dataclass, field
from typing import Any

from qtool.messages.summary import ExpertReport, LayerReport, OutlierReport, TunedReport


@dataclass(frozen=True)
class Outcome:
    """Reports by layer in the order of the work, sentences for the user, and what calibrated it."""

    layers: list[LayerReport]
    notes: list[str] = field(default_factory=list)
    calibration: dict[str, Any] | None = None  # digest, samples, length, seed, source kind
    experts: list[ExpertReport] = field(default_factory=list)
    outliers: list[OutlierReport] = field(default_factory=list)  # of LLM.int8()
    tuned: list[TunedReport] = field(default_factory=list)


def merged(notes: list[str]) -> list[str]:
    """Equal sentences once, with how often they came."""
    counts: dict[str, int] = {}
    for note in notes:
        counts[note] = counts.get(note, 0) + 1
    return [note if count == 1 else f"{note} ({count} times)" for note, count in counts.items()]
