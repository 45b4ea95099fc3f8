"""Kernels that are tried (tests/gpu), compiled."""

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from qtool import native_gguf
from qtool.cuda import compiling, more_tasks
from qtool.cuda.tasks import Task
from qtool.gguf_types import BY_NAME
from support.cuda.cuda_emulation import placed
from support.cuda.gemv_tasks import (
    Tasks,
    awq_tasks,
    gptq_tasks,
    parts_of_q4_k,
    q4_k_tasks,
)
from support.kernels.random_matrices import random_quant
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


Of = tuple[Any, Callable[[Any], Tasks], Any, float]


def of_layout(layout: str, shape: tuple[int, int]) -> Of:
    """Of a matrix: its exact numbers, the tasks of an input, and the sizes of its terms."""
    if layout == "q4_k":
        weight = np.random.default_rng(1).standard_normal(shape, np.float32)
        blocks = placed(native_gguf.encode(weight, BY_NAME["Q4_K"]))
        positive, less, floor = parts_of_q4_k(blocks)
        return (
            positive - less,
            lambda x: q4_k_tasks(blocks, shape[1], x),
            positive + less,
            floor,
        )
    quant = random_quant(4, shape, 128)
    exact = quant.dequantize().astype(np.float64)
    if layout == "across":
        return exact, lambda x: awq_tasks(quant, x), np.abs(exact), 0.0
    return exact, lambda x: gptq_tasks(quant, x, 2), np.abs(exact), 0.0
