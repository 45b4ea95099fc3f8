"""What a tokenizer made of a text, remembered: the same text by the same tokenizer is cut once.

Every run that is calibrated, rotated or proved cuts the same texts with one of few tokenizers, and
that takes longer than all else that it does with a small model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

LONG = 2000  # characters: shorter texts are no work


@dataclass(frozen=True)
class Remembering:
    """A Tokenizer whose ids of long texts are kept."""

    tokenizer: Any
    content: bytes  # of its tokenizer.json
    kept: dict[tuple[bytes, str, bool], list[int]]

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        if len(text) < LONG:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        key = (self.content, text, add_special_tokens)
        if key not in self.kept:
            found = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            self.kept[key] = found.ids
        return SimpleNamespace(ids=self.kept[key])

    def decode(self, ids: list[int], **how: Any) -> str:
        return str(self.tokenizer.decode(ids, **how))


@contextmanager
def remembered() -> Iterator[None]:
    """Within, texts are cut once in this process."""
    from qtool.texts import tokenizing

    load = tokenizing._fast
    kept: dict[tuple[bytes, str, bool], list[int]] = {}

    def fast(path: Path) -> Remembering:
        return Remembering(load(path), path.read_bytes(), kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizing, "_fast", fast)
        yield
