"""The command that serves an artifact, of an engine that loads its format; and what comes next."""

import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from qtool.checkpoints.decoder_names import of_tower
from qtool.checkpoints.gguf_models import gguf_models
from qtool.checkpoints.structure import names_model
from qtool.engine_commands import COMMANDS
from qtool.errors import QtoolError
from qtool.homes.lm_studio import import_line
from qtool.hub import ALIASES, TINY


def loads(artifact: Path) -> str | None:
    """The first engine whose rules refuse nothing of an artifact; None where there is none."""
    from qtool.verification.engines.rules import engine_findings, loaders

    models = gguf_models(artifact)
    if models:
        from qtool.gguf.open import open_source

        findings = engine_findings(open_source(models[0]), "llama.cpp", 1)
        return None if any(finding.severity == "error" for finding in findings) else "llama.cpp"
    from qtool.artifacts.artifact import Artifact
    from qtool.verification.engines.view import view_of

    opened = Artifact.open(artifact)
    if not names_model(opened.checkpoint.config):
        return None
    for engine in loaders(view_of(opened)):
        # The others are asked as far as they can be; of this one, its own class, too.
        found = engine_findings(opened, engine, 1) if engine == "transformers" else ()
        if all(finding.severity != "error" for finding in found):
            return engine
    return None


def _word(name: str) -> str:
    """A path as a shell and a program take it: no options, no separate words, no alias."""
    plain = not name.startswith("-") and name not in (TINY, *ALIASES)
    return shlex.quote(name if plain else f"./{name}")


def command(artifact: Path) -> str | None:
    """What serves an artifact that lies here; None where no engine is known to load it."""
    try:
        engine = loads(artifact)
    except QtoolError:
        return None
    return None if engine is None else COMMANDS[engine].format(_word(str(artifact)))


def _runs_here(artifact: Path) -> bool:
    """Whether `qtool eval` takes it, as far as its architecture decides."""
    models = gguf_models(artifact)
    if not models:
        return True
    from qtool.gguf.open import open_source
    from qtool.gguf.to_hf.config import has_way_back

    return has_way_back(open_source(models[0]).architecture)


def next_lines(
    artifact: Path, model: str, modelfile: bool = False, left: Iterable[str] = ()
) -> list[str]:
    """At most two lines for the end of a run. model: what it was made of, as typed. left: tensors
    of it that were not written."""
    lines = []
    if (said := command(artifact)) is not None:
        apart = " --mmproj FILE" if gguf_models(artifact) and any(map(of_tower, left)) else ""
        lines.append(f"next: {said}{apart}")
    if modelfile:
        from qtool.homes.ollama import create_line

        lines.append(f"next: {create_line(artifact)}")
    elif gguf_models(artifact) and (line := import_line(artifact)) is not None:
        lines.append(f"next: {line}")
    elif not _runs_here(artifact):
        lines.append(f"next: llama-perplexity -m {_word(str(artifact))} -f FILE")
    else:
        alias = model in (TINY, *ALIASES)
        hidden = Path(os.path.realpath(model)) == Path(os.path.realpath(artifact)) and not alias
        against = "" if hidden else f" --against {model if alias else _word(model)}"
        lines.append(f"next: qtool eval {_word(str(artifact))}{against} --text FILE")
    return lines[:2]


def of_pushed(artifact: Path, repository: str) -> list[str]:
    """The same of a repository in which the artifact lies now."""
    models = gguf_models(artifact)
    if models:
        from qtool.cards.llama_cpp import quant_of

        quant = quant_of(models[0])
        asked = repository if quant is None else f"{repository}:{quant}"
        return [f"next: llama-server -hf {asked}", f"next: ollama run hf.co/{asked}"]
    engine = loads(artifact)
    if engine is None:
        return []
    return [f"next: {COMMANDS[engine].format(repository)}"]
