"""One file of a hub into its cache: resumed where an earlier attempt ended, digest checked.

    blobs/DIGEST.incomplete      grows while the file comes, and stays when the run is stopped
    blobs/DIGEST                 the whole file, once its digest is that of the hub

huggingface_hub gives the session, the token, the address and the lock; what it downloads by itself
it begins anew after a run that was killed, and compares with its length only.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from qtool.errors import SourceError
from qtool.hub.failures import pause_before_next, status_of, transport_errors
from qtool.hub.listing import HubFile

if TYPE_CHECKING:
    from hashlib import _Hash

_PIECE = 1 << 20
TIMEOUT = 30.0  # seconds without a byte


class StoppedError(Exception):
    """Another file failed, or the run was ended."""


@dataclass(frozen=True)
class Place:
    """Where the files of a repository go, and where they come from."""

    where: str
    blobs: Path
    locks: Path
    url_of: Callable[[str], str]
    headers: dict[str, str]


def hasher(file: HubFile, size: int) -> _Hash:
    """What digests a file as the hub does: SHA-256, or git's SHA-1 of a blob."""
    if file.sha256 is not None:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def is_as_stated(path: Path, file: HubFile) -> bool:
    """Whether a file has the digest and the size that the hub states. Reads all of it."""
    size = path.stat().st_size
    if file.size not in (None, size):
        return False
    digest = hasher(file, size)
    with path.open("rb") as content:
        while piece := content.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest() == file.etag


def transfer(
    place: Place,
    file: HubFile,
    advance: Callable[[int], None],
    pause: Callable[[float, BaseException], None],
    stop: threading.Event,
) -> int:
    """Bring one file into the cache; bytes that came over the network.

    SourceError where what came has another digest than the hub states: it is removed.
    """
    from huggingface_hub.utils import WeakFileLock

    etag, size = file.etag, file.size
    if etag is None or size is None:
        raise ValueError(f"{file.name}: no digest to check it with")
    blob = place.blobs / etag
    partial = place.blobs / f"{etag}.incomplete"
    place.blobs.mkdir(parents=True, exist_ok=True)
    place.locks.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(place.locks / f"{etag}.lock"):
        if blob.exists():  # another process brought it meanwhile
            advance(size)
            return 0
        with partial.open("ab+") as out:
            coming = _Coming(out, file, size, place, advance, stop)
            coming.resume()
            coming.run(pause)
            os.fsync(out.fileno())
        if coming.digest.hexdigest() != etag:
            found = coming.digest.hexdigest()
            partial.unlink(missing_ok=True)
            raise SourceError(
                f"{place.where}: {file.name} came with the digest {found}, and the hub states "
                f"{etag}: it was damaged on its way or on the disk, and is removed; run this again"
            )
        partial.replace(blob)
    return coming.received


class _Coming:
    """A file on its way: what is on the disk, and its digest so far."""

    def __init__(
        self,
        out: IO[bytes],
        file: HubFile,
        size: int,
        place: Place,
        advance: Callable[[int], None],
        stop: threading.Event,
    ) -> None:
        self.out = out
        self.file = file
        self.size = size
        self.place = place
        self.advance = advance
        self.stop = stop
        self.digest = hasher(file, size)
        self.have = 0
        self.received = 0

    def resume(self) -> None:
        """Take what an earlier run left."""
        if os.fstat(self.out.fileno()).st_size > self.size:
            self.restart()
        self.out.seek(0)
        while piece := self.out.read(_PIECE):
            self._check_stop()
            self.digest.update(piece)
            self.have += len(piece)
        self.advance(self.have)

    def restart(self) -> None:
        """Throw away what came."""
        self.out.seek(0)
        self.out.truncate()
        self.advance(-self.have)
        self.digest, self.have = hasher(self.file, self.size), 0

    def run(self, pause: Callable[[float, BaseException], None]) -> None:
        """Ask for what is missing, again where the connection breaks off or the server is busy."""
        failures = 0
        while self.have < self.size:
            before = self.have
            try:
                self._ask()
                if self.have < self.size:
                    raise ConnectionError(
                        f"the server ended {self.file.name} after {self.have} of {self.size} bytes"
                    )
            except transport_errors() as error:
                if _is_local(error):
                    raise
                failures = 1 if self.have > before else failures + 1
                wait = pause_before_next(error, failures)
                if wait is None:
                    raise
                pause(wait, error)

    def _ask(self) -> None:
        """One request for the rest."""
        from huggingface_hub.utils import get_session, hf_raise_for_status

        self._check_stop()
        # Compressed on its way, a part of it would be a part of something else.
        headers = self.place.headers | {"Accept-Encoding": "identity"}
        if self.have:
            headers["Range"] = f"bytes={self.have}-{self.size - 1}"
        session: Any = get_session()
        url = self.place.url_of(self.file.name)
        with session.stream(
            "GET", url, headers=headers, timeout=TIMEOUT, follow_redirects=True
        ) as response:
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            begins = response.headers.get("Content-Range", "").startswith(f"bytes {self.have}-")
            if self.have and not (response.status_code == 206 and begins):
                self.restart()  # the server does not know ranges
            for piece in response.iter_bytes():
                self._check_stop()
                if self.have + len(piece) > self.size:
                    raise SourceError(
                        f"{self.place.where}: {self.file.name} is longer than the {self.size} "
                        "bytes that the hub states"
                    )
                self.out.write(piece)
                self.out.flush()
                self.digest.update(piece)
                self.have += len(piece)
                self.received += len(piece)
                self.advance(len(piece))

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise StoppedError


def _is_local(error: Exception) -> bool:
    """Whether the disk failed, and not the network."""
    if status_of(error) is not None or not isinstance(error, OSError):
        return False
    return not isinstance(error, ConnectionError | TimeoutError)
