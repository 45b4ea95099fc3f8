"""The memory of this machine, and what a Gram matrix takes of it."""

import os
from pathlib import Path


def memory() -> tuple[int | None, int | None]:
    """Bytes of memory, and those that are not in use; a container's limit counts."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        available = page * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None, None
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = 1024 * int(line.split()[1])
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        if limit.isdigit():
            total, available = min(total, int(limit)), min(available, int(limit) - used)
    except (OSError, ValueError, IndexError):
        pass
    return total, max(available, 0)


def gram_sum_bytes(width: int) -> int:
    """Bytes of a Gram matrix while it is summed: half of it, in float64."""
    return width**2 * 9 // 2
