"""The commands that a report shows, run."""

import re
import shlex
from pathlib import Path

import pytest

from qtool.report.again import commands
from support.runs.quantizing import Call


def again(out: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run what is said of `out` in another folder, and compare every byte."""
    lines = commands(Path(out), out)
    monkeypatch.chdir("again")
    for line in lines:
        if file := re.fullmatch(r"cat > (\S+) <<'END'\n(.*)END", line, re.DOTALL):
            Path(file[1]).write_text(file[2])
            continue
        known = {"MODEL": "../model", "FILE": "../text.txt"}
        _, *words = (known.get(word, word) for word in shlex.split(line))
        done = call(*words)
        assert done.status == 0, done.err
    files = [f for f in Path("..", out).rglob("*") if f.is_file()] or [Path("..", out)]
    for file in files:
        assert Path(*file.parts[1:]).read_bytes() == file.read_bytes(), file
    return lines
