"""The rows of `qtool plan`'s table: tensors that differ only in their numbers share one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from qtool.plan import Plan
from qtool.planned import Planned
from qtool.scheme import Dropped

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Row:
    """One line: `count` tensors, `nbytes` written for all of them."""

    name: str
    shape: str
    stored: str
    count: int
    nbytes: int


def rows(plan: Plan, every: bool = False) -> Iterator[Row]:
    """A row for each group of like tensors in order of first appearance, or for every tensor."""
    groups: dict[tuple[str, tuple[int, ...], str], list[Planned]] = {}
    for tensor in plan.tensors:
        pattern = tensor.name if every else _NUMBER.sub("*", tensor.name)
        groups.setdefault((pattern, tensor.shape, _stored(tensor)), []).append(tensor)
    for (pattern, shape, stored), members in groups.items():
        yield Row(
            pattern if every else _ranges(pattern, members),
            "x".join(map(str, shape)) or "1",
            stored,
            len(members),
            sum(tensor.nbytes for tensor in members),
        )


def _stored(tensor: Planned) -> str:
    if tensor.scheme is not None:
        return str(tensor.scheme)
    verb = "dropped" if isinstance(tensor.action, Dropped) else "dense"
    return f"{verb}: {tensor.reason}"


def _ranges(pattern: str, members: list[Planned]) -> str:
    """The pattern with each star replaced by the numbers found there: layers.{0-29}.mlp."""
    columns = zip(*(_NUMBER.findall(tensor.name) for tensor in members), strict=True)
    parts = pattern.split("*")
    text = parts[0]
    for column, part in zip(columns, parts[1:], strict=True):
        numbers = sorted({int(number) for number in column})
        runs: list[list[int]] = []
        for number in numbers:
            if runs and number == runs[-1][-1] + 1:
                runs[-1][1:] = [number]
            else:
                runs.append([number])
        shown = ",".join("-".join(map(str, run)) for run in runs)
        text += (shown if shown.isdecimal() else f"{{{shown}}}") + part
    return text
