"""The files of a repository at one commit, with their digests, as the hub states them.

    GET /api/models/OWNER/NAME/revision/REV?blobs=true
        {"sha", "siblings": [{"rfilename", "size", "blobId", "lfs": {"sha256", "size"}}]}

A commit never changes: what a hub was asked once is kept (in QTOOL_CACHE, apart for each
HF_ENDPOINT), and with it which files of the cache have been compared with which digests, by size
and time of change.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from qtool.errors import FormatError, SourceError
from qtool.formats.safetensors_header import read_json
from qtool.hub import HubModel
from qtool.hub.answers import shown
from qtool.hub.failures import with_patience

COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class HubFile:
    """One file; `sha256` of those in LFS, `sha1` (git's, of a blob) of the others."""

    name: str
    size: int | None
    sha256: str | None = None
    sha1: str | None = None

    @property
    def etag(self) -> str | None:
        """Its name in the cache, which is its digest; None where the hub states none."""
        return self.sha256 or self.sha1

    @property
    def digest(self) -> str | None:
        """The digest with its kind."""
        if self.sha256 is not None:
            return f"sha256:{self.sha256}"
        return None if self.sha1 is None else f"git-sha1:{self.sha1}"


@dataclass(frozen=True)
class Listing:
    """What a revision of a repository is."""

    commit: str
    files: tuple[HubFile, ...]
    private: bool | None = None  # None where the hub was not asked now, or does not say

    def chosen(self, wanted: Sequence[str], unwanted: Sequence[str]) -> list[HubFile]:
        """The files whose names match."""
        return [
            file
            for file in self.files
            if any(fnmatchcase(file.name, pattern) for pattern in wanted)
            and not any(fnmatchcase(file.name, pattern) for pattern in unwanted)
        ]


def ask(model: HubModel, pause: Callable[[float, BaseException], None]) -> Listing:
    """What the hub says of a revision; errors of huggingface_hub where it does not."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(library_name="qtool")
    try:
        info = with_patience(
            lambda: api.model_info(model.repository, revision=model.revision, files_metadata=True),
            pause,
        )
    except (HfHubHTTPError, HFValidationError):
        raise
    except (ValueError, LookupError, TypeError, AttributeError):
        raise SourceError(
            f"{model}: {shown(constants.ENDPOINT)} answers with something else than a hub does; "
            "check HF_ENDPOINT, and whether a proxy answers in its place"
        ) from None
    if info.sha is None or COMMIT.fullmatch(info.sha) is None:
        raise SourceError(f"{model}: the hub states no commit of it; expected 40 hex digits")
    files = []
    for sibling in info.siblings or ():
        sha256 = None if sibling.lfs is None else sibling.lfs.sha256
        size = sibling.size if sibling.lfs is None else sibling.lfs.size
        if not _is_inside(sibling.rfilename):
            raise SourceError(
                f"{model}: the hub names a file {sibling.rfilename!r}, which would lie outside of "
                "its folder; nothing is taken from it"
            )
        files.append(_file(sibling.rfilename, size, sha256, sibling.blob_id))
    return Listing(info.sha, tuple(files), info.private)


def _is_inside(name: str) -> bool:
    """Whether a name stays in the folder that it is joined to, on every system."""
    parts = name.split("/")
    return not any(part in ("", ".", "..") or "\\" in part or ":" in part for part in parts) and (
        name.isprintable()
    )


def named_by_digest(file: HubFile, blob: Path) -> HubFile:
    """A file with the digest that it is called by in the cache, where the listing states none.

    huggingface_hub calls what it downloads by the ETag that the server sent with it.
    """
    if file.etag is not None:
        return file
    return _file(file.name, file.size, blob.name, blob.name)


def _file(name: str, size: int | None, sha256: str | None, sha1: str | None) -> HubFile:
    """A file, with such digests only as may be names of files here."""
    good256 = sha256 if sha256 is not None and _SHA256.fullmatch(sha256) else None
    good1 = sha1 if sha1 is not None and COMMIT.fullmatch(sha1) and good256 is None else None
    return HubFile(name, size, good256, good1)


@dataclass
class Memory:
    """What is known of a repository at one commit."""

    path: Path
    listing: Listing | None
    checked: dict[str, list[int | str]]

    @classmethod
    def open(cls, repository: str, commit: str) -> Memory:
        """What was kept of what this hub says; nothing where it cannot be read."""
        from huggingface_hub import constants

        said_by = hashlib.sha256(shown(constants.ENDPOINT).encode()).hexdigest()[:16]
        path = cache_folder() / said_by / repository.replace("/", "--") / f"{commit}.json"
        try:
            found = read_json(path)
            files = tuple(
                _file(one["name"], one["size"], one["sha256"], one["sha1"])
                for one in found["files"]
            )
            checked: dict[str, list[int | str]] = {
                str(k): [int(v[0]), int(v[1]), str(v[2])] for k, v in found["checked"].items()
            }
        except (SourceError, FormatError, LookupError, TypeError, ValueError, AttributeError):
            return cls(path, None, {})
        return cls(path, Listing(commit, files) if files else None, checked)

    def knows(self, path: Path, file: HubFile) -> bool:
        """Whether what lies there is what was compared with this file's digest."""
        return file.etag is not None and self.checked.get(path.name) == [*_state(path), file.etag]

    def remember(self, path: Path, file: HubFile) -> None:
        """What lies there has this file's digest."""
        if file.etag is not None:
            self.checked[path.name] = [*_state(path), file.etag]

    def keep(self, listing: Listing | None) -> None:
        """Writes it; a cache that cannot be written is none."""
        self.listing = listing or self.listing
        files = () if self.listing is None else self.listing.files
        content: dict[str, Any] = {"files": [asdict(f) for f in files], "checked": self.checked}
        written = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(json.dumps(content), encoding="utf-8")
            written.replace(self.path)
        except OSError:
            return


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def cache_folder() -> Path:
    """Where this is kept: QTOOL_CACHE, or qtool in the user's cache."""
    given = os.environ.get("QTOOL_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return (Path(given) if given else Path(home) / "qtool") / "hub"
