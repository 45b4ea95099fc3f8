"""Whether files are still those whose SHA-256 the artifact's own qtool.json records.

The record may come from anybody: its names are looked up in the artifact's folder, and nowhere
else. Tensor files are nobody's to edit; of configs and tokenizers, which people do edit, it warns.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qtool.checkpoints.gguf_models import is_gguf
from qtool.record import FILE_NAME, FILES, record_in
from qtool.verification.finding import Finding
from qtool.verification.stated import SHA256, found_digest, place

CHECK = "digests"
_SHOWN = 100  # characters of what a stranger wrote
_SUFFIX = ".safetensors"


def recorded_digests(artifact: Path) -> Any:
    """What qtool.json says of files; None where it says nothing, as in GGUF files."""
    if is_gguf(artifact):
        return None
    folder = artifact if artifact.is_dir() else artifact.parent
    return (record_in(folder)[0] or {}).get(FILES)


def none_recorded(artifact: Path) -> Finding:
    """The note that nothing was compared."""
    if is_gguf(artifact):
        why = "a GGUF file holds no digest of itself; `quantize --provenance` states one beside it"
    else:
        why = f"no {FILE_NAME} records any"
    return Finding("note", CHECK, "", f"no digests to compare with ({why}): flipped bits go unseen")


def check_digests(artifact: Path, recorded: Any, known: dict[Path, str]) -> Iterator[Finding]:
    """digests: compare each file with its record. known: digests by path, which it adds to."""
    if not isinstance(recorded, Mapping):
        yield Finding(
            "error", CHECK, FILE_NAME,
            f"{FILE_NAME}: {FILES} is {str(recorded)[:_SHOWN]!r}; expected names with SHA-256",
        )  # fmt: skip
        return
    folder = artifact if artifact.is_dir() else artifact.parent
    names = {str(name): said for name, said in recorded.items()}
    if not artifact.is_dir():
        names = {name: said for name, said in names.items() if name == artifact.name}
    for name, said in names.items():
        yield from _compared(folder, name, said, known)
    for path in sorted(folder.glob(f"*{_SUFFIX}") if artifact.is_dir() else [artifact]):
        if path.name not in names:
            yield Finding(
                "warning", CHECK, path.name,
                f"{path.name} is not among the files whose SHA-256 {FILE_NAME} records, so that "
                "its bytes were compared with nothing: it was added, renamed or split anew since",
            )  # fmt: skip


def _compared(folder: Path, name: str, said: Any, known: dict[Path, str]) -> Iterator[Finding]:
    path = place(folder, f"{folder.name or 'x'}/{name}")
    digest = str(said).removeprefix("sha256:")
    shown = name[:_SHOWN]
    if path is None or not SHA256.fullmatch(digest):
        yield Finding(
            "error", CHECK, shown,
            f"{FILE_NAME} records {str(said)[:_SHOWN]!r} for {shown!r}; expected a file of the "
            "artifact, and sha256: with 64 digits: somebody changed it; fetch or make it again",
        )  # fmt: skip
    elif not path.is_file():
        yield Finding(
            "warning", CHECK, shown,
            f"{shown}, whose SHA-256 {FILE_NAME} records, is not there; fetch it again, if it was "
            "not removed, renamed or split anew on purpose",
        )  # fmt: skip
    else:
        if path not in known:
            known[path] = found_digest(path)
        found = known[path]
        if not SHA256.fullmatch(found):
            why = f"{shown} cannot be compared with what {FILE_NAME} records of it: {found}"
            yield Finding("error", CHECK, shown, why)
        elif found != digest:
            yield Finding(
                "error" if path.suffix == _SUFFIX else "warning", CHECK, shown,
                f"{shown} is not the file that was written: its SHA-256 is {found}, "
                f"{FILE_NAME} records {digest}; fetch or make it again, or, if it was changed on "
                f"purpose, take it out of {FILES} in {FILE_NAME}",
            )  # fmt: skip
