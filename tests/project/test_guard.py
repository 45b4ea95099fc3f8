"""The guard of conftest.py: connections to other machines are refused, also in processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import socket
try:
    socket.create_connection(("192.0.2.1", 80), timeout=1)
except OSError as error:
    print(error)
"""


def _forget(expected: int) -> list[str]:
    log = Path(os.environ["QTOOL_TEST_GUARD"])
    lines = log.read_text().splitlines()
    log.unlink()
    assert len(lines) == expected
    return lines


def test_other_machines_are_refused() -> None:
    with socket.socket() as one, pytest.raises(ConnectionRefusedError, match="stay on this"):
        one.connect(("192.0.2.1", 80))
    with pytest.raises(ConnectionRefusedError):
        socket.getaddrinfo("huggingface.co", 443)
    assert "192.0.2.1" in _forget(2)[0]


def test_in_processes_too() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60
    )
    assert "the tests stay on this machine" in result.stdout, result.stderr
    _forget(1)


def test_this_machine_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(("localhost", server.getsockname()[1]), timeout=5).close()
    assert not Path(os.environ["QTOOL_TEST_GUARD"]).exists()
