"""`qtool quantize` into GGUF as a command: what it imports, what it refuses, and signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import qtool
from support.gguf.gguf_files import models
from support.runs.quantizing import Call

__all__ = ["models"]


# Where the package that is tested lies: a checkout beside an installed one has no kernels.
HOME = Path(qtool.__file__).parent.parent


def command(*words: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-X", "importtime", "-m", "qtool", "quantize", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=HOME)


@pytest.mark.parametrize("model", ["dense.gguf", "tiny"])
def test_the_command(model: str, models: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    words = ["tiny"] if model == "tiny" else [models / model, "--imatrix",
                                             models / "dense-imatrix.gguf"]  # fmt: skip
    done = command(*words, "--recipe", "q4_k_m", "-o", out, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["artifact"] == str(out) and said["recipe"] == "q4_k_m" and said["layers"]
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    roots = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}
    assert "qtool" in roots and not roots & {"torch", "transformers", "safetensors"}


@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        ("q4_0", ["--stats", "x"], "--stats would change nothing"),
        ("q4_0", ["--max-shard-size", "1GB"], "--max-shard-size would change nothing"),
        ("q4_0", ["--samples", "3", "--imatrix", "x"], "--samples would change nothing"),
        ("w4g128-rtn", ["--imatrix", "x"], "--imatrix would change nothing"),
        ("w4g128-rtn", ["-o", "y.GGUF"], "-o y.GGUF: recipe w4g128-rtn makes a folder of safet"),
        ("q4_0", ["--imatrix", "no-such-file"], "no-such-file: cannot be read"),
        ("iq2_xs", ["--set", "importance=false"], "useless without an importance matrix"),
    ],
)
def test_one_sentence(
    recipe: str, options: list[str], said: str, models: Path, tmp_path: Path, call: Call
) -> None:
    out = tmp_path / "x"
    done = call("quantize", models / "dense.gguf", "--recipe", recipe, "-o", out, *options)
    errors = done.err.splitlines()
    assert done.status == 1 and len(errors) == 1 and said in errors[0], errors
    assert not any(tmp_path.iterdir())


def test_requantize_needs_a_gguf_source(tmp_path: Path, call: Call) -> None:
    out = tmp_path / "x"
    done = call("quantize", "tiny", "--recipe", "w4g128-rtn", "-o", out, "--requantize")
    assert done.status == 1 and "--requantize would change nothing" in done.err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_signal_leaves_no_file(
    number: signal.Signals, models: Path, tmp_path: Path, call: Call
) -> None:
    """Nothing, or what is finished, hidden; the same command then makes the file."""
    folder = tmp_path / "new"
    words = [models / "experts.gguf", "--recipe", "iq2_xs", "-o", folder / "x.gguf", "--threads",
             1, "--imatrix", models / "experts-imatrix.gguf"]  # fmt: skip
    line = [sys.executable, "-m", "qtool", "quantize", *map(str, words)]
    handler = signal.signal(number, signal.SIG_DFL)  # one that nohup ignores stays ignored else
    try:
        process = subprocess.Popen(
            line, stderr=subprocess.PIPE, env={**os.environ, "QTOOL_SIMD": "scalar"}, cwd=HOME
        )
    finally:
        signal.signal(number, handler)
    until = time.monotonic() + 30
    while not (folder.exists() and any(folder.iterdir())) and time.monotonic() < until:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number, said
    left = [path.name for path in folder.iterdir()] if folder.exists() else []
    assert left == ([".x.gguf.partial"] if b"what is finished is kept" in said else [])
    assert call("quantize", *words).status == 0
    assert [path.name for path in folder.iterdir()] == ["x.gguf"]
