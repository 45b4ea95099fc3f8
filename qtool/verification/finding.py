"""What verifying finds: findings, the error of each layer, and the verdict that holds both."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from qtool.errors import FormatError, QtoolError, SettingError
from qtool.messages.sentences import count

_BY_DIGEST = {"digests", "statement"}  # checks that compare bytes
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class About:
    """The things that a finding speaks of, by which another one of the same things is known."""

    settings: frozenset[str] = frozenset()  # of config.json, with the keys around those inside
    listed: frozenset[str] = frozenset()  # layers that a list leaves unquantized, or does not


@dataclass(frozen=True)
class Finding:
    """One thing that a check has to say."""

    severity: Severity  # an error makes the artifact fail
    check: str  # which check: a stable id such as "zero-convention"
    name: str  # of the tensor, module or file; "" where it is the whole artifact
    message: str  # one sentence: what was found, what was expected, what to do
    about: About = field(default=About(), compare=False, repr=False)

    def json(self) -> dict[str, str]:
        """For machines: the sentence, and where it lies."""
        return {key: value for key, value in asdict(self).items() if key != "about"}


@dataclass(frozen=True)
class LayerError:
    """How far one quantized matrix is from its source."""

    name: str
    scheme: str
    relative_error: float  # |W - Q| / |W|, Frobenius norms
    expected: float | None  # what the scheme alone explains; None where nothing tells

    def json(self) -> dict[str, Any]:
        """For machines; JSON knows no NaN and no infinity."""
        found = asdict(self)
        for key in ("relative_error", "expected"):
            if found[key] is not None and not isfinite(found[key]):
                found[key] = None
        return found


@dataclass(frozen=True)
class Verdict:
    """All that was found in one artifact."""

    path: str
    format: str
    engine: str | None
    tp: int
    findings: tuple[Finding, ...]
    layers: tuple[LayerError, ...]  # empty without a model to compare with
    checks: tuple[str, ...]  # the ids of all checks that ran
    unquantized_share: float | None  # of the parameters; None where some are packed in no known way

    @property
    def ok(self) -> bool:
        """Whether nothing found is an error."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What keeps it from being surely what somebody made, beside errors: for `--strict`."""
        warnings = sum(finding.severity == "warning" for finding in self.findings)
        doubts = [count(warnings, "warning")] if warnings else []
        if _BY_DIGEST.isdisjoint(self.checks):
            doubts.append("bytes that no digest vouches for")
        return tuple(doubts)

    def json(self) -> dict[str, Any]:
        """For machines: qtool/schemas/verify.json."""
        return {
            "path": self.path,
            "format": self.format,
            "engine": self.engine,
            "tp": self.tp,
            "ok": self.ok,
            "doubts": list(self.doubts),
            "unquantized_share": self.unquantized_share,
            "checks": list(self.checks),
            "findings": [finding.json() for finding in self.findings],
            "layers": [layer.json() for layer in self.layers],
        }


def raise_first(path: Path, findings: Iterable[Finding]) -> None:
    """FormatError with the first error among the findings, of what is at `path`."""
    for finding in findings:
        if finding.severity == "error":
            raise FormatError(
                f"{path}: what was written does not pass `qtool verify` ({finding.check}): "
                f"{finding.message}"
            )


def said_by(name: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings of a check; what it cannot make sense of is one more."""
    try:
        yield from findings
    except QtoolError as problem:
        yield of_error(name, "", problem)


def of_error(check: str, name: str, problem: QtoolError) -> Finding:
    """The finding that a check cannot make sense of something."""
    setting = problem.setting if isinstance(problem, SettingError) else None
    about = About() if setting is None else of_setting(setting)
    return Finding("error", check, name, str(problem), about)


def of_setting(*keys: str) -> About:
    """About settings alone."""
    return About(settings=frozenset(keys))


def of_listed(modules: Iterable[str]) -> About:
    """About layers alone, and what a list says of them."""
    return About(listed=frozenset(modules))
