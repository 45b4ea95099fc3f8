"""The README.md of a converted checkpoint: what it was, how exact it is, where it comes from."""

import json
from collections.abc import Mapping
from typing import Any

from qtool import __version__, hub
from qtool.cards import modelcard
from qtool.converting.certificate import Certificate
from qtool.converting.targets import Target
from qtool.record import without_layers
from qtool.verification.engines.view import EngineView

_SHOWN = 10


def render(
    target: Target, certificate: Certificate, record: Mapping[str, Any], view: EngineView
) -> str:
    """The card; it depends on its arguments alone. view: of what was written."""
    source = certificate.source
    was = f"{source['format']} {source['layout'] or ''}".strip()
    rows = [
        ("made with", f"qtool {__version__}, `qtool convert --to {target.name}`"),
        ("converted from", f"{was}, {source['digest']}"),
        ("exactness of the weights", certificate.kept),
    ]
    table = [f"| {key} | {value} |" for key, value in rows]
    parts = [
        _front_matter(target, record, view.config),
        f"# {_name(record) or 'Model'}, {target.name}",
        "\n".join(["| | |", "|---|---|", *table]),
        modelcard.loading(view),
        _rounded(certificate),
        "## Provenance\n\nAlso in `qtool.json`.\n\n```json\n"
        + json.dumps(without_layers(record), indent=2, ensure_ascii=False)
        + "\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _name(record: Mapping[str, Any]) -> str | None:
    """What the unquantized model is called, where the record says it."""
    source = record.get("source")
    name = source.get("name") if isinstance(source, dict) else None
    return name if isinstance(name, str) else None


def _front_matter(target: Target, record: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    lines = ["---"]
    name = _name(record)
    if name is not None and hub.is_hub_id(name):
        lines.append(f"base_model: {name.partition('@')[0]}")
        if target.format != "hf":
            lines.append("base_model_relation: quantized")
    library = "mlx" if target.format == "mlx" else "transformers"
    task = modelcard.task(config)
    lines += [f"library_name: {library}", f"pipeline_tag: {task}", "tags:", "- qtool"]
    if target.format != "hf":
        lines += ["- quantized", f"- {target.format}"]
    return "\n".join([*lines, "---"])


def _rounded(certificate: Certificate) -> str:
    if certificate.exact:
        return ""
    worst = sorted(certificate.rounded, key=lambda one: (-one.relative_error, one.name))[:_SHOWN]
    lines = ["## What was rounded", "", "| tensor | what | relative error |", "|---|---|---|"]
    lines += [f"| `{one.name}` | {one.what} | {one.relative_error:.3g} |" for one in worst]
    if len(certificate.rounded) > _SHOWN:
        lines.append(f"| {len(certificate.rounded) - _SHOWN} more | | |")
    return "\n".join(lines)
