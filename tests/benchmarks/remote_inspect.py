"""What `qtool inspect` fetches of a model on a server, and how long the whole process takes.

    python tests/benchmarks/remote_inspect.py [--runs 5]

A server on loopback has a GGUF file of 142 GB and a repository of 50 shards, 141 GB, that exist by
their headers alone; it counts the bytes of the bodies that it sends. Limits: 2 s a process (the
median of the runs); of the GGUF its header and 1 MB, of the repository 2 MB. Exit status 1 where
one is passed.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.hub import range_server

SECONDS = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    big = range_server.big_gguf()
    shards = range_server.shards(50, {"model_type": "llama"})
    files = {"models/big.gguf": big} | range_server.repository("ann/fifty", shards)
    failed = False
    with range_server.serve(files) as server:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        environment |= {"HF_ENDPOINT": server.url, "NO_PROXY": "127.0.0.1"}
        for address, size, most in (
            (f"{server.url}/models/big.gguf", big.size, len(big.head) + 1_000_000),
            ("hf://ann/fifty", sum(file.size for file in shards.values()), 2_000_000),
        ):
            times = []
            for _ in range(runs + 1):
                server.sent.clear()
                server.requests.clear()
                start = time.perf_counter()
                command = [sys.executable, "-m", "qtool", "inspect", address]
                subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
                times.append(time.perf_counter() - start)
            median = statistics.median(times[1:])
            failed |= median >= SECONDS or server.total() > most
            print(
                f"{address.replace(server.url, '')}: {size / 1e9:.0f} GB, {server.total():,} bytes "
                f"sent of at most {most:,} in {len(server.requests)} requests, median "
                f"{median:.2f} s of {', '.join(f'{s:.2f}' for s in times[1:])}"
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
