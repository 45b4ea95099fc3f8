"""A model on a server, opened by the headers of its files and the JSON beside them.

Headers are fetched several at a time and parsed by what parses those of local files; of tensors
not a byte is asked for. The JSON files lie in a temporary folder while the model is open, in which
its weight files exist by name only.

What comes from a server is bounded: 4 MB a config, 32 MB an index or a header, 64 MB in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.weight_files import read_index
from qtool.errors import FormatError, QtoolError, SourceError
from qtool.formats import safetensors_header
from qtool.formats.gguf_cursor import READ_AHEAD
from qtool.formats.gguf_file import GgufFile, first_parts, part_names
from qtool.formats.gguf_header import parse_header
from qtool.formats.safetensors_file import INDEX_NAME
from qtool.gguf.inspect import GgufInspection
from qtool.hub import unusable
from qtool.hub.answers import RefusedError, shown
from qtool.inspecting.inspect import Inspection, inspection
from qtool.record import FILE_NAME
from qtool.remote.places import Place, locate

if TYPE_CHECKING:
    from qtool.formats.gguf_header import Header
    from qtool.formats.safetensors_header import TensorInfo

_AT_ONCE = 8  # connections
_MAX_FILES = 4_096
_MAX_CONFIG_BYTES = 4_000_000
_MAX_INDEX_BYTES = 32_000_000
_MAX_HEADER_BYTES = 32_000_000
_MAX_RECEIVED = 64_000_000
_INDEX_ENDING = ".safetensors.index.json"
# What says how a checkpoint is quantized, and by whom.
_CONFIGS = (
    "config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    FILE_NAME,
)

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def opened(address: str) -> Iterator[tuple[Inspection | GgufInspection, Callable[[], int]]]:
    """The model at an address, and how many bytes have been fetched for it."""
    place = locate(address)
    with TemporaryDirectory(prefix="qtool-") as folder:
        try:
            yield _open(place, Path(folder)), lambda: place.server.received
        except QtoolError as error:
            # Nobody knows the temporary folder; what is wrong with it is so of the model.
            raise SourceError(str(error).replace(folder, place.where)) from error
        finally:
            place.server.close()


def _open(place: Place, folder: Path) -> Inspection | GgufInspection:
    file = place.file
    if file is None and place.names is not None:
        file = _only_gguf(place, place.names)
    if file is not None and file.lower().endswith(".gguf"):
        return _gguf(place, folder, file)
    if file is not None and not file.lower().endswith(".safetensors"):
        raise SourceError(f"{place.where}/{file}: expected a .gguf or .safetensors file")
    return _checkpoint(place, folder, file)


def _only_gguf(place: Place, names: frozenset[str]) -> str | None:
    """The GGUF model of a folder without a checkpoint; SourceError where it has several."""
    here = [name for name in names if "/" not in name]
    if any(name.endswith((".safetensors", _INDEX_ENDING)) for name in here):
        return None
    models = first_parts(Path(name) for name in sorted(names) if name.endswith(".gguf"))
    if len(models) > 1:
        listed = "".join(f"\n  {place.where}/{model}" for model in models)
        raise SourceError(f"{place.where}: holds {len(models)} GGUF models; name one:{listed}")
    if not models:
        raise unusable(place.where, sorted(names))
    return str(models[0])


def _all(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """function of every item, several at a time; the first failure ends it."""
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        return list(pool.map(function, items))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(place: Place, name: str, count: int) -> tuple[Callable[[int, int], bytes], int]:
    """A function that reads a file, whose first `count` bytes are fetched, and its length."""
    url = place.url_of(name)
    begun = place.server.part(url, 0, count)

    def read(offset: int, count: int) -> bytes:
        if offset + count <= len(begun.data):
            return begun.data[offset : offset + count]
        with place.server.reserved(count, _MAX_RECEIVED) as granted:
            if not granted:
                raise FormatError(
                    f"{shown(url)}: {count} more bytes of header; at most {_MAX_RECEIVED} are "
                    "fetched of one model: download it, and inspect the copy"
                )
            # Redirects are not asked for again: where they led is good for some minutes.
            return place.server.part(begun.url, offset, count, begun.total).data

    return read, begun.total


def _gguf(place: Place, folder: Path, file: str) -> GgufInspection:
    """A GGUF model by one of its parts; only the names of the parts are in the folder."""

    def header(part: Path) -> Header:
        return parse_header(*_begin(place, name_of(part), READ_AHEAD), part)

    def name_of(part: Path) -> str:
        return part.relative_to(folder).as_posix()

    path = folder / file
    headers = {path: header(path)}
    others = [part for part in part_names(path, headers[path]) if part != path]
    if place.names is not None:  # opening names those that are missing
        names = place.names
        others = [part for part in others if name_of(part) in names]
    headers |= dict(zip(others, _all(header, others), strict=True))
    return GgufInspection(GgufFile.of_headers(path, headers))


def _checkpoint(place: Place, folder: Path, file: str | None) -> Inspection:
    """A folder with its index, or one safetensors file."""
    configs = [name for name in _CONFIGS if place.names is None or name in place.names]
    indexes: list[str] = []
    if file is None and place.names is None:
        indexes = [INDEX_NAME]
    elif file is None and place.names is not None:
        indexes = [n for n in place.names if n.endswith(_INDEX_ENDING) and "/" not in n]
        if len(indexes) > 1 and INDEX_NAME in indexes:
            indexes = [INDEX_NAME]
    _all(lambda name: _save(place, folder, name), [*configs, *indexes])
    files = _weight_files(place, folder, file)
    sizes: dict[str, int] = {}

    def header(name: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        read, sizes[name] = _begin(place, name, 8)
        where = f"{place.where}/{name}"
        return safetensors_header.parse_header(read, sizes[name], where, _MAX_HEADER_BYTES)

    paths = [folder / name for name in files]
    headers = dict(zip(paths, _all(header, files), strict=True))
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    checkpoint = Checkpoint.open(folder if file is None else paths[0], headers.__getitem__)
    return inspection(Artifact.of(checkpoint), sum(sizes.values()))


def _save(place: Place, folder: Path, name: str) -> None:
    """Fetch a JSON file; where the server gives no list, one that is not there is none."""
    most = _MAX_INDEX_BYTES if name.endswith(_INDEX_ENDING) else _MAX_CONFIG_BYTES
    try:
        data = place.server.whole(place.url_of(name), most)
    except RefusedError:
        if place.names is None:
            return
        raise
    (folder / name).write_bytes(data)


def _weight_files(place: Place, folder: Path, file: str | None) -> list[str]:
    """The safetensors files that belong together."""
    if file is not None:
        return [file]
    indexes = list(folder.glob("*" + _INDEX_ENDING))
    if len(indexes) == 1:
        files = sorted(set(read_index(indexes[0]).values()))
        if len(files) > _MAX_FILES:
            raise FormatError(f"{indexes[0]}: names {len(files)} files; at most {_MAX_FILES}")
        if place.names is not None:
            files = [name for name in files if name in place.names]  # opening names the missing
        return files
    if place.names is None:
        return ["model.safetensors"]
    return [n for n in place.names if n.endswith(".safetensors") and "/" not in n]
