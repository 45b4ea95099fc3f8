"""Transforms of a block, one after another."""

import weakref
from typing import Any

import numpy as np
import pytest

from qtool.calibrating.stats import SiteStats
from qtool.transforms import chain
from qtool.transforms.proved import Applied


def test_statistics_are_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a transform has mapped is gone when the next one works, whoever called them: these are
    the largest that a block has in memory."""
    seen: list[Any] = []

    def maps(_: Any, stats: dict[str, SiteStats]) -> Applied:
        gram = stats["a"].gram
        assert gram is not None and all(one() is None for one in seen)
        seen.append(weakref.ref(gram))
        return Applied({"a": SiteStats(1, gram * 2)}, frozenset({str(len(seen))}), (str(gram[0]),))

    for name in ("smooth", "awq"):
        monkeypatch.setitem(chain.TRANSFORMS, name, maps)
    given = {"a": SiteStats(1, np.ones(1, np.float32))}
    names = ("smooth", "rotate", "awq")
    applied = chain.apply_in_turn(names, None, given)  # type: ignore[arg-type]
    assert applied.notes == ("1.0", "2.0") and applied.changed == {"1", "2"}
    found = applied.stats["a"].gram
    assert found is not None and found == 4 and len(seen) == 2


def test_without_transforms_they_stay() -> None:
    given = {"a": SiteStats(1)}
    assert chain.apply_in_turn(("rotate",), None, given).stats is given  # type: ignore[arg-type]
    assert given
