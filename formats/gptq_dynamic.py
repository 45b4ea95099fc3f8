"""GPTQ's `dynamic`: a table from regular expressions to exceptions, by module name.

    "-:pattern": {}                                      left dense
    "+:pattern": {"bits": 8, "group_size": 64, ...}      another scheme

The first match counts; engines match from the start of the name. Written patterns are anchored
at both ends, match only the modules they are meant for, and cover numbered modules together: one
with a number in every place where all numbers are meant, and with alternatives elsewhere.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from qtool.errors import FormatError
from qtool.formats.facts import ArtifactScheme, Facts, group_size_of, whole, whole_experts
from qtool.formats.layer_names import fused_names, is_head
from qtool.formats.patterns import matches
from qtool.scheme import Scheme

_MARK = re.compile(r"^[-+]:")


def _template(name: str) -> tuple[str, tuple[str, ...]]:
    """A module name with its numbers taken out: ("model.layers.#.mlp", ("3",))."""
    parts = name.split(".")
    numbers = tuple(p for p in parts if p.isdecimal())
    return ".".join("#" if p.isdecimal() else p for p in parts), numbers


def _pattern(template: str, numbers: Iterable[str]) -> str:
    """An anchored regular expression; each number is an expression of its own."""
    expressions = iter(numbers)
    escaped = (next(expressions) if p == "#" else re.escape(p) for p in template.split("."))
    return r"\.".join(escaped)


def patterns_for(chosen: Iterable[str], everything: Iterable[str]) -> list[str]:
    """Anchored expressions that match `chosen` and nothing else of `everything`, few of them."""
    wanted: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    present: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for names, table in ((chosen, wanted), (everything, present)):
        for name in names:
            template, numbers = _template(name)
            table[template].add(numbers)
    found = []
    for template, tuples in wanted.items():
        chosen_at = [set(column) for column in zip(*tuples, strict=True)]
        present_at = [set(column) for column in zip(*present[template], strict=True)]
        covered = {
            t for t in present[template] if all(n in s for n, s in zip(t, chosen_at, strict=True))
        }
        if covered == tuples:
            pairs = zip(chosen_at, present_at, strict=True)
            found.append(_pattern(template, [_numbers(*pair) for pair in pairs]))
        else:
            found += [_pattern(template, t) for t in sorted(tuples, key=lambda t: [*map(int, t)])]
    return found


def _numbers(chosen: set[str], present: set[str]) -> str:
    """An expression for one number of a name."""
    if chosen == present:
        return r"\d+"
    ordered = sorted(chosen, key=int)
    return ordered[0] if len(ordered) == 1 else f"(?:{'|'.join(ordered)})"


def _with_fused(names: set[str], modules: Iterable[str]) -> set[str]:
    """Names, and for shards that are all there the name under which engines fuse them.

    `modules`: all there are, since the experts of a block are one layer only together.
    """
    return names | whole_experts(names, modules) | fused_names(names)


def dynamic(facts: Facts) -> dict[str, dict[str, Any]]:
    """GPTQModel's table of exceptions: `-:` for dense modules, `+:` for another scheme.

    The first match counts; these expressions are anchored and exclude each other. A dense head is
    left to `lm_head`.
    """
    modules = {*facts.quantized, *facts.dense}
    everything = _with_fused(modules, modules)
    table: dict[str, dict[str, Any]] = {}
    dense = {name for name in facts.dense if not is_head(name)}
    for pattern in patterns_for(sorted(_with_fused(dense, modules)), everything):
        table[f"-:^{pattern}$"] = {}
    by_scheme: dict[Scheme, set[str]] = defaultdict(set)
    for name, scheme in facts.overrides.items():
        by_scheme[scheme].add(name)
    for scheme, names in by_scheme.items():
        for pattern in patterns_for(sorted(_with_fused(names, modules)), everything):
            table[f"+:^{pattern}$"] = {
                "bits": scheme.bits,
                "group_size": scheme.group_size,
                "sym": scheme.symmetric,
            }
    return table


def negative(pattern: str) -> bool:
    """Whether a pattern leaves modules dense."""
    return pattern.startswith("-:")


def entry_for(table: Iterable[str], module: str) -> tuple[str | None, bool]:
    """The key of `dynamic` that means a module, the first whose expression matches from the start
    of its name; and whether that is known."""
    for key in table:
        found = matches(_MARK.sub("", key), module)
        if found is not False:
            return (key, True) if found else (None, False)
    return None, True


def overridden(module: str, found: ArtifactScheme) -> Scheme:
    """The scheme that the config gives a module: its default, or the first `dynamic` match.

    An expression that is not matched here is passed over: in the end shapes tell.
    """
    if found.scheme is None:
        raise FormatError(f"{module}: the config does not say how it is stored")
    table = dict(found.overrides)
    key = next((key for key in table if matches(_MARK.sub("", key), module)), None)
    if key is not None:
        keys = table[key]
        width = whole(keys.get("bits", found.scheme.bits), "bits", 2, 8)
        size = group_size_of(keys.get("group_size", found.scheme.group_size))
        symmetric = keys.get("sym", found.scheme.symmetric) is not False
        return Scheme(width, size, symmetric)
    return found.scheme
