"""A command line in a process of its own, which SIGKILL ends."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback

from qtool.cli import main as cli

LOOK_EVERY = 0.004  # seconds


class Command:
    """A process that runs the command line, killed where it has not ended."""

    forked = False  # from this one, which has imported all

    def __init__(self, words: list[str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        if self.forked:
            self._pid = os.fork()
            if not self._pid:
                _become(words, self._said.fileno())
        else:
            command = [sys.executable, "-m", "qtool", *words]
            process = subprocess.Popen(command, stdout=self._said, stderr=self._said)
            self._pid = process.pid
            process.returncode = 0  # waited for below
        self.status: int | None = None

    def running(self) -> bool:
        """Whether it has not ended."""
        if self.status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is None

    def kill_after(self, seconds: float) -> bool:
        """Kill it; False where it ended before by itself, as it should have."""
        until = time.monotonic() + seconds
        while self.running() and time.monotonic() < until:
            time.sleep(min(LOOK_EVERY, max(0.0, until - time.monotonic())))
        if self.running():
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            return True
        if self.status:
            self._said.seek(0)
            sys.exit(f"status {self.status}: {self._said.read().decode()}")
        return False


def _become(words: list[str], said: int) -> None:
    """In a new process: the command line, and no way back."""
    status = 1
    try:
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.argv = ["qtool", *words]
        cli.main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
