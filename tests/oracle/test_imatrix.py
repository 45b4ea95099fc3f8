"""Importance matrices against llama-imatrix's, of smollm2-768 over the very same tokens.

QTOOL_ORACLE_LLAMA names the folder of llama.cpp's tools (see llama_quantize.py). llama.cpp computes
in float16 what is computed in float32 here, so the sums agree to what that leaves of them; what
counts is that files made with either lose the same.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from oracle import llama_quantize

from qtool.gguf.importance.imatrix import read_importance, write_importance
from qtool.native.library import default_threads
from qtool.texts.source import default_text
from qtool.texts.tokenizing import tokenize

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        llama_quantize.tools() is None, reason="QTOOL_ORACLE_LLAMA names no folder of llama.cpp"
    ),
]

CHUNKS, LENGTH = 8, 512
EVALUATED = 6  # chunks of other text


def qtool(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "qtool", *map(str, words)], check=True)


def said(tool: str, *words: object) -> str:
    """What a tool of llama.cpp prints."""
    folder = llama_quantize.tools()
    assert folder is not None
    result = subprocess.run(
        [folder / tool, *map(str, words), "-t", str(default_threads()), "-c", str(LENGTH)],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def root(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model.gguf, seen.txt and other.txt, ours.gguf and theirs.gguf measured on seen.txt."""
    folder = tmp_path_factory.mktemp("imatrix")
    checkpoint = models / "smollm2-768"
    qtool("quantize", checkpoint, "--recipe", "f16", "-o", folder / "model.gguf")
    text = default_text()
    # A little more than the chunks, so that both sides take all of them, in order.
    seen = text[: len(text) // 2]
    count = len(tokenize(seen, checkpoint))
    while count >= (CHUNKS + 1) * LENGTH:
        seen = seen[: int(len(seen) * (CHUNKS + 0.3) * LENGTH / count)]
        count = len(tokenize(seen, checkpoint))
    assert count >= CHUNKS * LENGTH
    (folder / "seen.txt").write_text(seen, encoding="utf-8")
    (folder / "other.txt").write_text(text[len(text) // 2 :], encoding="utf-8")
    given = ["--calibration", folder / "seen.txt", "--samples", CHUNKS, "--length", LENGTH]
    qtool("calibrate", checkpoint, "--imatrix", folder / "ours.gguf", *given)
    files = ["-m", folder / "model.gguf", "-f", folder / "seen.txt"]
    said("llama-imatrix", *files, "-o", folder / "theirs.gguf", "--no-ppl")
    return folder


def test_entries_agree(root: Path) -> None:
    ours, theirs = (read_importance(root / f"{name}.gguf") for name in ("ours", "theirs"))
    assert ours.sums.keys() == theirs.sums.keys() and len(ours.sums) == 30 * 7
    assert (ours.chunks, ours.chunk_size) == (theirs.chunks, theirs.chunk_size) == (CHUNKS, LENGTH)
    differences = []
    for name, entry in theirs.entries.items():
        assert ours.counts[name].tolist() == theirs.counts[name].tolist() == [CHUNKS * LENGTH]
        mine = ours.entries[name]
        assert np.array_equal(mine == 0, entry == 0), name
        differences.append((np.abs(mine - entry) / np.maximum(entry, 1e-30)).ravel())
    relative = np.concatenate(differences)
    print(f"median {np.median(relative):.2e}, 99 % {np.quantile(relative, 0.99):.2e}")
    assert np.median(relative) < 1e-3 and np.quantile(relative, 0.99) < 2e-2


def test_their_file_is_written_as_they_do(root: Path) -> None:
    again = root / "again.gguf"
    write_importance(again, read_importance(root / "theirs.gguf"))
    assert again.read_bytes() == (root / "theirs.gguf").read_bytes()


def test_their_older_file_is_read(root: Path) -> None:
    """The .dat that llama-imatrix makes of its own GGUF file, to the rounding of both."""
    old = root / "old.dat"
    words = ["--in-file", root / "theirs.gguf", "-o", old, "--output-format", "dat"]
    said("llama-imatrix", "-m", root / "model.gguf", *words)
    new, found = read_importance(root / "theirs.gguf"), read_importance(old)
    assert found.entries.keys() == new.entries.keys() and found.chunks == CHUNKS
    for name, entry in new.entries.items():
        assert np.allclose(found.entries[name], entry, rtol=3e-7, atol=0), name


def test_they_read_ours(root: Path) -> None:
    """llama-quantize takes the file and makes the very bytes that qtool makes with it."""
    theirs, ours = root / "by-llama.gguf", root / "by-qtool.gguf"
    given = ["--imatrix", root / "ours.gguf", root / "model.gguf"]
    llama_quantize.run("llama-quantize", *given, theirs, "q3_k_s", default_threads())
    made = ["-o", ours, "--imatrix", root / "ours.gguf"]
    qtool("quantize", root / "model.gguf", "--recipe", "q3_k_s", *made)
    left, right = llama_quantize.described(theirs), llama_quantize.described(ours)
    assert left.tensors == right.tensors


def test_files_made_with_either_lose_the_same(root: Path) -> None:
    base = root / "base.kld"
    given = ["-f", root / "other.txt", "--chunks", EVALUATED, "--kl-divergence-base", base]
    said("llama-perplexity", "-m", root / "model.gguf", *given)
    lost = {}
    for name in ("ours", "theirs"):
        made = root / f"q2_k-{name}.gguf"
        factors = ["--imatrix", root / f"{name}.gguf", "-o", made]
        qtool("quantize", root / "model.gguf", "--recipe", "q2_k", *factors)
        out = said("llama-perplexity", "-m", made, *given, "--kl-divergence")
        found = re.search(r"Mean\s+KLD:\s+([\d.]+)", out)
        assert found is not None, out[-2000:]
        lost[name] = float(found[1])
    print(lost)
    assert abs(lost["ours"] / lost["theirs"] - 1) < 0.02
