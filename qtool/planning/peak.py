"""Peaks of memory, and the parts of them that every run that calibrates has in common."""

from dataclasses import dataclass

from qtool.planning.shapes import Shapes

TORCH_PROCESS_BYTES = 461_000_000  # resident, before any tensor is read
# What is kept of each byte of a calibration text while its samples are not chosen yet: 4 bytes of a
# token, which has 4 or more bytes of English, and between 2 and 3 of a mixture of languages.
IDS_BYTES_PER_BYTE = 2
# Bytes of a tensor that are read at once, and how often they are in memory while that lasts.
READ_BYTES, READ_COPIES = 1 << 22, 2
# What malloc keeps for each thread of the arrays that were there before: at most two, since those
# above 32 MiB, its highest threshold, go back to the system.
KEPT_BYTES_PER_WEIGHT, MOST_KEPT_BYTES = 14, 2 << 25


@dataclass(frozen=True)
class Peak:
    """Resident bytes, and in words what most of them are."""

    nbytes: int
    of: str


def process_bytes(shapes: Shapes) -> int:
    """Of a process that calibrates, before it reads a tensor."""
    return TORCH_PROCESS_BYTES + shapes.tables


def encoding(shapes: Shapes) -> Peak:
    """Of the text to calibrate on, of which numbers are kept alone."""
    return Peak(IDS_BYTES_PER_BYTE * shapes.text, "the tokens of the whole calibration text")


def reading(nbytes: int) -> int:
    """Bytes that it takes to read a tensor of `nbytes`, beside what is made of it."""
    return READ_COPIES * min(nbytes, READ_BYTES)
