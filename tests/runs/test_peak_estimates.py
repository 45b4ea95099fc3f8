"""Estimates of the most memory, against what was measured."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from qtool.checkpoints.checkpoint import Checkpoint, View
from qtool.planning import peak
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import load
from support.models import header_files
from support.planning.no_process import no_process

__all__ = ["no_process"]

PROCESS = peak.TORCH_PROCESS_BYTES
# The highest peaks of two threads, in MiB, as tests/benchmarks/max_ram.py and memory.py --wide have
# measured them: hidden, inner and key widths, samples of 512 tokens.
MEASURED = [
    ("w4g128-gptq", (1024, 2816, 256), 8, 664),
    ("w4g128-awq", (1024, 2816, 256), 8, 630),
    ("w4g128-awq-gptq", (1024, 2816, 256), 8, 669),
    ("w4g128-gptq", (2048, 5632, 512), 8, 1175),
    ("w4g128-awq", (2048, 5632, 512), 8, 1043),
    ("w4a8kv4-qserve", (2048, 5632, 512), 8, 1116),
    ("w4g128-gptq", (4096, 11008, 4096), 16, 2953),
    ("w4g128-awq", (4096, 11008, 4096), 16, 2574),
    ("fp8-static", (2048, 5632, 512), 8, 804),
    ("int8-llmint8", (2048, 5632, 512), 8, 819),
]


@pytest.mark.parametrize(("recipe", "widths", "samples", "measured"), MEASURED)
def test_the_estimate_is_a_little_more_than_what_was_measured(
    recipe: str, widths: tuple[int, int, int], samples: int, measured: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(peak, "TORCH_PROCESS_BYTES", PROCESS)
    model = header_files.write(tmp_path / "m", header_files.llama(2, *widths, vocabulary=2048))
    sets = [f"calibration.samples={samples}", "calibration.length=512", "gptq.yaqa=0"]
    planned = make_plan(load(recipe, sets), Checkpoint.open(model), threads=2).peak_rss_bytes
    assert measured <= planned / 2**20 <= 1.1 * measured


@pytest.mark.parametrize(
    ("recipe", "measured"),
    [("w4g128-gptq", 563), ("w4g128-awq", 557), ("w4-gptq-rotated", 546), ("fp8-static", 546)],
)
def test_an_embedding_is_copied_in_parts(
    recipe: str, measured: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As measured by two threads of the shape "vocabulary" of tests/benchmarks/max_ram.py."""
    monkeypatch.setattr(peak, "TORCH_PROCESS_BYTES", PROCESS)
    shapes = header_files.llama(2, 768, 2048, 192, vocabulary=151_936)
    model = Checkpoint.open(header_files.write(tmp_path / "m", shapes))
    sets = ["calibration.samples=8", "calibration.length=512"]
    planned = make_plan(load(recipe, sets), model, threads=2).peak_rss_bytes
    assert measured <= planned / 2**20 <= 1.1 * measured


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["w4g128-gptq", "w4g128-awq-gptq"])
def test_as_many_samples_as_usual_take_what_is_planned(recipe: str, tmp_path: Path) -> None:
    """64 MiB of states, in pieces that lie among what each micro-batch takes for a while."""
    line = ["quantize", "tiny", "--recipe", recipe, "--threads", "2", "-o", str(tmp_path / "x")]
    done = subprocess.run(
        [sys.executable, "-m", "qtool", *line, "--json"], capture_output=True, check=True, text=True
    )
    said = json.loads(done.stdout)
    assert 0.85 * said["memory"]["estimated_bytes"] < said["peak_rss_bytes"]
    assert said["peak_rss_bytes"] <= said["memory"]["estimated_bytes"]


def test_an_embedding_and_a_head_take_what_either_does_when_read_back(tmp_path: Path) -> None:
    """As measured of SmolLM2 with a head of its own, in MLX, rounded to nearest by two threads."""
    shapes = header_files.llama(2, 768, 1536, 256, vocabulary=49152)
    model = Checkpoint.open(header_files.write(tmp_path / "m", shapes))
    planned = make_plan(load("w4g64-mlx-rtn"), model, threads=2)
    assert planned.memory.estimated.of == "the quantized head, read back"
    assert 149 <= planned.peak_rss_bytes / 2**20 <= 1.3 * 149


@pytest.mark.parametrize(
    ("recipe", "threads", "measured"),
    [
        ("w4g128-rtn", 1, 203), ("w4g128-rtn", 2, 249), ("w4g128-rtn", 4, 330),
        ("w8a16-ct", 1, 228), ("w8a16-ct", 2, 275), ("w8a16-ct", 4, 419),
        ("fp8-dynamic", 1, 249), ("fp8-dynamic", 2, 303), ("fp8-dynamic", 4, 399),
        ("nvfp4", 1, 244), ("nvfp4", 2, 266), ("w4g64-mlx-rtn", 2, 259),
    ],
)  # fmt: skip
def test_rounding_to_nearest_is_estimated(
    recipe: str, threads: int, measured: int, tmp_path: Path
) -> None:
    """As measured of two layers of a Llama 4096 wide."""
    shapes = header_files.llama(2, 4096, 14336, 1024, vocabulary=2048)
    model = Checkpoint.open(header_files.write(tmp_path / "m", shapes))
    planned = make_plan(load(recipe), model, threads=threads)
    assert measured <= planned.peak_rss_bytes / 2**20 <= 1.25 * measured


@pytest.mark.parametrize(
    ("recipe", "widths", "measured"),
    [
        ("w4g128-rtn", (4096, 11008, 4096), 175), ("nvfp4", (4096, 11008, 4096), 202),
        ("fp8-dynamic", (4096, 11008, 4096), 250), ("w4g128-rtn", (2048, 5632, 512), 124),
        ("fp8-dynamic", (2048, 5632, 512), 129), ("nvfp4", (2048, 5632, 512), 148),
        ("fp8-block", (2048, 5632, 512), 131),
    ],
)  # fmt: skip
def test_what_each_thread_stores_is_estimated(
    recipe: str, widths: tuple[int, int, int], measured: int, tmp_path: Path
) -> None:
    """The highest peaks of two threads, of shapes of tests/benchmarks/max_ram.py and memory.py."""
    shapes = header_files.llama(2, *widths, vocabulary=2048)
    model = Checkpoint.open(header_files.write(tmp_path / "m", shapes))
    planned = make_plan(load(recipe), model, threads=2)
    assert measured <= planned.peak_rss_bytes / 2**20 <= 1.25 * measured


@pytest.mark.parametrize(
    ("recipe", "threads", "measured"),
    [
        ("fp8-dynamic", 1, 257), ("fp8-dynamic", 2, 330), ("fp8-dynamic", 4, 450),
        ("w4g128-rtn", 1, 238), ("w4g128-rtn", 2, 334), ("w4g128-rtn", 4, 488),
    ],
)  # fmt: skip
def test_what_a_view_makes_is_estimated(
    recipe: str, threads: int, measured: int, tmp_path: Path
) -> None:
    """As measured of `--requantize`, of two layers 2048 wide in FP8."""
    shapes = header_files.llama(2, 2048, 14336, 256)
    model = Checkpoint.open(header_files.write(tmp_path / "m", shapes, dtype="BF16"))
    view = View(**{one.name: getattr(model, one.name) for one in fields(model)}, source=model)
    planned = make_plan(load(recipe), view, threads=threads)
    assert measured <= planned.peak_rss_bytes / 2**20 <= 1.25 * measured


@pytest.mark.parametrize(
    ("recipe", "threads", "measured"), [("fp8-block", 2, 490), ("mxfp4", 2, 479), ("mxfp4", 4, 482)]
)
def test_wide_rows_are_estimated(recipe: str, threads: int, measured: int, tmp_path: Path) -> None:
    """As measured of a layer of 53248 x 1024, of which the fewest rows are many numbers."""
    shapes = header_files.llama(1, 1024, 53248, 256)
    model = Checkpoint.open(header_files.write(tmp_path / "m", shapes, dtype="BF16"))
    planned = make_plan(load(recipe), model, threads=threads)
    assert measured <= planned.peak_rss_bytes / 2**20 <= 1.3 * measured


SEARCH = ["transforms=[smooth]", "smooth.alpha=search"]


@pytest.mark.parametrize(
    ("light", "other"),
    [
        (load("w4g128-gptq"), load("w4g128-gptq", ["gptq.static_groups=false"])),
        (load("w8a8-dynamic", SEARCH), load("nvfp4-w4a4", SEARCH)),
    ],
)
def test_what_kernels_do_not_read_back_takes_more(light: Any, other: Any, tmp_path: Path) -> None:
    """Groups of columns that are no neighbours, and small floats."""
    shapes = header_files.llama(2, 1024, 2816, 256)
    model = Checkpoint.open(header_files.write(tmp_path / "m", shapes))
    few, more = (make_plan(one, model, threads=2).peak_rss_bytes for one in (light, other))
    assert few < more
