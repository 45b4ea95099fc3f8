"""Ctrl-C while torch is loaded, whose C++ aborts the process on what Python raises in it."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, types
from qtool.cli import main
def app():
    torch = types.ModuleType("torch")
    torch.__spec__ = types.SimpleNamespace(_initializing=True)
    sys.modules["torch"] = torch
    try:
        os.kill(os.getpid(), {number})
    finally:
        print("raised", flush=True)
main.app = app
main.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_raised_while_torch_is_loaded(number: signal.Signals) -> None:
    script = SCRIPT.format(number=int(number))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + number, "", "")
