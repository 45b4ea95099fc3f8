"""LM Studio's folder of models.

    models/PUBLISHER/NAME/FILE.gguf       in ~/.lmstudio, of older versions in ~/.cache/lm-studio

`lms import FILE` puts a file into it. Source: LM Studio's docs, "Import Models".
"""

import shlex
from pathlib import Path

from qtool.errors import SourceError


def stores() -> list[Path]:
    """Where the folder may be."""
    home = Path.home()
    return [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]


def stored_model(name: str) -> Path:
    """The folder of a model, PUBLISHER/NAME, or a file in it, PUBLISHER/NAME/FILE."""
    parts = name.split("/")
    if len(parts) in (2, 3) and all(part not in ("", ".", "..") for part in parts):
        for store in stores():
            path = store.joinpath(*parts)
            if path.exists():
                return path
    looked = " and ".join(map(str, stores()))
    raise SourceError(
        f"lmstudio:{name}: no such model in {looked}; expected lmstudio:PUBLISHER/NAME, as "
        "`lms ls` prints it"
    )


def import_line(artifact: Path) -> str | None:
    """The command that brings a GGUF file into it; None where LM Studio is not used here."""
    if any(store.is_dir() for store in stores()):
        return f"lms import {shlex.quote(str(artifact))}"
    return None
