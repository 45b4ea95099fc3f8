"""A model from a hub and its artifact back to it, as a person types it, and the figures of it.

    python tests/benchmarks/hub.py [--out FILE]

A hub on loopback serves the shipped model as huggyllama/llama-7b, at the commit of the alias. The
download is killed in the middle; `qtool quantize llama-7b --recipe w4g128-awq` goes on with it; the
artifact is verified, pushed and inspected where it lies then, and the model downloaded once more.
Every figure that is printed has its bar, in BARS: among others no byte of a file is served that was
on the disk already, no pickle at all, and no process connects to another machine
(tests/support/guard).
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
sys.path.insert(0, str(TESTS))
sys.path.append(str(ROOT))  # where no package is installed

from qtool import hub  # noqa: E402
from support.hub import hub_server  # noqa: E402

PACKAGES = Path(hub.__file__).parents[2]
WEIGHTS = "model.safetensors"
LONGEST = 120.0  # seconds that a command may take: it hangs, or works on what it should not

# What each figure has to be; `f` are all of them.
BARS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "weights_bytes": lambda f: f["weights_bytes"] > 2_000_000,
    "on_disk_when_killed": lambda f: 1_000_000 <= f["on_disk_when_killed"] < f["weights_bytes"],
    "served_after": lambda f: f["served_after"] == f["weights_bytes"] - f["on_disk_when_killed"],
    "fetched_twice": lambda f: f["fetched_twice"] == 0,
    "pickles_served": lambda f: f["pickles_served"] == 0,
    "verify": lambda f: "nothing wrong" in f["verify"],
    "pushed_files": lambda f: f["pushed_files"] == f["artifact_files"],
    "artifact_files": lambda f: f["artifact_files"] >= 5,
    "pushed_and_differ": lambda f: f["pushed_and_differ"] == [],  # the card gets more lines
    "inspected_format": lambda f: f["inspected_format"] == "awq",
    "inspect_bytes": lambda f: 0 < f["inspect_bytes"] <= 64 << 10,  # its headers alone
    "inspect_requests": lambda f: 0 < f["inspect_requests"] <= 8,
    "again_bytes": lambda f: f["again_bytes"] == 0,
    "again_requests": lambda f: f["again_requests"] == 0,  # a commit never changes
    "outside_loopback": lambda f: f["outside_loopback"] == 0,
    "seconds": lambda f: max(f["seconds"].values()) <= LONGEST,
}


def environment(folder: Path, endpoint: str) -> dict[str, str]:
    """Of a user who has this hub and nothing else."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return kept | {
        "HOME": str(folder),
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": hub_server.TOKEN,
        "QTOOL_TEST_GUARD": str(folder / "refused"),
        "PYTHONPATH": os.pathsep.join([str(TESTS / "support" / "guard"), str(PACKAGES)]),
    }


def qtool(folder: Path, asked: str, env: dict[str, str]) -> tuple[str, float]:
    """What a command printed, and its seconds."""
    began = time.monotonic()
    made = subprocess.run(
        [sys.executable, "-m", *asked.split()],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    if made.returncode != 0:
        sys.exit(f"{asked}: exit status {made.returncode}\n{made.stderr}")
    return made.stdout, round(time.monotonic() - began, 2)


def killed_download(folder: Path, env: dict[str, str]) -> int:
    """Start a download, kill it; bytes of the weights that are on the disk."""
    blobs = folder / "hf" / "hub" / "models--huggyllama--llama-7b" / "blobs"

    def have() -> int:
        sizes = [one.stat().st_size for one in blobs.glob("*.incomplete")]
        return max(sizes, default=0)

    command = [sys.executable, "-m", "qtool", "download", "llama-7b"]
    with subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.DEVNULL) as process:
        while have() < 1_000_000:
            if process.poll() is not None:
                sys.exit("the download ended before it could be killed")
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    time.sleep(0.2)
    return have()


def _same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


def measure(folder: Path) -> dict[str, Any]:
    """All of it, and the figures."""
    source = folder / "source"
    source.mkdir()
    for path in hub.tiny_folder().iterdir():
        if path.suffix in (".json", ".safetensors"):
            (source / path.name).write_bytes(path.read_bytes())
    (source / "pytorch_model.bin").write_bytes(bytes(10_000_000))
    alias = hub.ALIASES["llama-7b"]
    size = (source / WEIGHTS).stat().st_size
    with hub_server.serve({alias.repository: source}, {alias.repository: alias.revision}) as server:
        server.uploads = folder / "uploads"
        server.uploads.mkdir()
        env = environment(folder, server.endpoint)
        server.held[WEIGHTS] = 2_500_000  # bytes after which it waits
        kept = killed_download(folder, env)
        server.held.clear()
        server.gives_up.set()
        pickles = server.sent["pytorch_model.bin"]
        server.sent.clear()
        seconds = {}
        _, seconds["quantize"] = qtool(folder, "qtool quantize llama-7b --recipe w4g128-awq", env)
        resumed = server.sent[WEIGHTS]
        said, seconds["verify"] = qtool(folder, "qtool verify llama-7b-w4g128-awq", env)
        pushed, seconds["push"] = qtool(
            folder, "qtool push llama-7b-w4g128-awq ann/llama-7b-AWQ --json", env
        )
        server.requests.clear()
        before = server.sent.total()
        found, seconds["inspect"] = qtool(folder, "qtool inspect ann/llama-7b-AWQ --json", env)
        fetched, asked = server.sent.total() - before, len(server.requests)
        before = server.sent.total()
        server.requests.clear()
        _, seconds["download again"] = qtool(folder, "qtool download llama-7b", env)
        again = server.sent.total() - before
        artifact, there = folder / "llama-7b-w4g128-awq", server.repositories["ann/llama-7b-AWQ"]
        names = {path.name for path in artifact.iterdir()} - {"README.md"}
        differ = [name for name in names if not _same(artifact / name, there / name)]
    refused = folder / "refused"
    return {
        "weights_bytes": size,
        "on_disk_when_killed": kept,
        "served_after": resumed,
        "fetched_twice": resumed + kept - size,
        "pickles_served": pickles + server.sent["pytorch_model.bin"],
        "verify": said.splitlines()[-1].partition(": ")[2],
        "artifact_files": len(names) + 1,
        "pushed_files": len(json.loads(pushed)["files"]),
        "pushed_and_differ": sorted(differ),
        "inspected_format": json.loads(found)["format"],
        "inspect_bytes": fetched,
        "inspect_requests": asked,
        "again_bytes": again,
        "again_requests": len(server.requests),
        "outside_loopback": len(refused.read_text().splitlines()) if refused.exists() else 0,
        "seconds": seconds,
    }


def judged(found: dict[str, Any]) -> list[str]:
    """The figures that miss their bars, those that have none too."""
    return sorted(name for name in found.keys() | BARS.keys() if not _is_good(name, found))


def _is_good(name: str, found: dict[str, Any]) -> bool:
    return name in found and name in BARS and BARS[name](found)


def main() -> None:
    """Print the figures; exit status 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="qtool-hub-") as folder:
        found = measure(Path(folder))
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n")
    if missed := judged(found):
        sys.exit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
