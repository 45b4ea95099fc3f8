"""A repository of the hub in huggingface_hub's cache, at one commit and with its digests checked.

    list what there is -> choose -> bring what is missing -> links in snapshots/COMMIT -> check

Every file of the snapshot is compared with the digest that the hub states once, also those that
another program downloaded; a file that has another is taken out of the cache.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qtool.errors import SourceError
from qtool.hub import UNWANTED, WANTED, HubModel, unusable
from qtool.hub.failures import explained, first_line, no_room, status_of, transport_errors
from qtool.hub.listing import COMMIT, HubFile, Listing, Memory, ask, named_by_digest
from qtool.hub.transfer import Place, StoppedError, is_as_stated, transfer
from qtool.messages.progress import Progress

_WEIGHTS = (".safetensors", ".gguf")
_AT_ONCE = 4  # files
_SLACK = 64 << 20  # bytes that stay free on the disk


@dataclass(frozen=True)
class Selection:
    """Names of files: patterns such as *.safetensors."""

    include: tuple[str, ...] = WANTED
    exclude: tuple[str, ...] = UNWANTED
    checkpoint: bool = True  # has to be one that can be quantized
    said: str | None = None  # how a person names them

    def __str__(self) -> str:
        return self.said or " or ".join(self.include)


@dataclass(frozen=True)
class Snapshot:
    """A folder of the cache, and what was done for it; or the model that ships with qtool."""

    model: HubModel | None  # None: the shipped one, at no commit
    commit: str | None
    folder: Path
    files: tuple[HubFile, ...]
    received: dict[str, int] = field(default_factory=dict)  # bytes over the network, by file
    checked: int = 0  # files compared with their digests now
    named: Path | None = None  # the one file that was asked for

    def json(self) -> dict[str, Any]:
        """For --json, without seconds."""
        return {
            "repository": None if self.model is None else self.model.repository,
            "revision": None if self.model is None else self.model.revision,
            "commit": self.commit,
            "folder": str(self.folder),
            "file": None if self.named is None else str(self.named),
            "files": [
                {
                    "name": file.name,
                    "size_bytes": file.size,
                    "digest": file.digest,
                    "fetched_bytes": self.received.get(file.name, 0),
                }
                for file in self.files
            ],
            "size_bytes": sum(file.size or 0 for file in self.files),
            "fetched_bytes": sum(self.received.values()),
            "checked_files": self.checked,
        }


def fetch(model: HubModel, selection: Selection, progress: Progress | None = None) -> Snapshot:
    """The snapshot of a revision, with every chosen file in it."""
    where = f"{model.repository} on the hub (there is no such file or folder here)"
    # Bytes by the billion should not come unseen, whichever command asks for them.
    progress = progress or Progress(quiet=not sys.stderr.isatty())
    with explained(model, where):
        listing = _listing(model, progress)
        if listing is None:
            return _from_cache(model, selection, where, progress)
        names = [file.name for file in listing.files]
        chosen = listing.chosen(selection.include, selection.exclude)
        if selection.checkpoint and not _is_checkpoint(chosen):
            raise unusable(where, names)
        if not chosen:
            raise SourceError(
                f"{where} has no file like {selection}; it has "
                + ", ".join(names[:8])
                + (" ..." if len(names) > 8 else "")
            )
        return _Fetching(model, listing, chosen, where, progress).run()


def _is_checkpoint(files: Sequence[HubFile]) -> bool:
    return any(f.name.endswith(".safetensors") and "/" not in f.name for f in files)


def _listing(model: HubModel, progress: Progress) -> Listing | None:
    """What the revision is; None where the hub does not answer and the cache may do."""
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    if COMMIT.fullmatch(model.revision):
        known = Memory.open(model.repository, model.revision).listing
        if known is not None:
            return known
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        return ask(model, _pauses(progress, threading.Event()))
    except (hub.GatedRepoError, hub.RepositoryNotFoundError, hub.RevisionNotFoundError):
        raise
    except transport_errors():
        return None  # what huggingface_hub says of the cache then names the cause


def _pauses(progress: Progress, stop: threading.Event) -> Callable[[float, BaseException], None]:
    def pause(seconds: float, error: BaseException) -> None:
        status = status_of(error)
        said = f"the hub answers with status {status}" if status else first_line(error)
        progress.say(f"note: {said}; once more in {seconds:.0f} s")
        stop.wait(seconds)

    return pause


def _from_cache(model: HubModel, selection: Selection, where: str, progress: Progress) -> Snapshot:
    """What the cache has, without the hub; its own sentence where that is not enough."""
    from huggingface_hub import constants, snapshot_download

    folder = Path(
        snapshot_download(
            model.repository,
            revision=model.revision,
            allow_patterns=list(selection.include),
            ignore_patterns=list(selection.exclude),
        )
    )
    if not constants.HF_HUB_OFFLINE:
        progress.say(f"note: the hub does not answer; the cache has {model} at {folder.name}")
    files = []
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        name = path.relative_to(folder).as_posix()
        files.append(named_by_digest(HubFile(name, path.stat().st_size), path.resolve()))
    chosen = Listing(folder.name, tuple(files)).chosen(selection.include, selection.exclude)
    if selection.checkpoint and not _is_checkpoint(chosen):
        raise unusable(where, [file.name for file in files])
    memory = Memory.open(model.repository, folder.name)
    found, checked = _check(folder, chosen, memory, where, progress, asked=False)
    memory.keep(None)
    return Snapshot(model, folder.name, folder, found, {}, checked)


@dataclass
class _Fetching:
    """One snapshot on its way."""

    model: HubModel
    listing: Listing
    chosen: list[HubFile]
    where: str
    progress: Progress

    def run(self) -> Snapshot:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        cache = Path(constants.HF_HUB_CACHE)
        name = repo_folder_name(repo_id=self.model.repository, repo_type="model")
        self.storage = cache / name
        self.locks = cache / ".locks" / name
        folder = self.storage / "snapshots" / self.listing.commit
        memory = Memory.open(self.model.repository, self.listing.commit)
        missing = [file for file in self.chosen if not self._is_there(folder, file)]
        received: dict[str, int] = {}
        if missing:
            # Larger ones than that the hub gives by its own protocol only, which _link speaks.
            most = getattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 50_000_000_000)
            received = self._bring(
                [f for f in missing if f.etag and f.size is not None and f.size <= most]
            )
            for file in missing:
                blob = self.storage / "blobs" / (file.etag or "")
                if file.name in received and blob.is_file():
                    memory.remember(blob, file)
        if missing or not self._ref_is_right():
            self._link(folder)
        files, checked = _check(folder, self.chosen, memory, self.where, self.progress)
        memory.keep(self.listing)
        return Snapshot(self.model, self.listing.commit, folder, files, received, checked)

    def _is_there(self, folder: Path, file: HubFile) -> bool:
        path = folder / file.name
        return path.is_file() and file.size in (None, path.stat().st_size)

    def _ref_is_right(self) -> bool:
        """Whether the cache knows, for when there is no network, what the revision means."""
        if self.model.revision == self.listing.commit:
            return True
        ref = self.storage / "refs" / self.model.revision
        return ref.is_file() and ref.read_text(encoding="utf-8").strip() == self.listing.commit

    def _bring(self, files: Sequence[HubFile]) -> dict[str, int]:
        """Files into blobs/, several at once; bytes received by name. The first failure ends it."""
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        blobs = self.storage / "blobs"
        files = [file for file in files if not (blobs / (file.etag or "")).is_file()]
        if not files or constants.HF_HUB_OFFLINE:
            return {}
        self._check_room(blobs, files)

        def url_of(name: str) -> str:
            return hf_hub_url(self.model.repository, name, revision=self.listing.commit)

        place = Place(self.where, blobs, self.locks, url_of, build_hf_headers(library_name="qtool"))
        stop = threading.Event()
        pauses = _pauses(self.progress, stop)
        total = sum(file.size or 0 for file in files)
        pool = ThreadPoolExecutor(_AT_ONCE)
        with self.progress.transfer(f"{self.model.repository}, {len(files)} files", total) as count:

            def bring(file: HubFile) -> int:
                try:
                    return transfer(place, file, count, pauses, stop)
                except StoppedError:
                    return 0
                except BaseException:
                    stop.set()
                    raise

            futures = {file.name: pool.submit(bring, file) for file in files}
            try:
                return {name: future.result() for name, future in futures.items()}
            finally:  # Ctrl-C too: nothing is written after this
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)

    def _check_room(self, blobs: Path, files: Sequence[HubFile]) -> None:
        blobs.mkdir(parents=True, exist_ok=True)
        parts = (blobs / f"{file.etag}.incomplete" for file in files)
        have = sum(part.stat().st_size for part in parts if part.is_file())
        needed = sum(file.size or 0 for file in files) - have
        free = shutil.disk_usage(blobs).free
        if needed + _SLACK > free:
            raise SourceError(no_room(self.where, needed, free))

    def _link(self, folder: Path) -> None:
        """huggingface_hub's own links and references, to blobs that are there already."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import (
            are_progress_bars_disabled,
            disable_progress_bars,
            enable_progress_bars,
        )

        were = are_progress_bars_disabled()
        disable_progress_bars()
        try:
            made = snapshot_download(
                self.model.repository,
                revision=self.model.revision,
                allow_patterns=[_literal(file.name) for file in self.chosen],
            )
        finally:
            if not were:
                enable_progress_bars()
        if Path(made).name != folder.name:
            raise SourceError(
                f"{self.where}: {self.model.revision} was {folder.name} and now is "
                f"{Path(made).name}: it changed meanwhile, run this again"
            )


def _literal(name: str) -> str:
    """A pattern that one name matches."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _check(
    folder: Path,
    files: Sequence[HubFile],
    memory: Memory,
    where: str,
    progress: Progress,
    *,
    asked: bool = True,
) -> tuple[tuple[HubFile, ...], int]:
    """Compare files with their digests, once: the files with these, and how many were compared.

    SourceError where one differs: it is taken out of the cache; and for weights without a digest,
    where a hub was asked for one.
    """
    blobs = (folder.parent.parent / "blobs").resolve()
    found, unchecked, count = [], [], 0
    for listed in files:
        path = folder / listed.name
        blob = path.resolve()
        file = named_by_digest(listed, blob) if blob.parent == blobs else listed
        found.append(file)
        if not path.is_file() or memory.knows(blob, file):
            continue
        if file.etag is None:
            unchecked.append(file.name)
            continue
        if not is_as_stated(path, file):
            path.unlink()
            if blob.parent == blobs:  # where a link leads elsewhere, that is not ours to remove
                blob.unlink(missing_ok=True)
            raise SourceError(
                f"{where}: {file.name} in the cache is not what the hub states (expected "
                f"{file.digest}); it is removed, run this again to download it anew"
            )
        memory.remember(blob, file)
        count += 1
    weights = [name for name in unchecked if name.endswith(_WEIGHTS)]
    if weights and asked:
        raise SourceError(
            f"{where}: neither the hub's list nor its answer states a digest of {weights[0]}, "
            "which may have been damaged on its way; use a hub that does (HF_ENDPOINT), or name "
            f"the folder itself if you trust it: {folder}"
        )
    if unchecked:
        progress.say(
            f"note: no digest is known of {len(unchecked)} files, which were not compared: "
            + ", ".join(unchecked[:8])
        )
    return tuple(found), count
