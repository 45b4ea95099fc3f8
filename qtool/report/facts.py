"""What a report says, as numbers and words: the object behind the page, and its --json."""

from dataclasses import asdict, dataclass
from typing import Any

from qtool.verification.finding import Finding, LayerError


@dataclass(frozen=True)
class Storage:
    """All tensors that are stored in one way."""

    scheme: str  # "w4 g128 asym", "Q4_K", "dense F16"
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True)
class Component:
    """One part of the model: embedding, attention, mlp, experts, norms, head, other."""

    name: str
    parameters: int
    nbytes: int


@dataclass(frozen=True)
class Codes:
    """How often each code occurs in a sample of the matrices of one kind."""

    kind: str  # "q", "experts down", ...
    scheme: str
    sampled: int  # matrices looked at
    matrices: int  # that there are
    counts: tuple[int, ...]  # from the lowest code to the highest
    first: int  # the lowest code
    book: str  # "int", or the small floats whose bits are counted: e2m1, e4m3, e5m2

    @property
    def total(self) -> int:
        """Codes that were counted."""
        return sum(self.counts)


@dataclass(frozen=True)
class Scales:
    """The scales of the same sample."""

    kind: str
    scheme: str
    count: int
    low: float  # of the finite ones, as magnitudes
    median: float
    high: float
    broken: int  # zero or not finite


@dataclass(frozen=True)
class Loading:
    """How one engine loads the artifact, or why it does not."""

    engine: str
    command: str
    reasons: tuple[str, ...]  # why it refuses; empty where it loads
    remarks: tuple[str, ...]  # what else there is to know


@dataclass(frozen=True)
class ArtifactFacts:
    """One artifact."""

    path: str  # as typed
    label: str  # the last part of it; unique in a report
    format: str
    size_bytes: int
    parameters: int
    bits_per_weight: float
    unquantized_share: float
    storage: tuple[Storage, ...]
    components: tuple[Component, ...]
    provenance: tuple[tuple[str, str], ...]
    origin: str  # a sentence: who made it, or that nothing in it says so
    layers: tuple[LayerError, ...]
    layers_from: str  # a sentence: where the errors come from, or why there are none
    codes: tuple[Codes, ...]
    scales: tuple[Scales, ...]
    not_sampled: tuple[str, ...]  # sentences: what has no histogram and why
    loading: tuple[Loading, ...]
    findings: tuple[Finding, ...]
    checks: tuple[str, ...]
    recipe: dict[str, Any] | None
    commands: tuple[str, ...]  # that make it again

    @property
    def ok(self) -> bool:
        """Whether verifying found no error."""
        return not any(finding.severity == "error" for finding in self.findings)


@dataclass(frozen=True)
class Quality:
    """One artifact measured on a text; None for what was not measured."""

    artifact: str  # the label of an artifact of the report, or the name in a file of figures
    size_bytes: int
    perplexity: float
    perplexity_interval: tuple[float, float] | None
    reference_perplexity: float | None
    kld: float | None
    kld_interval: tuple[float, float] | None
    kld_median: float | None
    kld_p99: float | None
    kld_max: float | None
    top1_agreement: float | None
    rms_dp: float | None
    acceptance: float | None
    tokens: int
    protocol: str  # "plain"
    text: str  # the name of the text
    windows: int
    length: int
    front: bool  # nothing measured in the same way is both smaller and nearer

    @property
    def measured(self) -> tuple[str, str, int, int]:
        """Rows that agree in this can be compared."""
        return self.protocol, self.text, self.windows, self.length


@dataclass(frozen=True)
class Sweep:
    """Artifacts that differ in one number of their recipes."""

    key: str  # "smooth.alpha"
    points: tuple[tuple[float, float, str], ...]  # the number, KL divergence, the artifact


@dataclass(frozen=True)
class Reference:
    """The model that all are compared with."""

    path: str
    size_bytes: int
    parameters: int
    components: tuple[Component, ...]


@dataclass(frozen=True)
class Report:
    """The whole page."""

    qtool_version: str
    reference: Reference | None
    artifacts: tuple[ArtifactFacts, ...]
    quality: tuple[Quality, ...]
    quality_from: str  # a sentence
    sweep: Sweep | None
    commands: tuple[str, ...]  # that make the page again

    def json(self) -> dict[str, Any]:
        """The --json object: qtool/schemas/report.json."""
        found = asdict(self)
        for row, artifact in zip(found["artifacts"], self.artifacts, strict=True):
            row["ok"] = artifact.ok
            row["findings"] = [finding.json() for finding in artifact.findings]
        return found
