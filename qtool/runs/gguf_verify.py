"""Reading back a GGUF file before it gets its name.

Three things must hold: the header, read anew from the file, says what was planned: version, keys,
and every tensor with its type, shape and place; the file is as long as planned; and each piece has
the checksum it had when it was written. That values and scales are finite was seen while writing,
when each piece was dequantized.
"""

import os
from pathlib import Path

import numpy as np

from qtool.errors import FormatError
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_writer import VERSION, Layout
from qtool.gguf.pieces import Done, Pieces
from qtool.native.sums import checksum
from qtool.planning.gguf.planned import GgufPlan
from qtool.streaming.in_order import Steps, in_order


def verify(
    path: Path,
    plan: GgufPlan,
    layout: Layout,
    pieces: Pieces,
    done: Done,
    threads: int,
    steps: Steps,
) -> None:
    """FormatError names the first thing that is not as planned."""
    with GgufFile.open(path) as file:
        _compare(file, plan, layout)
        descriptor = file.descriptors[path]

        def worker() -> "Reader":
            return Reader(descriptor, layout, pieces, done)

        in_order(len(pieces), threads, worker, steps)


class Reader:
    """One thread's buffer, and the way of a piece back through it."""

    def __init__(self, descriptor: int, layout: Layout, pieces: Pieces, done: Done) -> None:
        self._descriptor, self._layout = descriptor, layout
        self._pieces, self._done = pieces, done
        self._buffer = np.empty(0, np.uint8)

    def __call__(self, number: int) -> None:
        """FormatError where a piece is not as it was written."""
        if not self.same(number):
            name = self._layout.tensors[self._pieces[number].tensor].name
            raise FormatError(
                f"tensor {name!r} reads back with other bytes than were written; the disk or the "
                "memory is faulty"
            )

    def same(self, number: int) -> bool:
        """Whether the file has a piece as it was written."""
        piece = self._pieces[number]
        spec = self._layout.tensors[piece.tensor]
        position = self._layout.starts[piece.tensor] + piece.first * spec.row_bytes
        nbytes = (piece.last - piece.first) * spec.row_bytes
        if self._buffer.size < nbytes:
            self._buffer = np.empty(nbytes, np.uint8)
        data = self._buffer[:nbytes]
        have = 0
        while have < nbytes:
            got = os.preadv(self._descriptor, [data.data[have:]], position + have)
            if not got:
                break
            have += got
        return have == nbytes and checksum(data) == self._done.written[number]


def _compare(file: GgufFile, plan: GgufPlan, layout: Layout) -> None:
    size = os.fstat(file.descriptors[file.path]).st_size
    if (file.version, size) != (VERSION, layout.size):
        raise FormatError(
            f"{file.path}: reads back as version {file.version} with {size} bytes; planned were "
            f"version {VERSION} and {layout.size} bytes"
        )
    if [*file.metadata] != [*plan.metadata]:
        raise FormatError(f"{file.path}: reads back with other metadata keys than planned")
    for key, value in plan.metadata.items():
        if file.metadata[key] != value:
            raise FormatError(f"{file.path}: {key} reads back as another value than planned")
    found = [(t.name, t.shape, t.type, t.start) for t in file.tensors.values()]
    wanted = [
        (spec.name, spec.shape, spec.type, start)
        for spec, start in zip(layout.tensors, layout.starts, strict=True)
    ]
    for have, want in zip(found, wanted, strict=False):
        if have != want:
            raise FormatError(f"{file.path}: has tensor {have}; planned was {want}")
    if len(found) != len(wanted):
        raise FormatError(f"{file.path}: has {len(found)} tensors; planned were {len(wanted)}")
