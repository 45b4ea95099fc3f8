"""Reading back a GGUF file before it gets its name.

Three things must hold: the header, read anew from the file, says what was planned: version, keys,
and every tensor with its type, shape and place; the file is as long as planned; and each piece has
the checksum it had when it was written. That values and scales are finite was seen while writing,
when each piece was dequantized.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qtool.errors import FormatError
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_writer import VERSION, Layout
from qtool.gguf.pieces import Done
from qtool.gguf.plan import GgufPlan
from qtool.gguf.workers import Steps, in_order
from qtool.native.sums import checksum


def verify(
    path: Path, plan: GgufPlan, layout: Layout, done: Sequence[Done], threads: int, steps: Steps
) -> None:
    """FormatError names the first thing that is not as planned."""
    with GgufFile.open(path) as file:
        _compare(file, plan, layout)
        descriptor = file.descriptors[path]
        longest = max((one.nbytes for one in done), default=0)

        def worker() -> "_Reader":
            return _Reader(descriptor, done, layout, longest)

        in_order(len(done), threads, worker, steps)


class _Reader:
    """One thread's buffer."""

    def __init__(self, descriptor: int, done: Sequence[Done], layout: Layout, longest: int) -> None:
        self._descriptor, self._done, self._layout = descriptor, done, layout
        self._buffer = np.empty(longest, np.uint8)

    def __call__(self, number: int) -> None:
        """Compare one piece."""
        one = self._done[number]
        data = self._buffer[: one.nbytes]
        have = 0
        while have < one.nbytes:
            got = os.preadv(self._descriptor, [memoryview(data)[have:]], one.position + have)
            if not got:
                break
            have += got
        if have < one.nbytes or checksum(data) != one.checksum:
            name = self._layout.tensors[one.piece.tensor].name
            raise FormatError(
                f"tensor {name!r} reads back with other bytes than were written; the disk or the "
                "memory is faulty"
            )


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
