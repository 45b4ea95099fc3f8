"""What is verified: an opened artifact, with what in it cannot be made sense of kept apart."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from qtool.artifact import Artifact, Entry
from qtool.errors import QtoolError
from qtool.formats.safetensors_header import TensorInfo


@dataclass(frozen=True)
class Subject:
    """A safetensors artifact and, where one was given, the model that it was made of."""

    path: Path
    artifact: Artifact
    entries: Mapping[str, Entry]  # all that can be made sense of
    broken: Mapping[str, str]  # the other modules, each with what is wrong with it
    source: Artifact | None = None


def subject_of(path: Path, artifact: Artifact, source: Artifact | None) -> Subject:
    """Sort the stored tensors into entries and broken modules."""
    try:
        return Subject(path, artifact, artifact.entries, {}, source)
    except QtoolError:
        pass  # one module at a time, to say which ones
    groups: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in artifact.checkpoint.tensors.items():
        groups[_module_of(name)][name] = info
    entries: dict[str, Entry] = {}
    broken: dict[str, str] = {}
    for module, tensors in groups.items():
        part = replace(artifact, checkpoint=replace(artifact.checkpoint, tensors=tensors))
        try:
            entries |= part.entries
        except QtoolError as error:
            broken[module] = str(error)
    return Subject(path, artifact, entries, broken, source)


def _module_of(name: str) -> str:
    """The module that a stored tensor belongs to; bitsandbytes has names below `.weight`."""
    module, dot, _ = name.rpartition(".weight.")
    return module if dot else name.rpartition(".")[0] or name
