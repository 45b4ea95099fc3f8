"""What `qtool download` means by its arguments: a repository, patterns of names, a quantization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from qtool.errors import SourceError, UnsupportedError
from qtool.hub import ALIASES, PICKLES, TINY, HubModel, parse, parse_quantized, tiny_folder
from qtool.hub.listing import HubFile
from qtool.hub.snapshot import Selection, Snapshot, fetch
from qtool.messages.progress import Progress


def asked(model: str, include: Sequence[str], progress: Progress) -> Snapshot:
    """What `qtool download` means by its arguments; SourceError where that is nothing of a hub."""
    if model == TINY:
        return _shipped(include)
    quantized = parse_quantized(model)
    if quantized is not None and not include:
        return fetch_gguf(*quantized, progress)
    found = parse(model)
    if found is None:
        here = (
            "lies here, so that there is nothing to download; it is "
            if Path(model).exists()
            else ""
        )
        raise SourceError(
            f"{model}: {here}no hub id (OWNER/NAME, with @REVISION or :QUANT) and no alias "
            f"({', '.join(ALIASES)})"
        )
    return fetch(found, including(include) if include else Selection(), progress)


def _shipped(include: Sequence[str]) -> Snapshot:
    """The folder of `tiny`: there is nothing to download."""
    if include:
        raise UnsupportedError(
            f"--include: {TINY} ships with qtool, whole, and nothing of it is downloaded; leave it "
            "out"
        )
    folder = tiny_folder()
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    kept = (HubFile(path.name, path.stat().st_size) for path in files if path.suffix != ".py")
    return Snapshot(None, None, folder, tuple(kept))


def fetch_gguf(model: HubModel, quant: str, progress: Progress | None = None) -> Snapshot:
    """The GGUF file of a repository whose name ends with `quant`; the first part of a split one."""
    from qtool.formats.gguf_file import first_parts

    either = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in quant)
    endings = [f"*{mark}{either}{part}.gguf" for mark in "-._" for part in ("", "-*-of-*")]
    selection = Selection(tuple(endings), ("*mmproj*",), checkpoint=False, said=f"*{quant}.gguf")
    found = fetch(model, selection, progress)
    models = first_parts(Path(file.name) for file in found.files)
    if len(models) > 1:
        names = ", ".join(map(str, models))
        raise SourceError(f"{model}:{quant} means {len(models)} models ({names}); name more of it")
    return replace(found, named=found.folder / models[0])


def including(patterns: Sequence[str]) -> Selection:
    """The files that were asked for by name; UnsupportedError where these are Python pickles."""
    for pattern in patterns:
        if pattern.endswith(PICKLES):
            raise UnsupportedError(
                f"--include {pattern}: Python pickles can run any code when loaded and are refused"
            )
    kept = tuple(f"*{ending}" for ending in PICKLES)
    return Selection(tuple(patterns), kept, checkpoint=False)
