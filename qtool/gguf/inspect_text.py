"""What `qtool inspect` prints of a GGUF file: a head of labels and values, then tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from qtool.formats.gguf_header import TensorInfo
from qtool.formats.gguf_values import Kind, Value
from qtool.gguf.inspect import GgufInspection, plain
from qtool.inspecting.histogram import scale_lines
from qtool.messages.numbered import Parts, numbers_at, parts_of, ranges
from qtool.messages.printable import printable
from qtool.messages.table import Table
from qtool.record import CALIBRATION, calibrated_on, made_by

# What follows "<architecture>." in keys, and how a summary says it.
_FACTS = (
    ("block_count", "{} layers"), ("embedding_length", "hidden {}"),
    ("feed_forward_length", "feed-forward {}"), ("attention.head_count", "{} heads"),
    ("attention.head_count_kv", "{} of keys"), ("expert_count", "{} experts"),
    ("expert_used_count", "{} used"), ("context_length", "context {}"),
)  # fmt: skip


_LONGEST = 1 << 18  # characters that are looked at: no recipe or calibration of ours has more


def summary(found: GgufInspection) -> list[tuple[str, str]]:
    """The head of the report: labels and values."""
    file = found.file
    parts = f", {len(file.files)} parts" if len(file.files) > 1 else ""
    lines: list[tuple[str, str | None]] = [
        ("format", f"GGUF {file.version}{parts}"),
        ("kind", None if found.kind == "model" else found.kind),
        ("architecture", found.text("general.architecture")),
        ("name", found.text("general.name")),
        ("file type", found.file_type),
        ("size", f"{file.size_bytes / 1e6:.1f} MB"),
    ]
    lines += _importance_lines(found) if found.kind == "imatrix" else _model_lines(found)
    lines.append(("made by", _made_by(found)))
    provenance = found.keys_under("qtool.")
    if (text := calibrated_on(_json(found, CALIBRATION))) is not None:
        lines.append(("calibrated on", text[0]))
        for key, value in text[1].items():
            said = value if isinstance(value, str) else json.dumps(value)
            provenance[f"calibration.{key}"] = said
        del provenance["calibration"]
    lines += [(f"qtool.{key}", _short(value)) for key, value in provenance.items()]
    return [(printable(label), printable(_short(value, 200))) for label, value in lines if value]


def _made_by(found: GgufInspection) -> str | None:
    """The recipe's name, and what it does to weights in order."""
    return made_by(_json(found, "qtool.recipe"))


def _json(found: GgufInspection, key: str) -> object:
    """What a key of ours says; None where it cannot be read."""
    text = found.text(key) or ""
    try:
        return json.loads(text) if len(text) <= _LONGEST else None
    except (ValueError, RecursionError):
        return None


def _model_lines(found: GgufInspection) -> Iterator[tuple[str, str | None]]:
    yield "parameters", f"{found.parameters:,}"
    yield "bits per weight", f"{found.bits_per_weight:.3f}"
    yield "left unquantized", f"{100 * found.unquantized_share:.1f} % of the weights"
    under = f"{found.text('general.architecture')}."
    facts = ((words, found.integer(under + key)) for key, words in _FACTS)
    yield "shape", ", ".join(words.format(count) for words, count in facts if count is not None)
    names = found.file.tensors
    if "token_embd.weight" in names and "output.weight" not in names:
        yield "head", "no output.weight; a decoder then uses token_embd.weight"
    if (tokenizer := found.tokenizer) is not None:
        pre = f" ({tokenizer['pre']})" if tokenizer["pre"] else ""
        merges = f", {tokenizer['merges']:,} merges" if tokenizer["merges"] else ""
        yield (
            "tokenizer",
            f"{tokenizer['model']}{pre}, {tokenizer['tokens'] or 0:,} tokens{merges}",
        )
        yield (
            "special tokens",
            ", ".join(
                f"{name} {one['id']} {one['token'] or ''}".rstrip()
                for name, one in tokenizer["special"].items()
            ),
        )
        if tokenizer["chat_template_characters"] is not None:
            yield "chat template", f"{tokenizer['chat_template_characters']:,} characters"
    for key, value in found.keys_under("quantize.imatrix.").items():
        yield f"importance {key}", _short(value)


def _importance_lines(found: GgufInspection) -> Iterator[tuple[str, str | None]]:
    entries = found.importance_entries
    chunks, size = (found.integer(f"imatrix.chunk_{key}") for key in ("count", "size"))
    yield "entries", f"{len(entries):,}"
    if chunks is not None and size is not None:
        yield "measured over", f"{chunks:,} chunks of {size:,} tokens"
    datasets = found.file.metadata.get("imatrix.datasets")
    if datasets is not None:
        yield "datasets", _short(plain(datasets))
    unseen = [
        f"{name} {expert}" if len(counts) > 1 else name
        for name, counts in entries.items()
        for expert, count in enumerate(counts)
        if not count > 0
    ]
    if unseen:
        more = f" and {len(unseen) - 3} more" if len(unseen) > 3 else ""
        yield "never reached", ", ".join(unseen[:3]) + more


def tables(found: GgufInspection, every: bool) -> list[Table]:
    """Types, tensors (like ones of all layers in one row, or each), metadata."""
    if found.kind == "imatrix":
        data = [_entries_table(found.importance_entries, every)]
    else:
        tensors = _tensors_table(list(found.file.tensors.values()), every)
        data = [_types_table(found.types()), tensors]
    metadata = [
        (printable(key), _kind_name(value), printable(_short(plain(value))))
        for key, value in found.file.metadata.items()
    ]
    return [*data, Table(("metadata", "kind", "value"), metadata, 3)]


def _types_table(types: list[dict[str, Any]]) -> Table:
    total = sum(row["bytes"] for row in types)
    rows = [
        (
            row["type"],
            f"{row['tensors']:,}",
            f"{row['weights']:,}",
            f"{row['bits_per_weight']:.4g}",
            f"{row['bytes']:,}",
            f"{100 * row['bytes'] / total:.1f} %",
        )
        for row in types
    ]
    return Table(("type", "tensors", "weights", "bits/weight", "bytes", "share"), rows, 1)


def _tensors_table(tensors: list[TensorInfo], every: bool) -> Table:
    groups: dict[tuple[Parts, tuple[int, ...], str], list[TensorInfo]] = {}
    known = numbers_at(info.name for info in tensors)
    for info in tensors:
        parts = (info.name,) if every else parts_of(info.name)
        groups.setdefault((parts, info.shape, info.type.name), []).append(info)
    rows = [
        (
            printable(ranges(parts, [info.name for info in members], known))
            + (f" ({len(members)})" if len(members) > 1 else ""),
            "x".join(map(str, shape)),
            type_,
            f"{members[0].type.bits_per_weight:.4g}",
            f"{sum(info.nbytes for info in members):,}",
        )
        for (parts, shape, type_), members in groups.items()
    ]
    return Table(("tensor", "shape", "type", "bits/weight", "bytes"), rows, 3)


def _entries_table(entries: Mapping[str, list[float]], every: bool) -> Table:
    groups: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for name, counts in entries.items():
        pattern = name if every else "*".join(parts_of(name))
        span = (min(counts, default=math.nan), max(counts, default=math.nan))
        groups.setdefault((pattern, len(counts)), []).append(span)
    rows = [
        (
            printable(pattern) + (f" ({len(spans)})" if len(spans) > 1 else ""),
            str(matrices or "-"),
            f"{min(low for low, _ in spans):,.0f}",
            f"{max(high for _, high in spans):,.0f}",
        )
        for (pattern, matrices), spans in groups.items()
    ]
    return Table(("entry", "matrices", "tokens, least", "most"), rows, 1)


def _kind_name(value: Value) -> str:
    name = (value.element or value.kind).name.lower()
    return f"{name}[{len(value.value)}]" if value.kind is Kind.ARRAY else name


def _short(value: Any, most: int = 72) -> str:
    """A plain value in at most a line."""
    if isinstance(value, dict):
        return f"[{_short(', '.join(map(str, value['first'])))}, ... {value['count']:,} in all]"
    if isinstance(value, list):
        return f"[{_short(', '.join(map(str, value)))}]"
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def detail_lines(detail: Mapping[str, Any]) -> list[str]:
    """The same for a person."""
    lines = [
        printable(detail["name"]),
        f"  shape            {'x'.join(map(str, detail['shape']))}",
        f"  type             {detail['dtype']}, {detail['bits_per_weight']:.4g} bits per weight",
        f"  stored           {detail['bytes']:,} bytes from byte {detail['offset']:,} of "
        f"{printable(detail['file'])}",
    ]
    if "range" in detail:
        low, high = detail["range"]
        lines += [
            f"  values           {low:.6g} to {high:.6g}",
            f"  mean, deviation  {detail['mean']:.6g}, {detail['std']:.6g}",
            f"  root mean square {detail['rms']:.6g}",
            f"  zeros            {100 * detail['zeros']:.2f} %",
        ]
    if detail["not_finite"]:
        lines.append(f"  not finite       {detail['not_finite']:,}")
    if "second_scale_range" in detail:
        low, high = detail["second_scale_range"]
        span = f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
        lines.append(f"  second scale     {span}, by which values are multiplied")
    if "scales" in detail:
        lines += scale_lines(detail["scales"])
    return lines
