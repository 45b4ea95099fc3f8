"""Ctrl-C while torch is loaded, whose C++ aborts the process on what Python raises in it."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, time, types
from qtool.cli import main
def app():
    torch = types.ModuleType("torch")
    torch.__spec__ = types.SimpleNamespace(_initializing=True)
    sys.modules["torch"] = torch
    try:
        os.kill(os.getpid(), {number})
        print("not raised", flush=True)
        if {again}:
            os.kill(os.getpid(), {number})
        torch.__spec__._initializing = False
        time.sleep(20)
    finally:
        print("raised", flush=True)
main.app = app
main.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_raised_while_torch_is_loaded(number: signal.Signals) -> None:
    """But when it is: what was half made is removed on the way out. A second one does not wait."""
    for again, said in ((False, "not raised\nraised\n"), (True, "not raised\n")):
        script = SCRIPT.format(number=int(number), again=again)
        ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert (ended.returncode, ended.stdout) == (128 + number, said)
        assert "Traceback" not in ended.stderr
