"""Some of the fuzzers' inputs for each reader, and that they would notice one which believes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qtool.formats import safetensors_header
from qtool.messages.summary import LayerReport
from qtool.provenance.outcome import Outcome
from qtool.runs import resume
from support.places import TESTS

sys.path.insert(0, str(TESTS / "fuzz"))
import fuzz_readers
import readers

MANY = {"index": 100, "recipe": 60, "stats": 100, "header": 60}


def watch(name: str, folder: Path) -> fuzz_readers.Watch:
    place = folder / "place"
    place.mkdir()
    return fuzz_readers.Watch(readers.READERS[name](place))


@pytest.mark.parametrize("name", readers.READERS)
def test_some_inputs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Other processes may have the machine, and what is imported by a lie is not its work.
    monkeypatch.setattr(fuzz_readers, "SECONDS", 10.0)
    watching = watch(name, tmp_path)
    fuzz_readers.own(watching, 60, 1, MANY.get(name, 30))
    assert not watching.failed, watching.failed
    assert watching.tried["refused"] and watching.tried.total() >= 30


def _as_it_says(where: str, name: str, entry: Any, start: int, size: int) -> Any:
    begin, end = entry["data_offsets"]
    return safetensors_header.TensorInfo(
        name, entry["dtype"], tuple(entry["shape"]), start + begin, start + end
    )


def _what_was_written(entry: Any) -> Outcome:
    layers = [LayerReport(**layer) for layer in entry["layers"]]
    return Outcome(layers, list(entry["notes"]), None, [])


@pytest.mark.parametrize(
    ("reader", "module", "name", "instead"),
    [
        ("header", safetensors_header, "_parse_entry", _as_it_says),
        ("journal", resume, "outcome_of", _what_was_written),
        ("index", safetensors_header, "_json_bytes", len),
    ],
)
def test_a_reader_that_believes_is_caught(
    reader: str,
    module: Any,
    name: str,
    instead: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    watching = watch(reader, tmp_path)
    monkeypatch.setattr(module, name, instead)
    fuzz_readers.own(watching, 60, 1, 75 if reader == "index" else 150)
    assert watching.failed and list(tmp_path.glob(f"failed-{reader}-*"))
