"""tests/benchmarks/hub.py: it runs, and a figure that is worse than its bar is named."""

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import pytest

from support.places import TESTS

PLACE = TESTS / "benchmarks" / "hub.py"
GOOD: dict[str, Any] = {
    "weights_bytes": 7_348_736,
    "on_disk_when_killed": 1_048_576,
    "served_after": 6_300_160,
    "fetched_twice": 0,
    "pickles_served": 0,
    "verify": "awq, 14.3% of the weights unquantized, 24 checks: nothing wrong",
    "artifact_files": 8,
    "pushed_files": 8,
    "pushed_and_differ": [],
    "inspected_format": "awq",
    "inspect_bytes": 16_477,
    "inspect_requests": 6,
    "again_bytes": 0,
    "again_requests": 0,
    "outside_loopback": 0,
    "seconds": {"quantize": 8.0, "push": 3.0},
}
WORSE: dict[str, Any] = {
    "weights_bytes": 0,
    "on_disk_when_killed": 0,
    "served_after": 7_348_736,
    "fetched_twice": 1,
    "pickles_served": 10_000_000,
    "verify": "awq: 2 errors",
    "artifact_files": 1,
    "pushed_files": 9,
    "pushed_and_differ": ["config.json"],
    "inspected_format": "dense",
    "inspect_bytes": 7_348_736,
    "inspect_requests": 100,
    "again_bytes": 1,
    "again_requests": 1,
    "outside_loopback": 1,
    "seconds": {"quantize": 8.0, "push": 300.0},
}


@pytest.fixture(scope="module")
def bar() -> Any:
    spec = spec_from_file_location("hub_bar", PLACE)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_good_figures_pass(bar: Any) -> None:
    assert bar.judged(GOOD) == []


@pytest.mark.parametrize("name", GOOD)
def test_each_figure_is_judged(name: str, bar: Any) -> None:
    assert name in bar.judged({**GOOD, name: WORSE[name]})
    without = {key: value for key, value in GOOD.items() if key != name}
    if name not in ("weights_bytes", "on_disk_when_killed", "artifact_files"):  # others need these
        assert bar.judged(without) == [name]


def test_a_figure_without_a_bar_is_missed(bar: Any) -> None:
    assert bar.judged({**GOOD, "new": 1}) == ["new"]


@pytest.mark.slow
def test_it_runs_and_passes() -> None:
    done = subprocess.run([sys.executable, str(PLACE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
