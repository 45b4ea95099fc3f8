"""Figures of quality: measured now, or read from what `qtool eval` and `qtool compare` said."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qtool.errors import FormatError, SourceError
from qtool.formats.safetensors_header import read_json
from qtool.quality.pareto import unbeaten
from qtool.report.facts import ArtifactFacts, Quality, Sweep
from qtool.report.origin import leaves


def read_figures(files: Sequence[Path], labels: Mapping[str, str]) -> list[Quality]:
    """Rows of files that --json wrote; labels: of the report's artifacts, by path."""
    rows = []
    for file in files:
        if not file.is_file():
            raise SourceError(f"{file}: no such file; expected what `qtool eval --json` wrote")
        content = read_json(file)
        listed = content.get("artifacts", [content])
        if not isinstance(listed, list) or not listed:
            raise FormatError(
                f"{file}: `artifacts` is no list; expected what `qtool compare --json` wrote"
            )
        for row in listed:
            rows.append(_row(file, row, labels))
    return rows


def _row(file: Path, row: Any, labels: Mapping[str, str]) -> Quality:
    if not isinstance(row, dict) or not isinstance(row.get("artifact"), str):
        raise FormatError(
            f"{file}: names no artifact; expected what `qtool eval --json` or `qtool compare "
            "--json` wrote"
        )
    try:
        return quality_of(row["artifact"], row, labels)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{file}: a figure of {row['artifact']} is missing or no number ({error}); expected "
            "what `qtool eval --json` wrote"
        ) from None


def quality_of(artifact: str, row: Mapping[str, Any], labels: Mapping[str, str]) -> Quality:
    """One row from the object of `qtool eval --json`; KeyError, TypeError or ValueError."""
    kld, protocol = row.get("kld"), row["protocol"]
    against = None if kld is None else dict(kld)
    return Quality(
        artifact=labels.get(artifact, _matching(artifact, labels)),
        size_bytes=_count(row["size_bytes"]),
        perplexity=_real(row["perplexity"]),
        perplexity_interval=_interval(row.get("perplexity_interval")),
        reference_perplexity=_optional(row, "reference_perplexity"),
        kld=_optional(against, "mean"),
        kld_interval=_interval((against or {}).get("interval")),
        kld_median=_optional(against, "median"),
        kld_p99=_optional(against, "p99"),
        kld_max=_optional(against, "max"),
        top1_agreement=_optional(row, "top1_agreement"),
        rms_dp=_optional(row, "rms_dp"),
        acceptance=_optional(row, "acceptance"),
        tokens=_count(row["tokens"]),
        protocol=str(protocol["name"]),
        text=str(protocol["text"]),
        windows=_count(protocol["windows"]),
        length=_count(protocol["length"]),
        front=False,
    )


def _matching(artifact: str, labels: Mapping[str, str]) -> str:
    """The label of the same last part of a path; else that part."""
    last = artifact.rstrip("/").rsplit("/", 1)[-1]
    found = [label for path, label in labels.items() if path.rstrip("/").rsplit("/", 1)[-1] == last]
    return found[0] if len(found) == 1 else last


def of_these(rows: Sequence[Quality], sizes: Mapping[str, int]) -> tuple[list[Quality], list[str]]:
    """The rows, with sentences on those that were measured on none of the report's artifacts: they
    bear no such label, or the size of that in `sizes` differs. They stand by themselves."""
    found, said = [], []
    for row in rows:
        here = sizes.get(row.artifact)
        if here not in (None, row.size_bytes):
            said.append(
                f"The figures of {row.artifact} are of another artifact of that name: it had "
                f"{row.size_bytes:,} bytes, and the one here has {here:,}."
            )
            row = replace(row, artifact=f"{row.artifact} ({row.size_bytes:,} bytes)")
        found.append(row)
    apart = [row.artifact for row in rows if row.artifact not in sizes]
    if apart:
        names = ", ".join(dict.fromkeys(apart))
        said.append(f"Figures of {names} are of no artifact that this page is about.")
    return found, said


def _real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} is no finite number")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is no count")
    return value


def _optional(row: Mapping[str, Any] | None, key: str) -> float | None:
    found = None if row is None else row.get(key)
    return None if found is None else _real(found)


def _interval(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    low, high = value
    return _real(low), _real(high)


def with_front(rows: Sequence[Quality]) -> tuple[Quality, ...]:
    """The rows, each marked where nothing measured alike is both smaller and nearer."""

    def best(one: Quality) -> bool:
        alike = [row for row in rows if row.kld is not None and row.measured == one.measured]
        found = unbeaten([(row.size_bytes, row.kld or 0.0) for row in alike])
        return any(row is one and good for row, good in zip(alike, found, strict=True))

    return tuple(replace(one, front=best(one)) for one in rows)


def find_sweep(artifacts: Sequence[ArtifactFacts], rows: Sequence[Quality]) -> Sweep | None:
    """Three artifacts or more whose recipes differ in one number, each with its divergence."""
    divergence = {row.artifact: row.kld for row in rows if row.kld is not None}
    if len({row.measured for row in rows if row.kld is not None}) > 1:
        return None
    found = [
        (dict(leaves(one.recipe)), divergence[one.label], one.label)
        for one in artifacts
        if one.recipe is not None and one.label in divergence
    ]
    keys = {key for recipe, _, _ in found for key in recipe} - {"name"}
    varied = [
        key for key in sorted(keys)
        if len({str(recipe.get(key)) for recipe, _, _ in found}) > 1
    ]  # fmt: skip
    if len(found) < 3 or len(varied) != 1:
        return None
    key = varied[0]
    points = []
    for recipe, kld, label in found:
        value = recipe.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        points.append((float(value), kld, label))
    return Sweep(key, tuple(sorted(points)))
