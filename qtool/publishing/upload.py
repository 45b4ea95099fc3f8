"""What is sent of an artifact: its files by their names in the repository, and its card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.cards.card import joined, parts, with_quality
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import SourceError
from qtool.homes.hub_cache import repository_of

CARD = "README.md"
_BESIDE = "eval.json"
# Beside weights, config and tokenizer: what qtool and other quantizers write.
_OWN = ("qtool.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json", CARD)


@dataclass(frozen=True)
class Upload:
    """The files of an artifact, by their names in the repository, and its card."""

    files: dict[str, Path]
    card: str
    left: tuple[str, ...] = ()  # that lie in the folder, and are no part of the artifact


def prepared(artifact: Path, repository: str, evaluations: Sequence[Path] = ()) -> Upload:
    """What is sent of an artifact: its files, with the card by itself."""
    from qtool.checkpoints.gguf_models import gguf_models

    measured = [_evaluation(path) for path in evaluations or _found_beside(artifact)]
    if models := gguf_models(artifact):
        from qtool.cards.gguf_card import render
        from qtool.cards.llama_cpp import names_for

        if len(models) > 1:
            raise SourceError(f"{artifact}: holds {len(models)} GGUF models; name one of them")
        names = names_for(models[0], repository)
        parts_of = {path.resolve() for path in names.values()}
        there = _files(artifact) if artifact.is_dir() else {}
        left = [name for name, path in there.items() if path.resolve() not in parts_of]
        head, body = parts(render(models[0], repository, names))
        return Upload(
            dict(names),
            joined(head, with_quality(body, measured)),
            _but_what_is_read(left),
        )
    if not artifact.is_dir():
        raise SourceError(f"{artifact}: expected a folder or a .gguf file; one file is no model")
    there = _files(artifact)
    files = {name: there[name] for name in sorted(_parts(artifact) & there.keys())}
    rest = _but_what_is_read([name for name in there if name not in files])
    card = files.pop(CARD, None)
    text = card.read_text(encoding="utf-8") if card is not None else f"# {repository}\n"
    head, body = parts(text)
    if not head:
        head = {"library_name": "transformers", "tags": ["qtool"]}
    return Upload(files, joined(head, with_quality(body, measured)), rest)


def _parts(folder: Path) -> set[str]:
    """The names of all that an artifact is made of; notes and logs may lie beside them."""
    checkpoint = Checkpoint.open(folder)
    found = {file.name for file in checkpoint.files}
    if len(found) > 1:
        found |= {path.name for path in folder.glob("*.safetensors.index.json")}
    found |= {relative.as_posix() for relative in checkpoint.side_files}
    return found | {"config.json", *_OWN}


def _but_what_is_read(left: Sequence[str]) -> tuple[str, ...]:
    """Without the figures and the card, of which the repository's card is made."""
    return tuple(sorted(name for name in left if name not in (_BESIDE, CARD)))


def _files(folder: Path) -> dict[str, Path]:
    """The files of a folder; SourceError where one is a link to elsewhere: it would be published.

    In a download cache every file is a link to one store, and belongs to the model.
    """
    home = folder.resolve()
    cached = [one.parent for one in home.parents if one.name == "snapshots"]
    store = (cached[0] / "blobs").resolve() if cached and repository_of(home) else None
    found = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if any(part.startswith(".") for part in inside.parts):
            continue
        target = path.resolve()
        if not target.is_relative_to(home) and target.parent != store:
            raise SourceError(
                f"{path}: a link to {target}, outside of the artifact; nothing of elsewhere is "
                "published: copy the file if it belongs there, or remove the link"
            )
        if path.is_file():
            found[inside.as_posix()] = path
    return found


def _found_beside(artifact: Path) -> list[Path]:
    """Where `qtool eval ARTIFACT --json` may have been kept."""
    places = (artifact / _BESIDE, artifact.with_name(f"{artifact.name}.{_BESIDE}"))
    return [path for path in places if path.is_file()][:1]


def _evaluation(path: Path) -> dict[str, Any]:
    from qtool.formats.safetensors_header import read_json

    found = read_json(path)
    if "perplexity" not in found:
        raise SourceError(f"{path}: no `perplexity`; expected what `qtool eval --json` printed")
    return found
