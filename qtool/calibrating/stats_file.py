"""Statistics in a file: safetensors, of which a site is read when it is asked for.

It holds, for every site, `site.<first reader>.count` and those of `.gram`, `.square`, `.mean_abs`
and `.max_abs` that were asked for; its metadata says which checkpoint tensors read the input of
each site.
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.calibrating.sites import Site
from qtool.calibrating.stats import NEEDS, SiteStats
from qtool.errors import FormatError, SourceError
from qtool.formats import safetensors_file as st
from qtool.formats.gguf_cursor import begins_as_gguf
from qtool.record import STATISTICS

_HEADER_MARGIN = 1 << 16
_FIELDS = ("gram", "square", "mean_abs", "max_abs")


class StatsWriter:
    """Writes statistics as they come, without holding them: `with StatsWriter(...) as writer`.

    The header of a safetensors file stands first but is known last. Room for it is left at the
    start (the format lets a header end in spaces); the file gets its name when it is complete.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str], site_count: int) -> None:
        """site_count: an upper bound of how many sites will be added, by which room is left."""
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._metadata = dict(metadata)
        self._readers: dict[str, list[str]] = {}
        self._entries: dict[str, dict[str, Any]] = {}
        self._room = _HEADER_MARGIN + 2048 * site_count
        self._end = 0
        try:
            self._file = open(self._partial, "wb")  # noqa: SIM115 (closed by __exit__)
            self._file.seek(8 + self._room)
        except OSError as error:
            raise SourceError(f"{path}: cannot be written ({error.strerror})") from error

    def add(self, site: Site, stats: SiteStats) -> None:
        """Append one site."""
        self._readers[site.id] = list(site.names)
        for field_name in _FIELDS:
            value = getattr(stats, field_name)
            if value is not None:
                self._append(f"site.{site.id}.{field_name}", "F32", value.astype("<f4", copy=False))
        self._append(f"site.{site.id}.count", "I64", np.array([stats.count], dtype="<i8"))

    def _append(self, name: str, dtype: str, value: NDArray[Any]) -> None:
        data = np.ascontiguousarray(value)
        self._entries[name] = {
            "dtype": dtype,
            "shape": list(data.shape),
            "data_offsets": [self._end, self._end + data.nbytes],
        }
        self._end += data.nbytes
        self._write(data.reshape(-1).view(np.uint8).data)

    def _write(self, data: memoryview | bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise SourceError(f"{self._path}: cannot be written ({error.strerror})") from error

    def _finish(self) -> None:
        metadata = {**self._metadata, STATISTICS: json.dumps(self._readers)}
        header = json.dumps({"__metadata__": metadata, **self._entries}).encode()
        assert len(header) <= self._room, (len(header), self._room)
        self._file.seek(0)
        self._write(struct.pack("<Q", self._room) + header.ljust(self._room))
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._partial, self._path)
        except OSError as error:
            raise SourceError(f"{self._path}: cannot be written ({error.strerror})") from error

    def __enter__(self) -> "StatsWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            self._partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class StatsFile:
    """Saved statistics; matrices are read when asked for."""

    path: Path
    metadata: Mapping[str, str]
    _entries: Mapping[str, st.TensorInfo] = field(repr=False)
    _site_of: Mapping[str, str] = field(repr=False)  # by the checkpoint name of any reader

    @classmethod
    def open(cls, path: Path) -> "StatsFile":
        """Read the header; FormatError where the file is not one that `qtool calibrate` wrote."""
        if begins_as_gguf(path):
            raise FormatError(
                f"{path}: a GGUF file; an importance matrix is given by --imatrix, and statistics "
                "for this are measured by `qtool calibrate MODEL -o STATS`"
            )
        entries, metadata = st.read_header(path)
        if STATISTICS not in metadata:
            raise FormatError(
                f"{path}: not a statistics file (its metadata has no {STATISTICS!r}); write one "
                "with `qtool calibrate MODEL -o STATS`"
            )
        readers = st.parse_json(metadata[STATISTICS].encode(), f"{path}: {STATISTICS}")
        site_of: dict[str, str] = {}
        for site, names in readers.items():
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise FormatError(f"{path}: the readers of {site!r} are not a list of names")
            if twice := next((name for name in names if name in site_of), None):
                raise FormatError(
                    f"{path}: {twice!r} reads the input of {site_of[twice]!r} and of {site!r}"
                )
            site_of |= dict.fromkeys(names, site)
        kept = {key: value for key, value in metadata.items() if key != STATISTICS}
        return cls(path, kept, entries, site_of)

    @property
    def fields(self) -> frozenset[str]:
        """What was measured: any of NEEDS."""
        return NEEDS.intersection(key.rpartition(".")[2] for key in self._entries)

    def read(self, name: str, needs: Iterable[str], width: int | None = None) -> SiteStats:
        """The statistics of the site that the checkpoint tensor `name` reads.

        width: its in_features. SourceError, naming the command, where something needed is missing;
        FormatError where what is there cannot be a statistic.
        """
        site = self._site_of.get(name)
        if site is None:
            raise SourceError(
                f"{self.path}: holds nothing for the input of {name!r}; run `qtool calibrate` "
                "again on this very model"
            )
        key = f"site.{site}.count"
        count = int(self._array(key, "I64", (1,))[0])
        if count < 0:
            raise FormatError(f"{self.path}: {key!r} is {count}, a number of tokens")
        found: dict[str, Any] = {}
        for need in sorted(needs) if count else ():
            key = f"site.{site}.{need}"
            if key not in self._entries:
                raise SourceError(
                    f"{self.path}: holds no {need} for the input of {name!r}, which this recipe "
                    "needs; run `qtool calibrate MODEL -o STATS --recipe RECIPE` with the recipes "
                    "you mean to use"
                )
            if width is None:
                width = max(self._entries[key].shape, default=0)
            value = self._array(key, "F32", (width, width) if need == "gram" else (width,))
            if not np.isfinite(value).all():
                raise FormatError(f"{self.path}: {key!r} has values that are not finite")
            if ((np.diagonal(value) if need == "gram" else value) < 0).any():
                raise FormatError(
                    f"{self.path}: {key!r} has sums of squares or of sizes below zero; write the "
                    "file again with `qtool calibrate`"
                )
            found[need] = value
        return SiteStats(count, **found)

    def _array(self, key: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        info = self._entries.get(key)
        if info is None:
            raise FormatError(f"{self.path}: lacks {key!r}")
        if (info.dtype, info.shape) != (dtype, shape):
            raise FormatError(
                f"{self.path}: {key!r} is {info.dtype} {list(info.shape)}, expected {dtype} "
                f"{list(shape)}; write the file again with `qtool calibrate`"
            )
        found: NDArray[Any] = st.as_array(st.read_range(self.path, info), info.dtype, info.shape)
        return found
