"""Model cards: a README.md whose first lines are YAML between two lines of `---`.

    ---
    base_model: OWNER/NAME
    base_model_relation: quantized
    license: apache-2.0
    ---
    # text

Source: the hub's documentation of model cards (hub-docs, model-cards.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qtool.checkpoints import front_matter

_MAX_BYTES = 1_000_000
_HEAD = re.compile(r"\A---\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_LICENSE = ("license", "license_name", "license_link")
_QUALITY = "## Quality"


def parts(text: str) -> tuple[dict[str, Any], str]:
    """The metadata and the text below it; {} where there is none that can be read."""
    found = _HEAD.match(text)
    if found is None:
        return {}, text
    return front_matter.read(found[1]), text[found.end() :]


def joined(head: Mapping[str, Any], body: str) -> str:
    """A card of both."""
    import yaml

    said = yaml.safe_dump(dict(head), sort_keys=False, allow_unicode=True, width=1000)
    return f"---\n{said}---\n{body if body.startswith(chr(10)) else chr(10) + body}"


def license_lines(folder: Path) -> list[str]:
    """Lines of YAML with the licence and the languages that the card in a folder states."""
    import yaml

    path = folder / "README.md"
    try:
        if path.stat().st_size > _MAX_BYTES:
            return []
        head, _ = parts(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return []
    found = {key: head[key] for key in _LICENSE if _is_word(head.get(key))}
    language = head.get("language")
    if _is_word(language) or (isinstance(language, list) and all(map(_is_word, language))):
        found["language"] = language
    lines: str = yaml.safe_dump(found, sort_keys=False, allow_unicode=True) if found else ""
    return lines.splitlines()


def _is_word(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) < 300 and value.isprintable()


def with_quality(body: str, evaluations: Sequence[Mapping[str, Any]]) -> str:
    """The text with a table of what `qtool eval --json` measured, in place of an earlier one."""
    if not evaluations:
        return body
    rows = ["| text | perplexity | of the source | KL divergence | same top token |"]
    rows.append("|---|---|---|---|---|")
    for one in evaluations:
        protocol = one.get("protocol")
        text = protocol.get("text") if isinstance(protocol, Mapping) else None
        kld = one.get("kld")
        cells = [
            Path(str(text)).name if text else "-",
            _number(one.get("perplexity"), "{:.4f}"),
            _number(one.get("reference_perplexity"), "{:.4f}"),
            _number(kld.get("mean") if isinstance(kld, Mapping) else None, "{:z.5f}"),
            _number(one.get("top1_agreement"), "{:.2%}"),
        ]
        rows.append(f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |")
    section = "\n".join([_QUALITY, "", "Measured by `qtool eval`.", "", *rows]) + "\n"
    before, mark, after = body.partition(f"\n{_QUALITY}\n")
    if mark:
        rest = re.search(r"^## ", after, re.MULTILINE)
        return f"{before}\n{section}\n{after[rest.start() :] if rest else ''}"
    place = body.find("\n## Provenance\n")
    if place < 0:
        return f"{body.rstrip()}\n\n{section}"
    return f"{body[:place]}\n{section}{body[place:]}"


def _number(value: object, form: str) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return form.format(value) if number else "-"
