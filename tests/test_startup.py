"""What Python imports before a command answers, as `-X importtime` tells it."""

import subprocess
import sys
from pathlib import Path

import header_files
import pytest


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["quantize", "--help"],
        ["inspect", "MODEL"],
        ["inspect", "MODEL", "--json"],
        ["plan", "MODEL", "--recipe", "w4g128-awq"],
    ],
)
def test_neither_torch_nor_transformers(arguments: list[str], tmp_path: Path) -> None:
    model = str(header_files.write(tmp_path / "m", header_files.llama()))
    words = [model if word == "MODEL" else word for word in arguments]
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "qtool", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0 and result.stdout
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    roots = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}
    assert "qtool" in roots and not roots & {"torch", "transformers"}
