"""What `qtool diff` prints: a head, then metadata and tensors, the worst first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from qtool.diff.diff import ABSENT, Diff, TensorDifference
from qtool.diff.sides import CheckpointSide, Item
from qtool.messages.printable import in_json, printable
from qtool.messages.sentences import count, verb
from qtool.messages.table import Table

MOST = 30  # rows of a table unless all are asked for
_SAID = {
    "only-a": "only in A",
    "only-b": "only in B",
    "shape": "of another shape",
    "undecoded": "with other bytes, which this version cannot decode",
    "values": "with other numbers",
    "storage": "with the same numbers, stored otherwise",
}


def summary(found: Diff) -> list[tuple[str, str]]:
    """The head of the report."""
    lines = []
    for label, side in (("A", found.a), ("B", found.b)):
        size = sum(item.nbytes for item in side.items.values())
        text = (
            f"{side.path}: {side.format}, {count(len(side.items), 'tensor')}, {size / 1e6:.1f} MB"
        )
        if isinstance(side, CheckpointSide) and side.inside:
            text += "; its decoder is named as it would be alone"
        lines.append((label, printable(text)))
    are = verb(found.same, "are", "is")
    if not found.different:
        return [*lines, ("result", f"no difference: {count(found.same, 'tensor')} {are} the same")]
    lines.append(("the same", count(found.same, "tensor")))
    lines += [
        (_SAID[kind], count(number, "tensor")) for kind, number in found.counts().items() if number
    ]
    if number := len(found.metadata):
        lines.append(("metadata", f"{count(number, 'key')} {verb(number, 'differ', 'differs')}"))
    return lines


def tables(found: Diff, every: bool) -> list[Table]:
    """Tensors, then metadata; where not every row is asked for, none that says nothing new."""
    most = None if every else MOST
    chosen = [one for one in found.tensors if every or not _told(one)]
    tensors = [_row(one) for one in chosen[:most]]
    rows = found.metadata if every else _by_file(found)
    metadata = [(printable(key), _short(a), _short(b)) for key, a, b in rows[:most]]
    tables = []
    if tensors:
        titles = ("tensor", "A", "B", "difference", "relative", "max", "differing")
        tables.append(Table(titles, tensors, 4))
    if metadata:
        tables.append(Table(("metadata", "A", "B"), metadata, 3))
    return tables


def left_out(found: Diff) -> Iterator[str]:
    """What the tables leave out."""
    told = sum(map(_told, found.tensors))
    for what, there in (("tensor", len(found.tensors) - told), ("key", len(_by_file(found)))):
        if there > MOST:
            yield f"{count(there - MOST, f'more {what}')}; --all lists them"
    if told:
        yield "tensors that are only stored otherwise have no row here; --all lists them"


def _by_file(found: Diff) -> tuple[tuple[str, Any, Any], ...]:
    """The metadata that differ, a file that one side has and the other has not as one row."""
    rows: dict[str, tuple[str, Any, Any]] = {}
    counts = Counter(_file(key) for key, _, _ in found.metadata)
    there = [{_file(key) for key in side.metadata} for side in (found.a, found.b)]
    for key, a, b in found.metadata:
        file = _file(key)
        if file is not None and not all(file in side for side in there):
            mine, theirs = (f"{counts[file]:,} keys" if file in side else ABSENT for side in there)
            rows.setdefault(file, (file, mine, theirs))
        else:
            rows[key] = key, a, b
    return tuple(rows.values())


def _file(key: str) -> str | None:
    """`qtool.json` of `qtool.json.recipe.name`."""
    name, end, _ = key.partition(".json.")
    return name + ".json" if end else None


def _told(one: TensorDifference) -> bool:
    """Whether a row would say no more than the count of its kind does."""
    return one.kind == "storage" and not one.differing_codes


def _row(one: TensorDifference) -> tuple[str, ...]:
    numbers = one.numbers
    relative = most = differing = "-"
    if numbers is not None and numbers.differing:
        relative = "-" if numbers.relative is None else f"{numbers.relative:.3g}"
        most = "not finite" if numbers.most is None else f"{numbers.most:.3g}"
        differing = _share(numbers.differing, numbers.count, "values")
    if one.differing_codes is not None and numbers is not None:
        differing = _share(one.differing_codes, numbers.count, "codes")
    return (printable(one.name), _said(one.a), _said(one.b), one.kind, relative, most, differing)


def _share(part: int, whole: int, what: str) -> str:
    return f"{part:,} {what if part > 1 else what[:-1]} ({100 * part / max(1, whole):.2f} %)"


def _said(item: Item | None) -> str:
    if item is None:
        return "-"
    return f"{item.scheme or item.dtype} {'x'.join(map(str, item.shape)) or '1'}"


def _short(value: Any, most: int = 48) -> str:
    text = printable(
        str(value) if isinstance(value, str) or value is ABSENT else in_json(value, 1 << 16)
    )
    return text if len(text) <= most else f"{text[:most]}..."
