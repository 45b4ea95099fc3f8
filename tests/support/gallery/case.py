"""What a broken artifact is: how it is made, and what is said of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Broken:
    """One exhibit."""

    name: str
    seen: str  # a public issue about breakage of this kind, or a few words
    parent: str
    damage: Callable[[Path], object]
    check: str  # id of the check that finds it
    named: str  # what the finding names, or a part of it
    phrase: str  # of the sentence, as a regular expression
    severity: str = "error"
    engine: str | None = None
    tp: int = 1
    against: bool = False  # compared with the model that it was made of
