"""Weights that are 0 where no model has it so: what an interrupted download leaves behind.

Every byte of a source is read once at least. As it passes, it is looked at whether it may belong to
a long stretch of zeros: 8 in 1024 bytes are enough. The few tensors of which that is so are read
once more, and judged as `qtool verify` judges them: so are packed codes, of which 0 is no weight
of 0, where what they stand for is quantized again.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints.checkpoint import Checkpoint, View
from qtool.checkpoints.holes import may_have_zeros, said_blank
from qtool.checkpoints.padding import asked_in, may_be_padded
from qtool.messages.sentences import FETCH, count, some
from qtool.scheme import GroupQuant, Scheme


class Zeros:
    """Is shown what is read of a checkpoint, by any thread."""

    def __init__(self, path: Path, requantize: bool = False) -> None:
        """requantize: of one that is quantized the numbers that it stands for."""
        self._path, self._requantize = path, requantize
        self._seen: set[str] = set()

    @property
    def seen(self) -> list[str]:
        """The tensors to look at, so far."""
        return sorted(self._seen.copy())

    def __call__(self, file: Path, start: int, raw: NDArray[np.uint8]) -> None:
        """Bytes of one tensor, from `start` of the file on."""
        if raw.size and may_have_zeros(raw):
            starts, names = self._places[file]
            self._seen.add(names[bisect_right(starts, start) - 1])

    def made(self, name: str, raw: NDArray[np.uint8]) -> None:
        """Bytes of what is made of a tensor that lies there as codes."""
        if raw.size and may_have_zeros(raw):
            self._seen.add(name)

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        """As its numbers are read: of a quantized one those that codes stand for."""
        from qtool.converting.source import plain

        found = plain(self._path) if self._requantize else None
        return found or Checkpoint.open(self._path)

    @property
    def _stored(self) -> Checkpoint:
        """As it lies there, whatever is made of it."""
        found = self._checkpoint
        return found.original if isinstance(found, View) else found

    @cached_property
    def _places(self) -> Mapping[Path, tuple[list[int], list[str]]]:
        """Where the tensors of each file begin."""
        places: dict[Path, list[tuple[int, str]]] = defaultdict(list)
        for name, info in self._stored.tensors.items():
            if info.nbytes:
                places[self._stored.file_of(name)].append((info.start, name))
        return {
            file: ([at for at, _ in sorted(some)], [name for _, name in sorted(some)])
            for file, some in places.items()
        }

    def told(self, finished: Iterable[Mapping[str, Any]]) -> list[str]:
        """Sentences on them. finished: the lines of the journal, those of earlier tries too."""
        seen = self._seen.union(*(_names(line.get("zeros")) for line in finished))
        if not seen:
            return []
        # Takes longer to import than most sources to read.
        from qtool.verification.dense import emptied

        tensors = self._checkpoint.tensors
        found = {name: emptied(self._checkpoint, name) for name in tensors if name in seen}
        said = {name: what for name, what in found.items() if what is not None}
        holes = {} if self._stored is self._checkpoint else self._holes(seen)
        return together({**holes, **said})

    def _holes(self, seen: Collection[str]) -> dict[str, str]:
        """What of packed codes is 0, by the name of the matrix."""
        from qtool.artifacts.artifact import Artifact
        from qtool.verification.matrix import codes_of, hole_of_codes, is_packed

        artifact, found = Artifact.open(self._path), dict[str, str]()
        zeros_added = asked_in((artifact.provenance or {}).get("recipe"))
        for entry in artifact.entries.values():
            if not isinstance(entry.scheme, Scheme) or (zeros_added and may_be_padded(entry.name)):
                continue
            codes = codes_of(artifact, entry)
            if codes.name not in seen or not is_packed(codes, entry.scheme):
                continue  # 0 is a weight of 0 there, which is told by what is made of it
            quant = artifact.read(entry.name)
            assert isinstance(quant, GroupQuant)
            raw = artifact.checkpoint.raw(codes.name)
            if hole := hole_of_codes(codes, raw, quant):
                found[entry.name] = said_blank(hole, FETCH)
        return found


def _names(value: object) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def together(said: Mapping[str, str]) -> list[str]:
    """What is wrong with each tensor, as sentences; of those of which the same is, in one."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name, what in said.items():
        alike[what].append(name)
    return [
        f"{names[0]}: {what}"
        if len(names) == 1
        else f"{count(len(names), 'tensor')} ({some(names)}): {what}"
        for what, names in alike.items()
    ]
