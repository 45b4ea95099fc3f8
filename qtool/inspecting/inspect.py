"""What an artifact is, told from its headers and configs: format, schemes, sizes, provenance.

No tensor data is read. Text from a file is printed with its control characters escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.artifacts.artifact import Artifact
from qtool.artifacts.entry import Entry
from qtool.artifacts.stored_config import quantization_config
from qtool.artifacts.untold import said_untold
from qtool.errors import FormatError
from qtool.formats import gptq_zeros
from qtool.formats.safetensors_header import parse_json
from qtool.inspecting.tensor_detail import row_of
from qtool.messages.numbered import Parts, by_kind, numbers_at, parts_of, ranges
from qtool.messages.printable import in_json, printable, sayable
from qtool.record import calibrated_on, is_statistics, made_by, without_layers
from qtool.scheme import Scheme

_INPUTS = ("activations", "kv_cache")  # what a recipe does beside rounding weights


@dataclass(frozen=True)
class Inspection:
    """An opened artifact and its totals."""

    artifact: Artifact
    entries: tuple[Entry, ...]
    size_bytes: int  # of the weight files
    parameters: int  # numbers in the unquantized model
    tensor_bytes: int
    unquantized: int  # parameters left as they were

    @property
    def bits_per_weight(self) -> float:
        """Bits stored for each number of the model."""
        return 8 * self.tensor_bytes / self.parameters if self.parameters else 0.0

    @property
    def unquantized_share(self) -> float | None:
        """Share of the numbers that are stored dense; None where nothing tells how many there are
        in what is packed."""
        if said_untold(self.artifact) is not None:
            return None
        return self.unquantized / self.parameters if self.parameters else 0.0

    @property
    def is_statistics(self) -> bool:
        """Whether it holds what `qtool calibrate` measured of a model, and no model."""
        checkpoint = self.artifact.checkpoint
        return not checkpoint.config and is_statistics(checkpoint.metadata, checkpoint.tensors)

    @property
    def _provenance(self) -> Mapping[str, Any] | None:
        """The record of an artifact; of statistics what they say of themselves."""
        return _measured(self.artifact) if self.is_statistics else self.artifact.provenance

    def json(self) -> dict[str, Any]:
        """The --json object."""
        found = self.artifact.found
        damaged = self.artifact.unreadable
        return {
            "format": "statistics" if self.is_statistics else found.format,
            "quant_method": found.quant_method,
            "bits_per_weight": self.bits_per_weight,
            "size_bytes": self.size_bytes,
            "parameters": self.parameters,
            "unquantized_share": self.unquantized_share,
            "provenance": sayable(self._provenance),
            **({"provenance_unreadable": sayable(damaged)} if damaged else {}),
            "tensors": [row_of(entry) for entry in self.entries],
        }

    def summary(self) -> list[tuple[str, str]]:
        """The head of the report: labels and values."""
        found = self.artifact.found
        if self.is_statistics:
            said = [("format", "statistics of a model, for `qtool quantize --stats`")]
            return [*said, *self._size, *_recorded(self._provenance or {})]
        lines = [("format", found.label)]
        if found.scheme is not None:
            schemes = sorted({str(e.scheme) for e in self.entries if e.scheme is not None})
            lines.append(("scheme", ", ".join(schemes) or str(found.scheme)))
        if (zeros := gptq_zeros.said(found)) is not None:
            lines.append(("zeros", zeros))
        if (cache := cache_text(quantization_config(self.artifact.checkpoint))) is not None:
            lines.append(("KV cache", cache))
        if (rotated := rotations_text(quantization_config(self.artifact.checkpoint))) is not None:
            lines.append(("rotated as it runs", rotated))
        lines += self._size
        if (lost := said_untold(self.artifact)) is not None:
            lines.append(("not told", printable(lost)))
        if (share := self.unquantized_share) is not None:
            lines += [
                ("parameters", f"{self.parameters:,}"),
                ("bits per weight", f"{self.bits_per_weight:.3f}"),
                ("left unquantized", f"{100 * share:.1f} % of the weights"),
            ]
        if (wide := _wide(self.entries)) is not None:
            lines.append(("codes", wide))
        if self.artifact.unreadable:
            lines.append(("record of its making", _damaged(self.artifact)))
        return [*lines, *_recorded(self.artifact.provenance or {})]

    @property
    def _size(self) -> list[tuple[str, str]]:
        return [("size", f"{self.size_bytes / 1e6:.1f} MB")]

    def rows(self, every: bool) -> Iterator[tuple[str, str, str, str, str, str]]:
        """(name, shape, dtype, scheme, bits per weight, bytes), like tensors of all blocks in one
        row, of some under their numbers, or one row for each."""
        known = numbers_at(entry.name for entry in self.entries)
        groups: dict[tuple[Parts, tuple[int, ...], str, str], list[Entry]] = {}
        for entry in self.entries:
            parts = (entry.name,) if every else parts_of(entry.name)
            key = (parts, entry.shape, entry.dtype, scheme_text(entry))
            groups.setdefault(key, []).append(entry)
        for (parts, shape, dtype, scheme), members in groups.items():
            count = f" ({len(members)})" if len(members) > 1 else ""
            nbytes = sum(e.nbytes for e in members)
            numbers = sum(e.parameters for e in members)
            rate = f"{8 * nbytes / numbers:.3f}" if numbers else "-"
            yield (
                printable(ranges(parts, [e.name for e in members], known)) + count,
                "x".join(map(str, shape)) or "1",
                dtype,
                scheme,
                rate,
                f"{nbytes:,}",
            )


def _measured(artifact: Artifact) -> dict[str, Any]:
    """What a file of statistics says of how it was measured."""
    found: dict[str, Any] = {}
    for key in ("calibration", "model_digest", "gpu"):
        if (said := artifact.checkpoint.metadata.get(key)) is not None:
            found[key] = said
    with suppress(FormatError):  # whoever wrote it: as it stands
        found["calibration"] = parse_json(str(found.get("calibration", "")).encode(), "calibration")
    return found


def _damaged(artifact: Artifact) -> str:
    return f"cannot be read ({printable(artifact.unreadable)})"


def _wide(entries: Sequence[Entry]) -> str | None:
    """Codes of integers that are stored in more bits than they have."""
    found = [
        (entry, entry.scheme.bits)
        for entry in entries
        if isinstance(entry.scheme, Scheme)
        and not entry.scheme.is_float
        and entry.scheme.bits < 8
        and entry.nbytes >= entry.parameters
    ]
    if not found:
        return None
    bits = "/".join(map(str, sorted({bits for _, bits in found})))
    stored = sum(entry.nbytes for entry, _ in found) / sum(entry.parameters for entry, _ in found)
    return f"of {bits} bits in 8 each, {8 * stored:.3f} bits per weight with their scales"


def inspect(path: Path | str) -> Inspection:
    """Look at a folder or a safetensors file; raises what opening it raises."""
    artifact = Artifact.open(path)
    return inspection(artifact, sum(file.stat().st_size for file in artifact.checkpoint.files))


def inspection(artifact: Artifact, size_bytes: int) -> Inspection:
    """The same of an opened artifact whose weight files have `size_bytes`."""
    entries = tuple(artifact.entries.values())
    return Inspection(
        artifact,
        entries,
        size_bytes=size_bytes,
        parameters=sum(e.parameters for e in entries),
        tensor_bytes=sum(e.nbytes for e in entries),
        unquantized=sum(e.parameters for e in entries if e.scheme is None),
    )


def cache_text(config: Mapping[str, Any]) -> str | None:
    """How a config says that keys and values are kept, in a few words; None where they are not
    quantized."""
    scheme = config.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return None
    words = [f"{scheme.get('num_bits', 8)}-bit", scheme.get("type", "int"), "per",
             scheme.get("strategy", "tensor")]  # fmt: skip
    when = "dynamic" if scheme.get("dynamic") else "static"
    return f"{' '.join(printable(str(word))[:20] for word in words)}, {when}"


def rotations_text(config: Mapping[str, Any]) -> str | None:
    """What a config leaves to the engine to rotate, by the names it has there; None for nothing."""
    table = config.get("transform_config")
    groups = table.get("config_groups") if isinstance(table, Mapping) else None
    if not isinstance(groups, Mapping) or not groups:
        return None
    return ", ".join(printable(str(name))[:20] for name in [*groups][:8])


def scheme_text(entry: Entry) -> str:
    """The scheme in a word or two."""
    return "dense" if entry.scheme is None else str(entry.scheme)


def _recorded(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """How it was made, by its own record, of which --json has all."""
    shown = without_layers(record)
    recipe, notes = shown.pop("recipe", None), shown.pop("notes", None)
    text = calibrated_on(shown.get("calibration"))
    if (said := made_by(recipe)) is not None:
        yield "made by", printable(said)
        for key in _INPUTS:
            yield from _flat(f"recipe.{key}", recipe.get(key))
    else:
        yield from _flat("recipe", recipe)
    if text is not None:
        yield "calibrated on", printable(text[0])
        shown["calibration"] = text[1]
    yield from _flat("", shown)
    if isinstance(notes, list):
        yield from (("note", printable(note)) for note in by_kind(map(str, notes)))
    else:
        yield from _flat("notes", notes)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Provenance as label and value; the labels of nested objects are joined with dots."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, list):
        if value:
            yield printable(prefix), printable(", ".join(map(_said, value)))
    elif value not in (None, ""):
        yield printable(prefix), printable(_said(value))


def _said(value: Any) -> str:
    return value if isinstance(value, str) else in_json(value, 1 << 16)
