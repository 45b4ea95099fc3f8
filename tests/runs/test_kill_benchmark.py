"""The benchmark of kills can fail: work done again is told in decoder blocks of the model at
hand."""

import importlib
from types import ModuleType
from typing import Any

import pytest

from support.places import TESTS


@pytest.fixture
def bar(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TESTS / "benchmarks"))
    return importlib.import_module("kill")


def log(taken: int, done: int, count: int) -> list[dict[str, Any]]:
    said = f"going on with an earlier run: {taken} of {count} pieces are finished"
    steps = [
        {"event": "step", "kind": "step", "done": n + 1, "of": count - taken} for n in range(done)
    ]
    return [{"event": "message", "text": said}, *steps]


@pytest.mark.parametrize(("taken", "most"), [(0, 38 / 9), (20, 18 / 9), (34, 4 / 9)])
def test_pieces_done_again_are_parts_of_a_block(bar: ModuleType, taken: int, most: float) -> None:
    """Of 38 pieces all were told to be finished but one, and a next command took over some."""
    names = {"step": "piece", "tensor": "reading"}
    assert bar.most_pieces_of("tiny", "q4_k_m", []) == 9
    assert bar.most_pieces_of("tiny", "w4g128-rtn", []) == 0
    whole = bar.Whole({}, {"piece"}, names, 9, 1.0, 38, 1.0, 0.0)
    lost = bar.Work.of(log(0, 38, 38), names)
    next_one = bar.Work.of(log(taken, 1, 38), names)
    figures = bar.Figures("tiny", "q4_k_m")
    bar.done_again(lost, next_one, lost.done, whole, figures)
    assert figures.blocks == [pytest.approx(most)]
    line = {"model": "tiny", "recipe": "q4_k_m", "kills": 1, "when": {}, "resumed": 1,
            "mismatches": 0, "again": figures.again, "blocks": figures.blocks,
            "apart": {}}  # fmt: skip
    line["when"] = dict.fromkeys(("start", "blocks", "end", "named"), 0)
    assert bar.told([line]) == (most > 1)
