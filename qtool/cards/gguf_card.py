"""The model card of a GGUF file, from its own metadata: for a repository that has none."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from qtool import hub
from qtool.cards.llama_cpp import quant_of
from qtool.formats.gguf_file import GgufFile
from qtool.gguf.inspect import GgufInspection

_HUB_PAGE = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)/?", re.ASCII)


def render(path: Path, repository: str, names: Iterable[str]) -> str:
    """The card, for a repository in which the file has these names."""
    from qtool.cards.card import joined

    quant = quant_of(path)
    with GgufFile.open(path) as file:
        found = GgufInspection(file)
        head: dict[str, object] = {}
        source = found.text("qtool.source")
        base = _base_model(source, found.text("general.base_model.0.repo_url"))
        if base is not None:
            head |= {"base_model": base, "base_model_relation": "quantized"}
        if (license_ := found.text("general.license")) is not None:
            head["license"] = license_
        head |= {
            "library_name": "gguf",
            "pipeline_tag": "text-generation",
            "quantized_by": "qtool",
            "tags": ["gguf", "quantized", "llama.cpp"],
        }
        types = Counter(info.type.name for info in file.tensors.values())
        rows = [
            ("source", source or base or "-"),
            ("file type", quant or "-"),
            ("tensors", ", ".join(f"{n} {name}" for name, n in types.most_common())),
            ("bits per weight", f"{found.bits_per_weight:.3f}"),
            ("size", f"{found.tensor_bytes:,} bytes of tensors"),
            ("made with", f"qtool {found.text('qtool.version') or '-'}"),
        ]
        recipe = found.text("qtool.recipe")
        title = found.text("general.name") or repository.rpartition("/")[2]
    first = sorted(names)[0]
    asked = repository if quant is None else f"{repository}:{quant}"
    table = [f"| {key} | {value.replace('|', ' ')} |" for key, value in rows]
    lines = [
        f"# {title}, GGUF",
        "",
        "| | |",
        "|---|---|",
        *table,
        "",
        "## Loading",
        "",
        f"    llama-server -hf {asked}",
        f"    ollama run hf.co/{asked}",
        f"    llama-server -m {first}",
    ]
    if recipe is not None:
        lines += ["", "## Provenance", "", "```json", recipe, "```"]
    return joined(head, "\n".join(lines) + "\n")


def _base_model(source: str | None, page: str | None) -> str | None:
    """The hub id of what was quantized, by qtool's record or by the address of its page."""
    if source is not None and hub.is_hub_id(source):
        return source.partition("@")[0]
    found = None if page is None else _HUB_PAGE.fullmatch(page)
    return None if found is None else found[1]
