"""What a finished run says: one object, printed as a few lines or as JSON."""

import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qtool.messages.numbered import by_kind
from qtool.messages.remarks import told_apart

_SHOWN = 3  # names in a line
OUTPUTS, WEIGHTS = "outputs", "weights"  # what a relative error is of


@dataclass(frozen=True)
class LayerReport:
    """relative_error: of outputs, sqrt(tr(E H E') / tr(W H W')), where the inputs' Gram matrix H is
    known, of weights else, the Frobenius norm of E = W - Q over that of W. coarseness: see
    qtool.runs.layer_errors."""

    name: str
    scheme: str
    relative_error: float
    of: str  # OUTPUTS or WEIGHTS
    coarseness: float | None = None


@dataclass(frozen=True)
class ExpertReport:
    """Calibration tokens that each routed expert of one block saw, by expert."""

    name: str
    tokens: list[int]


@dataclass(frozen=True)
class TunedReport:
    """A block whose scales were tuned: squared error of its outputs, of each token relative to what
    it should be, mean over tokens."""

    block: int
    before: float
    after: float


@dataclass(frozen=True)
class OutlierReport:
    """Columns of one input in which some number reached LLM.int8()'s threshold in calibration."""

    name: str  # the first matrix that reads the input
    columns: list[int]
    largest: float  # |x| in any of its columns


@dataclass(frozen=True)
class Summary:
    """One finished `qtool quantize`."""

    artifact: str
    format: str
    recipe: str
    seconds: dict[str, float]
    peak_rss_bytes: int
    size_bytes: int
    bits_per_weight: float
    unquantized_share: float  # of the weights, those stored dense
    tensors: dict[str, int]  # quantized, dense, dropped
    layers: list[LayerReport]
    experts: list[ExpertReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # of the plan; what of the source is 0
    notes: list[str] = field(default_factory=list)  # found out on the way
    dropped: list[dict[str, str]] = field(default_factory=list)  # name and reason of each
    outliers: list[OutlierReport] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)  # what was planned: budget.Memory.json()

    def json(self) -> dict[str, Any]:
        """The --json object. What a plan only remarks is no warning."""
        said = told_apart(self.warnings)
        return asdict(self) | said | {"notes": [*said["notes"], *self.notes]}

    def lines(self) -> list[str]:
        """The same for a person."""
        lines = [
            f"{self.artifact}: {self.format}, {self.size_bytes / 1e6:.1f} MB, "
            f"{self.bits_per_weight:.3f} bits per weight",
            f"tensors: {self.tensors['quantized']} quantized, {self.tensors['dense']} dense, "
            f"{self.tensors['dropped']} dropped; {self.unquantized_share:.1%} of the weights left "
            "unquantized",
        ]
        lines += _errors(self.layers)
        lines += not_written((item["name"], item["reason"]) for item in self.dropped)
        lines += [f"note: {note}" for note in by_kind(self.notes)]
        lines.append(
            f"{self.seconds['total']:.1f} s, peak memory {self.peak_rss_bytes / 2**20:.0f} MiB"
        )
        return lines


def summary_of(made: Mapping[str, Any]) -> Summary:
    """The inverse of asdict()."""
    kinds = {"layers": LayerReport, "experts": ExpertReport, "outliers": OutlierReport}
    reports = {name: [kind(**one) for one in made[name]] for name, kind in kinds.items()}
    return Summary(**{**made, **reports})


def _errors(layers: Sequence[LayerReport]) -> list[str]:
    """The median and the worst of outputs, and of the layers of which only weights are known."""
    lines = []
    for of in (OUTPUTS, WEIGHTS):
        errors = sorted((one.relative_error, one.name) for one in layers if one.of == of)
        if errors:
            number = "" if len(errors) == len(layers) else f", {len(errors)} of the layers"
            (middle, _), (largest, name) = errors[len(errors) // 2], errors[-1]
            lines.append(
                f"relative error of {of}{number}: median {middle:.4f}, worst {largest:.4f} ({name})"
            )
    return lines


def of_cache(scales: int, layers: int) -> list[str]:
    """What a recipe for the KV cache made, which no count of tensors and no size shows."""
    if not scales:
        return []
    return [f"{scales} scales of keys and values, of {layers} layers, were measured and written"]


def of_text(own: bool) -> list[str]:
    """Where nobody chose the calibration text."""
    if own:
        return []
    return [
        "calibrated on Python's own documentation, which is good for trying only; --calibration "
        "FILE takes a text like yours, or one that `qtool sample` lets the model write"
    ]


def not_written(dropped: Iterable[tuple[str, str]]) -> list[str]:
    """Tensors of the source that are not in the artifact, a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in dropped:
        by_reason.setdefault(reason, []).append(name)
    return [
        f"not written: {', '.join(names[:_SHOWN])}"
        + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        + f" ({reason})"
        for reason, names in by_reason.items()
    ]


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far, in bytes."""
    # Linux's getrusage counts that of the process that this one was started by, too.
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
