"""The rotations of a network that were proved (`qtool.transforms.rotate`), and what they change."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qtool.recipe.rotate import RotateOptions
from qtool.streaming.online import Online
from qtool.transforms.residual import BlockRoles, OuterRoles
from qtool.transforms.rotated import Change, Rotated, change_all
from qtool.transforms.rotation import Rotation, sylvester

PROBE = (2, 32)  # samples and tokens that a proof runs on


@dataclass(frozen=True)
class Rotations:
    """What was proved, and what it is made of."""

    r1: Rotation | None
    r2: Mapping[int, Rotation]  # by block
    blocks: Mapping[int, BlockRoles]
    outer: OuterRoles | None
    left_out: tuple[str, ...] = ()
    learned: str | None = None  # what learning them changed
    online: Online = field(default_factory=Online)  # R3 and R4, of which engines do their part

    def record(self, options: RotateOptions) -> dict[str, Any]:
        """For provenance."""
        kinds = {rotation.describe() for rotation in self.r2.values()}
        return {
            "kind": options.kind,
            "seed": options.seed,
            "r1": None if self.r1 is None else self.r1.describe(),
            "r2": ", ".join(sorted(kinds)) or None,
            "r2_blocks": len(self.r2),
            "r3": sizes(self.online.heads),
            "r4": sizes(self.online.inputs),
            "learned": self.learned,
            "left_out": list(self.left_out),
        }

    def notes(self) -> list[str]:
        """Sentences for the summary."""
        said = []
        if self.r1 is not None:
            said.append(f"rotate: the residual stream is rotated ({self.r1.describe()})")
        if self.r2:
            kinds = sorted({rotation.describe() for rotation in self.r2.values()})
            said.append(
                f"rotate: the values of {len(self.r2)} blocks are rotated ({', '.join(kinds)})"
            )
        if self.online.heads:
            said.append(
                f"rotate: engines have to rotate queries and keys of {len(self.online.heads)} "
                f"blocks ({sizes(self.online.heads)}), as transform_config says"
            )
        if self.online.inputs:
            said.append(
                f"rotate: engines have to rotate the inputs of {len(self.online.inputs)} matrices "
                f"({sizes(self.online.inputs)}), as transform_config says"
            )
        said += [] if self.learned is None else [f"rotate: {self.learned}"]
        return said + [f"rotate: {reason}" for reason in self.left_out]

    def apply(self, view: Rotated) -> None:
        """Let the view show the network with these rotations."""
        view.changes.clear()
        change_all(view, changes_of(self))
        view.online.become(self.online)


def changes_of(found: Rotations) -> list[Mapping[str, Change]]:
    """Every change that rotations are made of."""
    changes: list[Mapping[str, Change]] = []
    for index, roles in found.blocks.items():
        if found.r1 is not None:
            changes.append(roles.changes(found.r1))
        if index in found.r2 and roles.values is not None:
            changes.append(roles.values.changes(found.r2[index]))
    if found.r1 is not None and found.outer is not None:
        changes.append(found.outer.changes(found.r1))
    return [*changes, *(absorbed(name, size) for name, size in found.online.inputs.items())]


def absorbed(name: str, size: int) -> Mapping[str, Change]:
    """What a matrix becomes whose input is rotated by Sylvester's matrix."""
    return {name: Change(column_heads=sylvester(size))}


def sizes(found: Mapping[Any, int]) -> str | None:
    """hadamard 64, hadamard 512"""
    return ", ".join(f"hadamard {size}" for size in sorted({*found.values()})) or None
