"""`--max-ram`: how much of a run is in memory at once, so that it stays within a budget.

No byte of what is written depends on it. What can be had for less memory, the cheapest first:
hidden states on the disk; Gram matrices of fewer inputs at a time, each group of which takes
another forward pass; fewer threads, each of which has a micro-batch or a matrix of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from qtool.errors import UnsupportedError
from qtool.memory import gram_sum_bytes
from qtool.planning.peak import Peak
from qtool.planning.shapes import GRAM_BYTES, Setting, Shapes

_MIB = 1 << 20


@dataclass(frozen=True)
class Memory:
    """What a run is to need, and the setting that makes it so."""

    max_ram_bytes: int | None  # None: whatever is best
    estimated: Peak
    setting: Setting
    disk_bytes: int  # beside the artifact: as Shapes.on_disk has it, and matrices of a GGUF file
    # that are swept

    def json(self) -> dict[str, Any]:
        """A part of the --json object of `qtool plan` and `qtool quantize`."""
        return {
            "max_ram_bytes": self.max_ram_bytes,
            "estimated_bytes": self.estimated.nbytes,
            "threads": self.setting.threads,
            "states_on_disk": self.setting.states_on_disk,
            "gram_bytes": self.setting.gram_bytes,
            "disk_bytes": self.disk_bytes,
        }

    def line(self) -> str:
        """The same for a person."""
        setting = self.setting
        parts = ["1 thread" if setting.threads == 1 else f"{setting.threads} threads"]
        if setting.states_on_disk:
            parts.append("hidden states on the disk")
        if setting.gram_bytes < GRAM_BYTES:
            parts.append(f"Gram matrices of up to {mib(setting.gram_bytes)} at a time")
        return f"within {mib(self.max_ram_bytes or 0)}: {', '.join(parts)}"


def choose(
    shapes: Shapes | None,
    threads: int,
    max_ram: int | None,
    estimated: Callable[[Setting], Peak],
) -> Memory:
    """The first setting that fits, the cheapest first.

    shapes: of a run that calibrates. estimated: the peak with a setting. UnsupportedError where no
    setting fits.
    """
    disk = shapes.on_disk if shapes is not None else 0
    if max_ram is None:
        setting = Setting(threads)
        return Memory(None, estimated(setting), setting, disk)
    least: Peak | None = None
    for setting in settings(shapes, threads):
        found = estimated(setting)
        if found.nbytes <= max_ram:
            return Memory(max_ram, found, setting, disk)
        if least is None or found.nbytes < least.nbytes:
            least = found
    assert least is not None
    needed = -(-least.nbytes // _MIB)
    given = f"{max_ram:,} bytes" if max_ram % _MIB else mib(max_ram)
    raise UnsupportedError(
        f"--max-ram: {given} is too little for this model and recipe, the least that would "
        f"do is {needed}MiB; most of it is for {least.of}"
    )


def settings(shapes: Shapes | None, threads: int) -> Iterator[Setting]:
    """What can be set, the cheapest first."""
    for count in range(threads, 0, -1):
        for room in _rooms(shapes):
            yield Setting(count, False, room)
            if shapes is not None:
                yield Setting(count, True, room)


def _rooms(shapes: Shapes | None) -> Iterator[int]:
    """For how many Gram matrices at once there may be room, in bytes."""
    yield GRAM_BYTES
    if shapes is None or not shapes.grams or shapes.chained:
        return
    sizes = [[gram_sum_bytes(one.width) for one in block.inputs] for block in shapes.blocks]
    # The largest one has to be there, and others instead of it cost no more.
    least = max((max(one, default=0) for one in sizes), default=0)
    room = min(GRAM_BYTES, max((sum(one) for one in sizes), default=0)) // 2
    while room > least:
        yield room
        room //= 2
    if 0 < least < GRAM_BYTES:
        yield least


def mib(nbytes: int) -> str:
    """A size for people, which --max-ram takes too."""
    return f"{nbytes // _MIB}MiB"
