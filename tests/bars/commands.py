"""Runs of the command line in processes of their own, with their time and peak memory."""

import json
import os
import subprocess
import sys
import time
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


def _run(command: Sequence[object], json_: bool) -> Finished:
    words = [str(word) for word in command]
    stderr = None if json_ else subprocess.STDOUT
    began = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - began
    if process.returncode != 0:
        sys.exit(f"{' '.join(words)}: exit status {process.returncode}\n{out}")
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    said = json.loads(out.splitlines()[-1]) if json_ else {}
    return Finished(wall, usage.ru_utime + usage.ru_stime, peak, said)


def quantize(
    model: Path, recipe: str, out: Path, *more: object, prefix: Sequence[object] = ()
) -> Finished:
    """`qtool quantize --json`; the artifact stays. prefix: words before the command."""
    command = [sys.executable, "-m", "qtool", "quantize", model, "--recipe", recipe, "-o", out]
    return run([*prefix, *command, "--json", *more])
