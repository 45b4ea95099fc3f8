"""`matrix.json` in the folder of a matrix: what is made, and of what.

It is the result of `qtool matrix`, and what the same command goes on from: an artifact is kept
where it was made of the same recipe, source and text by the same version, and its bytes are those
of the statement beside it.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qtool.checkpoints.weight_files import MATRIX
from qtool.errors import FormatError, ResumeError
from qtool.formats.safetensors_header import read_json
from qtool.provenance import statement
from qtool.workspaces.differences import PRECISION
from qtool.workspaces.naming import path_beside

GPU = "GPU"  # by which what was calibrated on one is known
REPORT = "report.html"


@dataclass
class Entry:
    """One artifact."""

    recipe: str
    path: str  # in the folder
    calibrated: str
    status: str = "waiting"  # and then: made, kept, failed
    error: str | None = None
    size_bytes: int | None = None
    bits_per_weight: float | None = None
    seconds: float | None = None
    perplexity: float | None = None
    kld: float | None = None
    notes: list[str] = field(default_factory=list)


class State:
    """The file, written anew with every change."""

    def __init__(self, folder: Path) -> None:
        """ResumeError where there is such a file and it is not ours."""
        self._path = folder / MATRIX
        self.folder = folder
        self._wanted: dict[str, Any] = {}
        self._figures: dict[str, Any] = {}
        if self._path.is_file():
            try:
                content = read_json(self._path)
                found = content.get("made_of")
            except FormatError as error:
                raise ResumeError(f"{error}; remove it, or choose another -o") from None
            if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
                raise ResumeError(f"{self._path}: not written by `qtool matrix`; choose another -o")
            self._wanted = found
            figures = content.get("figures")
            self._figures = figures if isinstance(figures, dict) else {}

    def figures(self, name: str, of: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """What was measured before of an artifact, where that was `of` the same things."""
        found = self._figures.get(name)
        if not isinstance(found, dict) or found.get("of") != dict(of):
            return None
        return found["row"] if isinstance(found.get("row"), dict) else None

    def measured(self, name: str, of: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        """Kept with the next write()."""
        self._figures[name] = {"of": dict(of), "row": dict(row)}

    def begin(self, name: str, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Before the first byte of an artifact; found: the result as it is by then."""
        self._wanted[name] = dict(wanted)
        self.write(found)

    def forget(self, name: str) -> None:
        """Nothing was left of it: what comes to have its name is somebody else's."""
        self._wanted.pop(name, None)
        self._figures.pop(name, None)

    def is_there(self, name: str, artifact: Path, wanted: Mapping[str, Any]) -> bool:
        """Whether it is made already, whole and of the same things.

        ResumeError where something is there under its name that is not.
        """
        if not artifact.exists():
            return False
        known = self._wanted.get(name)
        if known is None:
            raise ResumeError(
                f"{artifact}: exists, and was not made by this matrix; remove it or choose "
                "another -o"
            )
        if known != dict(wanted):
            keys = [key for key in {**wanted, **known} if known.get(key) != wanted.get(key)]
            if GPU in keys:
                there, now = (found.get(GPU, "the CPU") for found in (known, wanted))
                way = f"give --device {'cuda' if GPU in known else 'cpu'}"
                if GPU in known and GPU in wanted:
                    way = "remove it"
                raise ResumeError(
                    f"{artifact}: was calibrated on {there}, and this run is on {now}; {way}, or "
                    "choose another -o"
                )
            if keys == [PRECISION]:
                there, now = (found.get(PRECISION, "float32") for found in (known, wanted))
                raise ResumeError(
                    f"{artifact}: was calibrated with matmuls in {there}, and this run makes them "
                    f"in {now} (calibration.precision); remove it, or choose another -o"
                )
            raise ResumeError(
                f"{artifact}: was made of another {', '.join(keys) or 'source'}; remove it, or "
                "choose another -o"
            )
        if path_beside(artifact).is_file():
            changed = statement.unlike(artifact)
            if changed:
                raise ResumeError(
                    f"{artifact}: {changed[0]} is not as it was made; remove the artifact, and "
                    "the same command makes it again"
                )
        return True

    def write(self, found: Mapping[str, Any]) -> None:
        """Replace the file."""
        half = self._path.with_name(f".{MATRIX}.partial")
        try:
            content = {**found, "made_of": self._wanted}
            if self._figures:
                content["figures"] = self._figures
            half.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            os.replace(half, self._path)
        finally:
            half.unlink(missing_ok=True)


def row(entry: Entry) -> dict[str, Any]:
    """For --json."""
    return asdict(entry)
