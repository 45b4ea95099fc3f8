"""One heap for all threads, so that what a thread frees the next one uses.

glibc gives each thread a heap of its own, keeps what is freed there, and raises the size from which
it asks the system directly up to 32 MB. The matrices of this program are of that size and come and
go on every thread: resident memory then grows with luck and with the number of blocks. With one
heap, and larger arrays asked from the system and given back to it, the peak of a 135M model is a
sixth lower and that of a deep model the same as that of a shallow one. Elsewhere nothing is done.
What small arrays leave free between others in use stays with the process until it is given back.
"""

import ctypes
import platform

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
# Smaller arrays stay in the heap: asking the system for each activation costs a tenth of the time.
_THRESHOLD_BYTES = 8 << 20


def share_heap() -> bool:
    """Call before threads start; whether the C library has taken it."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_ARENA_MAX, 1)) and bool(mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES))


def give_back() -> None:
    """Return to the system what is free in the heap: what comes next needs other sizes of it."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
