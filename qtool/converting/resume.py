"""A conversion that goes on where an earlier one stopped, tensor by tensor.

    {"done": TENSOR, "checksums": {stored tensor: CRC-32, ...}, "rounded": what was lost, or null}
    {"done": TENSOR, "checksum": CRC-32}            of a GGUF file

Tensors are written in their order, so that those of an earlier run are the first ones: as far as
the files have them as the journal says. What was begun with other options, or of another source, is
not gone on with: it costs no more than time, and is made anew.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from qtool.checkpoints.gguf_models import source_files
from qtool.converting.certificate import Rounded
from qtool.converting.request import Request
from qtool.formats.gguf_writer import GgufWriter
from qtool.formats.gguf_writer import Layout as GgufLayout
from qtool.formats.safetensors_file import Layout, StreamWriter
from qtool.messages.progress import Progress
from qtool.workspaces import program
from qtool.workspaces.differences import LAYOUT, SHARDS, differences
from qtool.workspaces.identity import file_facts
from qtool.workspaces.journal import Journal
from qtool.workspaces.staging import clear_beside, staged
from qtool.workspaces.watched import marks
from qtool.workspaces.workspace import COMMAND, Workspace, workspace

_SHOWN = 4  # differences in a sentence
_AT_ONCE = 1 << 24  # bytes that are read back together


@dataclass(frozen=True)
class Place:
    """Where something is made, what is finished of it, and what is told when all is."""

    path: Path
    journal: Journal | None
    conclude: Callable[[Mapping[str, Any]], None]


@contextmanager
def resumed(request: Request, source: Path, progress: Progress, layout: Layout) -> Iterator[Place]:
    """Where the output is made; it gets its name when the body ends.

    source: a folder, or a GGUF file. AlreadyMade where an earlier run of the same was killed just
    after that.
    """
    headers = b"".join(file.header for file in layout.files)
    with _resumed(request, source, progress, headers, layout.size, is_folder=True) as space:
        clear_beside(space.artifact, {file.name for file in layout.files})
        yield Place(space.artifact, space.journal, space.conclude)


@contextmanager
def resumed_file(
    request: Request, source: Path, progress: Progress, layout: GgufLayout
) -> Iterator[tuple[Place, Journal]]:
    """The same of a GGUF file."""
    with _resumed(request, source, progress, layout.header, layout.size, is_folder=False) as space:
        yield Place(space.artifact, space.journal, space.conclude), space.journal


@contextmanager
def _resumed(
    request: Request, source: Path, progress: Progress, headers: bytes, size: int, *,
    is_folder: bool,
) -> Iterator[Workspace]:  # fmt: skip
    files = source_files(source)
    facts = {
        **program.facts(),
        COMMAND: "convert",
        "conversion": {
            "to": request.target.name,
            "lossy": request.lossy,
            "dtype": request.dtype,
            "assume": request.assume,
        },
        "source": [file_facts(file) for file in files],
        SHARDS: request.max_shard_bytes,
        LAYOUT: hashlib.sha256(headers).hexdigest(),
    }

    def stale(before: Mapping[str, Any]) -> bool:
        if before.get(COMMAND) != "convert":
            return False  # of another command, which is refused
        found = [(k, before.get(k), v) for k, v in facts.items() if before.get(k) != v]
        said = [one for pair in found for one in differences(*pair)]
        if found:
            progress.say(
                "starting over: an earlier run that was not finished was of something else "
                f"({', '.join(said[:_SHOWN])})"
            )
        return bool(found)

    with workspace(
        request.out,
        is_folder=is_folder,
        nbytes=size,
        fresh=request.fresh,
        sources=marks(files),
        replace=request.replace,
        stale=stale,
        facts=facts,
    ) as space:
        space.agree(facts)
        yield space


@contextmanager
def at_once(out: Path) -> Iterator[Place]:
    """The same of what is made anew in any case."""
    with staged(out) as folder:
        yield Place(folder, None, lambda _: None)


def finished(
    journal: Journal | None, writer: StreamWriter, steps: Sequence[tuple[str, set[str]]]
) -> list[Rounded | None]:
    """Of the leading steps that an earlier run has finished what was lost. steps: by name, with the
    names of what is stored of each."""
    found: list[Rounded | None] = []
    for name, stored in steps if journal is not None else ():
        assert journal is not None
        entry = journal.done.get(name, {})
        sums, lost = entry.get("checksums"), entry.get("rounded")
        if not isinstance(sums, dict) or sums.keys() != stored or not writer.restore(sums):
            break
        try:
            found.append(None if lost is None else Rounded(**lost))
        except TypeError:  # of a line that commit() never wrote
            break
    return found


def commit(
    journal: Journal | None,
    writer: StreamWriter,
    step: tuple[str, set[str]],
    rounded: Rounded | None = None,
) -> None:
    """A step is written."""
    if journal is None:
        return
    name, stored = step
    sums = {one: writer.checksums[one] for one in sorted(stored)}
    journal.commit(name, checksums=sums, rounded=None if rounded is None else rounded.json())


def finished_rows(journal: Journal, writer: GgufWriter, path: Path) -> int:
    """How many of a GGUF file's tensors an earlier run has written, from the first one on, and the
    file has as they were; the writer takes them as written."""
    with path.open("rb") as file:
        for number, spec in enumerate(writer.layout.tensors):
            known = journal.done.get(spec.name, {}).get("checksum")
            if known is None or _checksum(file, writer.layout.starts[number], spec.nbytes) != known:
                return number
            writer.restored(number, 0, spec.rows)
    return len(writer.layout.tensors)


def _checksum(file: BinaryIO, start: int, nbytes: int) -> int:
    file.seek(start)
    found = 0
    for first in range(0, nbytes, _AT_ONCE):
        found = zlib.crc32(file.read(min(_AT_ONCE, nbytes - first)), found)
    return found


def say(progress: Progress, done: int, count: int) -> None:
    """Tell the user what is taken over."""
    if done:
        progress.say(f"going on with an earlier run: {done} of {count} tensors are written")
