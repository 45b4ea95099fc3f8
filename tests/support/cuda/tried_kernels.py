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

from qtool.cuda import compiling, pack_gemv_tasks
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
_LISTED = re.compile(r"X\((tried_(across|columns|q4_k)_\w+), (qt::Gemv<qt::\w+<(.*)>>)\)")


def _blocks(layout: str, numbers: str) -> tuple[str, int, int, int]:
    threads, abreast, _, *more = [int(n) for n in numbers.split(", ") if n.isdigit()]
    rows = more[1] if len(more) > 1 else tried.ROWS["q4_k" if layout == "q4_k" else "awq"]
    return layout, threads, abreast, rows


# Of each kernel: the layout it is of, threads of a block, warps next to each other, their rows.
TRIED = {name: _blocks(layout, numbers) for name, layout, _, numbers in _LISTED.findall(TEXT)}
# And bytes of shared memory that its launch asks for, as gemv.py does.
_SHARED = {
    kernel.layout: kernel.shared for kind in tried.NAMES for kernel in tried.kernels_of(kind)
}
ROOMY = {
    name: _SHARED[layout]
    for name, _, layout, _ in _LISTED.findall(TEXT[TEXT.index("QT_TRIED_ROOMY") :])
}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a unit of their own, where kernels are compiled."""
    real = compiling.unit_of

    def unit_of(kernel: str) -> tuple[str, str]:
        if kernel.startswith("tried_"):
            lists = "QT_TRIED_KERNELS(QT_KERNEL)\nQT_TRIED_ROOMY(QT_ROOMY_KERNEL)\n"
            return "tried", f"{TEXT}\n{lists}"
        return real(kernel)

    monkeypatch.setattr(compiling, "unit_of", unit_of)


@contextmanager
def instead(name: str, splits: int) -> Iterator[None]:
    """Products by a kernel that is tried, by so many blocks that share rows."""
    layout, threads, abreast, rows = TRIED[name]
    blocks = {layout: (rows * abreast, threads // 32 // abreast, threads, 1)}
    with (
        patch.dict(pack_gemv_tasks._BLOCKS, blocks),
        patch.object(pack_gemv_tasks, "splits_of", lambda *_: splits),
    ):
        yield


def by(name: str, make: Tasks, splits: int) -> Tasks:
    """The same tasks by that kernel."""

    def tasks(out: Any, keep: Any, done: Any) -> tuple[Task, ...]:
        with instead(name, splits):
            first, *more = make(out, keep, done)
        assert first.kernel.startswith("gemv_")
        return dataclasses.replace(first, kernel=name, shared=ROOMY.get(name, 0)), *more

    return tasks
