"""What Python imports before a command answers, as `-X importtime` tells it."""

import platform
import subprocess
import sys
from pathlib import Path

import header_files
import pytest

import qtool

# Where the package that is tested lies: a checkout beside an installed one has no kernels.
HOME = Path(qtool.__file__).parent.parent


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["quantize", "--help"],
        ["inspect", "MODEL"],
        ["inspect", "MODEL", "--json"],
        ["plan", "MODEL", "--recipe", "w4g128-awq"],
        ["quantize", "tiny", "--recipe", "w4g128-rtn", "-o", "OUT"],
        ["quantize", "tiny", "--recipe", "nvfp4", "-o", "OUT"],
    ],
)
def test_neither_torch_nor_transformers(arguments: list[str], tmp_path: Path) -> None:
    model = str(header_files.write(tmp_path / "m", header_files.llama()))
    places = {"MODEL": model, "OUT": str(tmp_path / "out")}
    words = [places.get(word, word) for word in arguments]
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "qtool", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=HOME,
    )
    assert result.returncode == 0 and result.stdout, result.stderr[-500:]
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    roots = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}
    assert "qtool" in roots and not roots & {"torch", "transformers"}


HEAPS = """
import platform, threading
import numpy as np
from qtool.calibrating.allocator import share_heap
assert share_heap() == (platform.libc_ver()[0] == "glibc")

barrier = threading.Barrier(6)

def heaps():
    kept = [np.ones(1 << 12) for _ in range(20)]
    barrier.wait()
    return len(kept)

threads = [threading.Thread(target=heaps) for _ in range(6)]
[t.start() for t in threads]
[t.join() for t in threads]
# glibc reserves 64 MB of addresses for a thread's own heap, aligned to as much.
starts = [int(line.split("-")[0], 16) for line in open("/proc/self/maps")]
print(sum(start % (64 << 20) == 0 for start in starts if start < 0x7FFF00000000))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has a heap a thread")
def test_threads_share_one_heap() -> None:
    def heaps(script: str) -> int:
        result = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stderr
        return int(result.stdout)

    assert heaps(HEAPS) + 3 < heaps(HEAPS.replace("assert share_heap()", "assert bool(1)"))
