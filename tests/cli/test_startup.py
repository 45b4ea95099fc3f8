"""What Python imports before a command answers, as `-X importtime` tells it."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import qtool
from qtool.hub import tiny_folder
from qtool.workspaces.workspace import workspace
from support.models import header_files
from support.runs.quantizing import files, quantize

# Where the package that is tested lies: a checkout beside an installed one has no kernels.
HOME = Path(qtool.__file__).parent.parent


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["quantize", "--help"],
        ["inspect", "MODEL"],
        ["inspect", "MODEL", "--json"],
        ["plan", "MODEL", "--recipe", "w4g128-awq"],
        ["quantize", "tiny", "--recipe", "w4g128-rtn", "-o", "OUT"],
        pytest.param(
            ["quantize", "tiny", "--recipe", "nvfp4", "-o", "OUT"], marks=pytest.mark.slow
        ),
    ],
)
def test_neither_torch_nor_transformers(arguments: list[str], tmp_path: Path) -> None:
    model = str(header_files.write(tmp_path / "m", header_files.llama()))
    places = {"MODEL": model, "OUT": str(tmp_path / "out")}
    words = [places.get(word, word) for word in arguments]
    result, roots = imported(*words)
    assert result.returncode == 0 and result.stdout, result.stderr[-500:]
    assert "qtool" in roots and not roots & {"torch", "transformers"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "give either --size"),
        (["--size", "1MB", "--bits", "4"], "give either --size"),
        (["--size", "1MB", "--types", "q9_k"], "--types: q9_k is no type"),
        (["--size", "1MB", "--max-ram", "much"], "--max-ram: 'much' is no size"),
        (["--size", "1MB", "-o", "OUT.txt"], "a recipe's file ends in .yaml"),
    ],
)
def test_what_is_wrong_with_a_fit_is_said_at_once(
    more: list[str], said: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    words = [word.replace("OUT", out) for word in ["-o", "OUT.yaml", *more]]
    result, roots = imported("fit", "tiny", *words)
    assert result.returncode == 2 and said in result.stderr
    assert "qtool" in roots and not roots & {"torch", "transformers"}


def test_verify_needs_neither(tmp_path: Path) -> None:
    quantize(tiny_folder(), "w4g128-rtn", tmp_path / "made")
    words = ("verify", str(tmp_path / "made"), "--against", "tiny", "--engine", "vllm")
    result, roots = imported(*words)
    assert result.returncode == 0 and "nothing wrong" in result.stdout, result.stderr[-500:]
    assert "qtool" in roots and not roots & {"torch", "transformers"}


def imported(*words: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """A command, and the packages that it imported."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "qtool", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=HOME,
    )
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    return result, {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}


@pytest.mark.parametrize(
    ("command", "recipe", "more"),
    [
        ("quantize", "w4g128-awq", ()),
        ("quantize", "q4_k_m-awq-gptq", ()),
        ("calibrate", "w4g128-awq", ()),
        ("fit", "q4_k_m", ("--bits", "4")),
    ],
)
def test_a_text_that_is_missing_is_told_at_once(
    command: str, recipe: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    given = ("--calibration", str(tmp_path / "x.txt"), "-o", str(tmp_path / "out"))
    result, roots = imported(command, "tiny", "--recipe", recipe, *given, *more)
    assert result.returncode == 1 and "x.txt: no such file" in result.stderr
    assert not roots & {"torch", "transformers"} and not any(tmp_path.iterdir())


def test_a_run_that_cannot_go_on_is_told_at_once(tmp_path: Path) -> None:
    """Of a short text, of an output that another process makes, of one begun in another way."""
    out, text = tmp_path / "out", tmp_path / "x.txt"
    text.write_text("a few words")
    words = ("quantize", "tiny", "--recipe", "w4g128-gptq", "-o", str(out))

    def refused(sentence: str, *more: str) -> None:
        result, roots = imported(*words, *more)
        assert result.returncode == 1 and sentence in result.stderr, result.stderr[-300:]
        assert "qtool" in roots and not roots & {"torch", "transformers"}

    refused("tokens, enough for 0 samples of 512", "--calibration", str(text))
    with (
        pytest.raises(KeyboardInterrupt),
        workspace(out, is_folder=True, nbytes=0, fresh=False) as space,
    ):
        space.agree({"recipe": {"name": "w4g64-gptq"}})
        space.journal.commit("block 0")
        refused(f"another qtool is making it (process {os.getpid()})", "--fresh")
        raise KeyboardInterrupt
    kept = files(tmp_path)
    refused("recipe was w4g64-gptq, is w4g128-gptq; give its command again")
    assert files(tmp_path).keys() == kept.keys()


HEAPS = """
import platform, threading
import numpy as np
from qtool.streaming.allocator import share_heap
assert share_heap() == (platform.libc_ver()[0] == "glibc")

barrier = threading.Barrier(6)

def heaps():
    kept = [np.ones(1 << 12) for _ in range(20)]
    barrier.wait()
    return len(kept)

threads = [threading.Thread(target=heaps) for _ in range(6)]
[t.start() for t in threads]
[t.join() for t in threads]
# glibc reserves 64 MB of addresses for a thread's own heap, aligned to as much.
starts = [int(line.split("-")[0], 16) for line in open("/proc/self/maps")]
print(sum(start % (64 << 20) == 0 for start in starts if start < 0x7FFF00000000))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has a heap a thread")
def test_threads_share_one_heap() -> None:
    def heaps(script: str) -> int:
        result = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stderr
        return int(result.stdout)

    assert heaps(HEAPS) + 3 < heaps(HEAPS.replace("assert share_heap()", "assert bool(1)"))
