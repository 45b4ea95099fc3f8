"""Runs of the command line in processes of their own, with their time and peak memory."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finished:
    """A process that ended with status 0."""

    wall: float  # seconds
    cpu: float  # seconds, user and system
    peak: int  # bytes
    out: dict[str, Any]  # the JSON object on the last line of stdout


def run(command: Sequence[object]) -> Finished:
    """Run a command that prints a JSON object; exits with its stderr where it fails."""
    return _run(command, True)


def measure(command: Sequence[object]) -> Finished:
    """Run a command that prints what it likes; exits with its output where it fails."""
    return _run(command, False)


# A process that is started counts the pages of the one that started it as its own, so the command
# is started by one that has none to speak of; it writes what it saw into a pipe.
_STARTED_SMALL = """
import os, sys, time
began = time.perf_counter()
child = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
_, status, usage = os.wait4(child, 0)
seen = time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss, status
os.write(int(sys.argv[1]), repr(seen).encode())
"""


def _run(command: Sequence[object], json_: bool) -> Finished:
    words = [str(word) for word in command]
    read, write = os.pipe()
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _STARTED_SMALL, str(write), *words],
        stdout=subprocess.PIPE,
        stderr=None if json_ else subprocess.STDOUT,
        text=True,
        pass_fds=[write],
    )
    os.close(write)
    with open(read) as pipe:
        seen = pipe.read()
    if not seen:
        sys.exit(f"{' '.join(words)}: did not start\n{done.stdout}")
    wall, cpu, pages, status = ast.literal_eval(seen)
    if (code := os.waitstatus_to_exitcode(status)) != 0:
        sys.exit(f"{' '.join(words)}: exit status {code}\n{done.stdout}")
    peak = pages * (1 if sys.platform == "darwin" else 1024)
    said = json.loads(done.stdout.splitlines()[-1]) if json_ else {}
    return Finished(wall, cpu, peak, said)


def quantize(
    model: Path, recipe: str, out: Path, *more: object, prefix: Sequence[object] = ()
) -> Finished:
    """`qtool quantize --json`; the artifact stays. prefix: words before the command."""
    command = [sys.executable, "-m", "qtool", "quantize", model, "--recipe", recipe, "-o", out]
    return run([*prefix, *command, "--json", *more])
