"""--fail-if of `qtool eval`: a figure, a comparison, a limit."""

import difflib
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qtool.errors import UsageError

FIGURES = frozenset({"perplexity", "tokens"})
OF_A_REFERENCE = frozenset({
    "reference_perplexity", "kld", "kld.mean", "kld.median", "kld.p99", "kld.max",
    "top1_agreement", "rms_dp", "acceptance",
    *(f"{name}.{drafts}" for name in ("tokens_per_pass", "speed_up") for drafts in (1, 2, 4, 8)),
})  # fmt: skip
_CALLED = {"ppl": "perplexity", "same_top": "top1_agreement"}  # by other programs, by `compare`
_CONDITION = re.compile(r"\s*([A-Za-z0-9_.]+)\s*(<=|>=|<|>)\s*([0-9.eE+-]+)\s*")
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """What --fail-if asks: a figure, a comparison, a limit."""

    text: str
    key: str
    sign: str
    limit: float

    def holds(self, found: Mapping[str, Any]) -> str | None:
        """The sentence to fail with, None where it does not hold."""
        value: Any = found
        for step in self.key.split("."):
            value = value.get(step) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping):
            value = value.get("mean")
        if not isinstance(value, int | float):
            return f"{self.key} was not measured"
        if not math.isfinite(value):  # no comparison would hold
            return f"{self.key} is {value}, not a finite number"
        if _COMPARE[self.sign](value, self.limit):
            return f"{self.key} is {value:.6g}, and --fail-if says {self.sign} {self.limit:g}"
        return None


def check_figure(condition: Condition, *, reference: bool) -> None:
    """UsageError where no evaluation, or none without a reference, has the figure."""
    if condition.key in FIGURES or (reference and condition.key in OF_A_REFERENCE):
        return
    known = ", ".join(sorted(FIGURES | OF_A_REFERENCE if reference else FIGURES))
    more = "" if reference else f"; with --against also {', '.join(sorted(OF_A_REFERENCE))}"
    if condition.key in OF_A_REFERENCE:
        near, more = "with --against it is known; ", ""
    else:
        near = _nearest(condition.key)
    raise UsageError(
        f"--fail-if {condition.text}: no figure {condition.key!r}; {near}known: {known}{more}"
    )


def _nearest(word: str) -> str:
    """The question after a misspelled figure; nothing where none is like it."""
    known = sorted(FIGURES | OF_A_REFERENCE)
    word = _CALLED.get(word.lower(), word.lower())
    held = [figure for figure in known if word in figure]
    near = held or difflib.get_close_matches(word, known, 1)
    return f"did you mean {near[0]}? " if near else ""


def parse_condition(text: str) -> Condition:
    """Such as kld>0.05, kld.p99>=1 or top1_agreement<0.9."""
    match = _CONDITION.fullmatch(text)
    try:
        if match is not None and math.isfinite(limit := float(match[3])):
            return Condition(text, match[1], match[2], limit)
    except ValueError:
        pass
    raise UsageError(
        f"--fail-if {text}: expected a figure, < <= > or >=, and a number, such as 'kld>0.05'"
    )
