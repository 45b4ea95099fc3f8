"""What the shell offers, as a shell asks for it; and what is said to somebody who types nothing."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from qtool.cli.main import app

SCRIPT = "import sys; sys.argv = ['qtool']; from qtool.cli.main import main; main()"


def offered(line: str) -> list[str]:
    """As bash asks: the words, and which of them the cursor is at."""
    words = line.split(" ")
    environment = {
        **os.environ,
        "_QTOOL_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("qtool qu", ["quantize"]),
        ("qtool quantize tiny --recipe w4g128-a", ["w4g128-awq", "w4g128-awq-gptq"]),
        ("qtool quantize ti", ["tiny", "tinyllama-1.1b"]),
        ("qtool verify x --engine ll", ["llama.cpp"]),
        ("qtool convert x --to gptq", ["gptq", "gptq-v2"]),
    ],
)
def test_completion(line: str, some: list[str]) -> None:
    found = offered(line)
    assert set(some) <= set(found)
    assert all(name.startswith(line.split(" ")[-1]) for name in found)


def test_without_arguments() -> None:
    said = CliRunner().invoke(app, [])
    assert said.exit_code == 0
    assert "qtool quantize tiny --recipe w4g128-awq" in said.stdout
    assert all(len(line) <= 100 for line in said.stdout.splitlines())
