"""How long a whole process of `qtool inspect` takes on a GGUF file of 144 GB.

    python tests/benchmarks/inspect_speed.py FOLDER [--runs 5]

FOLDER gets a sparse file with the header of a Llama of 70 billion weights: 723 tensors, 150,000
tokens, 280,000 merges. The median of the runs is compared with 0.3 s; exit status 1 where it is
longer.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.gguf import gguf_big

LIMIT = 0.3


def seconds(command: list[str]) -> float:
    """Of the wall, of one process."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "llama-70b-hole.gguf"
    size = path.stat().st_size if path.exists() else gguf_big.write(path)
    print(f"{path.name}: {size / 1e9:.1f} GB")
    slow = False
    for arguments in ([], ["--all"], ["--json"]):
        command = [sys.executable, "-m", "qtool", "inspect", str(path), *arguments]
        seconds(command)
        found = sorted(seconds(command) for _ in range(options.runs))
        median = statistics.median(found)
        slow |= median > LIMIT
        shown = " ".join(["inspect", *arguments])
        print(f"{shown:16} median {median:.3f} s of {', '.join(f'{s:.3f}' for s in found)}")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
