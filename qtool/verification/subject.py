"""What is verified: an opened artifact, with what in it cannot be made sense of kept apart."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from qtool.artifacts.artifact import Artifact
from qtool.artifacts.entry import Entry
from qtool.artifacts.untold import untold
from qtool.checkpoints import structure
from qtool.checkpoints.roles import Role, roles_of
from qtool.checkpoints.structure import BlockStack
from qtool.errors import QtoolError
from qtool.formats.layer_names import experts_of
from qtool.formats.safetensors_header import TensorInfo
from qtool.streaming.weights import Weights


@dataclass(frozen=True)
class Subject:
    """A safetensors artifact and, where one was given, the model that it was made of."""

    path: Path
    artifact: Artifact  # without the broken modules
    entries: Mapping[str, Entry]  # all that can be made sense of
    broken: Mapping[str, str]  # the other modules, each with what is wrong with it
    source: Weights | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json."""
        return self.artifact.checkpoint.config

    @cached_property
    def present(self) -> frozenset[str]:
        """Every tensor of the model that is there, in whatever state."""
        return frozenset([*self.entries, *(f"{module}.weight" for module in self.broken)])

    @property
    def untold(self) -> int:
        """How many matrices are packed in a way that the config does not explain."""
        return len(self.broken) or len(untold(self.artifact))

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, by its unquantized name; None where it is not there."""
        entry = self.entries.get(name)
        return None if entry is None else entry.shape

    @cached_property
    def infos(self) -> Mapping[str, TensorInfo]:
        """The entries as an unquantized checkpoint would have them."""
        kinds = {name: e.dtype if e.scheme is None else "F16" for name, e in self.entries.items()}
        return {n: TensorInfo(n, kinds[n], e.shape, 0, 0) for n, e in self.entries.items()}

    @cached_property
    def blocks(self) -> BlockStack | None:
        """The decoder blocks; None where nothing is numbered."""
        try:
            return structure.find_blocks(self.infos, self.config)
        except QtoolError:
            return None

    @cached_property
    def roles(self) -> Mapping[str, Role]:
        """What each entry is."""
        if self.blocks is None:
            return {}
        return roles_of(self.infos, self.blocks)

    @cached_property
    def expert_starts(self) -> frozenset[str]:
        """`...experts.N.` of every expert that has tensors of its own."""
        found = (experts_of(name) for name in self.present)
        return frozenset(f"{one[0]}.{one[1]}." for one in found if one)

    @cached_property
    def linears(self) -> tuple[Entry, ...]:
        """The linear layers of the blocks, quantized or not."""
        return tuple(self.entries[name] for name, role in self.roles.items() if not role.reason)


def subject_of(path: Path, artifact: Artifact, source: Weights | None) -> Subject:
    """Sort the stored tensors into entries and broken modules."""
    try:
        return Subject(path, artifact, artifact.entries, {}, source)
    except QtoolError:
        pass  # one module at a time, to say which ones
    groups: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in artifact.checkpoint.tensors.items():
        groups[module_of(name)][name] = info
    entries: dict[str, Entry] = {}
    broken: dict[str, str] = {}
    for module, tensors in groups.items():
        part = replace(artifact, checkpoint=replace(artifact.checkpoint, tensors=tensors))
        try:
            entries |= part.entries
        except QtoolError as error:
            broken[module] = str(error.__cause__ or error)  # without the path
    # Reading a matrix looks at the headers of all.
    left = {n: i for n, i in artifact.checkpoint.tensors.items() if module_of(n) not in broken}
    readable = replace(artifact, checkpoint=replace(artifact.checkpoint, tensors=left))
    return Subject(path, readable, entries, broken, source)


def module_of(name: str) -> str:
    """The module that a stored tensor belongs to; bitsandbytes has names below `.weight`."""
    module, dot, _ = name.rpartition(".weight.")
    return module if dot else name.rpartition(".")[0] or name
