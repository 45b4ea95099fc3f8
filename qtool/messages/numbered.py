"""Rows of tensors that differ in their numbers alone: layers.{0-3,7}.mlp.up_proj.weight."""

import re
from collections.abc import Iterable, Mapping, Set

_NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.)")  # no model has longer ones; int() has a limit, too

_IN_NAME = re.compile(r"(?<=[A-Za-z_]\.)\d{1,9}(?=\.[A-Za-z_])")  # and not in 2.13.0

Parts = tuple[str, ...]  # of a name, what stands around its numbers


def parts_of(name: str) -> Parts:
    """What stands around the numbers between dots; alike for like tensors of all blocks."""
    return tuple(_NUMBER.split(name))


def numbers_at(names: Iterable[str]) -> dict[Parts, set[int]]:
    """For each place of a number, named by the parts before it, all that is found there."""
    found: dict[Parts, set[int]] = {}
    for name in names:
        parts = parts_of(name)
        for place, number in enumerate(_NUMBER.findall(name), 1):
            found.setdefault(parts[:place], set()).add(int(number))
    return found


def by_kind(notes: Iterable[str]) -> list[str]:
    """Notes that differ only by numbers in names of tensors as one, with how many layers it is
    of, or how often it is said, where it is of several in a layer."""
    kinds: dict[str, list[str]] = {}
    for note in notes:
        kinds.setdefault(_IN_NAME.sub("*", note), []).append(note)
    said = []
    for kind, same in kinds.items():
        layers = {found[0] for note in same if (found := _IN_NAME.findall(note))}
        each = "layers" if len(layers) == len(same) else "times"
        said.append(same[0] if len(same) == 1 else f"{kind} ({len(same)} {each})")
    return said


def ranges(
    parts: Parts, names: Iterable[str], known: Mapping[Parts, Set[int]] | None = None
) -> str:
    """The parts with the numbers of `names`, which are all of these parts: layers.{0-29}.mlp.

    known: of `numbers_at`; a star stays for all the numbers that are known in a place.
    """
    text = parts[0]
    columns = zip(*(_NUMBER.findall(name) for name in names), strict=True)
    for place, (part, column) in enumerate(zip(parts[1:], columns, strict=False), 1):
        numbers = {int(number) for number in column}
        every = known is not None and len(numbers) > 1 and numbers == known[parts[:place]]
        text += ("*" if every else _runs(numbers)) + part
    return text


def _runs(numbers: Set[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    shown = ",".join("-".join(map(str, run)) for run in runs)
    return shown if shown.isdecimal() else f"{{{shown}}}"
