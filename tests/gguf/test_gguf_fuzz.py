"""A few thousand of the fuzzer's files, and that it would notice a reader which believes them."""

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qtool.errors import FormatError
from qtool.formats import gguf_cursor, gguf_header
from support.places import TESTS

sys.path.insert(0, str(TESTS / "fuzz"))
import fuzz_gguf


def test_hundreds_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fuzz_gguf, "_TRIED", fuzz_gguf.Counter())
    fuzz_gguf.own(60, 1, tmp_path / "m.gguf", 400)
    tried = fuzz_gguf._TRIED
    assert tried["refused"] > 200 and tried["accepted"] > 200 and tried["converted"] > 40


def _believe_places(cursor: Any, tensors: Any) -> None:
    """Nothing is checked."""


def _believe_lengths(self: Any, count: int, what: str) -> int:
    begin: int = self.position
    if len(self.data) < self.size:
        self._read_to(self.size, what)
    self.position = begin + count
    return begin


@pytest.mark.parametrize(
    ("where", "name", "instead", "seen"),
    [
        (gguf_header, "_check_places", _believe_places, (AssertionError, FormatError)),
        (gguf_cursor.Cursor, "take", _believe_lengths, (struct.error, IndexError)),
    ],
)
def test_a_reader_that_believes_is_caught(
    where: Any,
    name: str,
    instead: Callable[..., Any],
    seen: tuple[type[Exception], ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(where, name, instead)
    with pytest.raises(seen):
        fuzz_gguf.own(60, 1, tmp_path / "m.gguf", 1500)
    assert list(tmp_path.glob("failed-*.gguf"))
