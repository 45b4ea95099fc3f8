"""Every shipped recipe on the shipped model: the same bytes with 1, 2 and 3 threads, and no layer
that is rounded more coarsely than its bits explain."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qtool
from qtool.hub import tiny_folder
from qtool.messages.progress import Progress
from qtool.messages.summary import Summary
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.quantizing.pipeline import run
from qtool.recipe.recipe import Recipe, load, shipped
from qtool.runs.gguf_request import GgufRequest
from qtool.runs.request import Request
from qtool.verification.run import verify_artifact
from support.models.gpt_oss import source_for

# Three micro-batches, the last one short: threads have something to part.
SETS = ("calibration.samples=9", "calibration.length=500")


def made(name: str, out: Path, threads: int, source: Path) -> Summary:
    loaded = load(name)
    if loaded.calibrates:
        loaded = load(name, SETS)
    progress = Progress(quiet=True)
    if isinstance(loaded, Recipe):
        request = Request("tiny", source, loaded, out, None, threads, 1 << 30)
        return run(request, progress)
    return run_gguf(GgufRequest("tiny", source, loaded, out, threads), progress)


def digest(out: Path) -> str:
    """Of all files of an output, and of their names."""
    files = [out] if out.is_file() else sorted(path for path in out.rglob("*") if path.is_file())
    found = hashlib.sha256()
    for path in files:
        found.update(f"{path.relative_to(out)}\0{path.stat().st_size}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(shipped()))
def test_threads_change_no_byte(name: str, tmp_path: Path) -> None:
    """Neither ours nor those that torch has for itself."""
    before, source = torch.get_num_threads(), source_for(name, tiny_folder(), tmp_path / "model")
    found: dict[int, str] = {}
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            summary = made(name, tmp_path / str(threads), threads, source)
            found[threads] = digest(tmp_path / str(threads))
    finally:
        torch.set_num_threads(before)
    assert len(set(found.values())) == 1, found
    assert not [note for note in summary.notes if "bit width explains" in note]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(shipped()))
def test_what_is_made_is_near_its_source(name: str, tmp_path: Path) -> None:
    """No layer, no scale and no fold of it alarms."""
    source = source_for(name, tiny_folder(), tmp_path / "model")
    out = tmp_path / ("made" if isinstance(load(name), Recipe) else "made.gguf")
    made(name, out, 2, source)
    verdict = verify_artifact(out, against=source, threads=2)
    assert not [finding for finding in verdict.findings if finding.severity != "note"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["w4g128-awq-gptq", "w4g128-rtn", "q4_k_m"])
def test_threads_of_libraries_change_no_byte(name: str, tmp_path: Path) -> None:
    """Those of OpenMP and of numpy's BLAS, which are settled when a process begins."""
    found = set()
    for threads in ("1", "3"):
        out = tmp_path / threads
        words = [sys.executable, "-m", "qtool", "quantize", "tiny", "--recipe", name, "-o", out]
        words += ["--threads", threads]
        if load(name).calibrates:
            words += ["--samples", "9", "--length", "500"]
        own = {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        subprocess.run(
            [*map(str, words)],
            check=True,
            capture_output=True,
            env=os.environ | own,
            cwd=Path(qtool.__file__).parent.parent,
        )
        found.add(digest(out))
    assert len(found) == 1
