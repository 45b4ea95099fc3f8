"""Kernels that are tried (tests/gpu), compiled."""

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from qtool.cuda import compiling, more_tasks
from qtool.cuda.tasks import Task
from support.cuda.gemv_tasks import (
    Tasks,
)
from support.places import TESTS

_SPEC = importlib.util.spec_from_file_location("tried", TESTS / "gpu" / "tried.py")
assert _SPEC is not None and _SPEC.loader is not None
tried = importlib.util.module_from_spec(_SPEC)
sys.modules["tried"] = tried  # where its dataclass looks
_SPEC.loader.exec_module(tried)
TEXT = tried.source()
_LISTED = re.compile(r"X\((tried_(across|columns|q4_k)_\w+), qt::Gemv<qt::\w+<(.*)>>\)")
# Of each kernel: the layout it is of, threads of a block, warps next to each other, their rows.
TRIED = {
    name: (
        layout,
        *[int(n) for n in numbers.split(", ") if n.isdigit()][:2],
        32 if layout == "q4_k" or "half" in name else 64,
    )
    for name, layout, numbers in _LISTED.findall(TEXT)
}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a unit of their own, where kernels are compiled."""
    real = compiling.unit_of

    def unit_of(kernel: str) -> tuple[str, str]:
        if kernel.startswith("tried_"):
            return "tried", f"{TEXT}\nQT_TRIED_KERNELS(QT_KERNEL)\n"
        return real(kernel)

    monkeypatch.setattr(compiling, "unit_of", unit_of)


@contextmanager
def instead(name: str, splits: int) -> Iterator[None]:
    """Products by a kernel that is tried, by so many blocks that share rows."""
    layout, threads, abreast, rows = TRIED[name]
    blocks = {layout: (rows * abreast, threads // 32 // abreast, threads, 1)}
    with (
        patch.dict(more_tasks._BLOCKS, blocks),
        patch.object(more_tasks, "splits_of", lambda *_: splits),
    ):
        yield


def by(name: str, make: Tasks, splits: int) -> Tasks:
    """The same tasks by that kernel."""

    def tasks(out: Any, keep: Any, done: Any) -> tuple[Task, ...]:
        with instead(name, splits):
            first, *more = make(out, keep, done)
        assert first.kernel.startswith("gemv_")
        return dataclasses.replace(first, kernel=name), *more

    return tasks
