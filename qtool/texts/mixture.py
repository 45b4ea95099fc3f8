"""Several texts to calibrate on, in stated shares: a YAML file that names them.

    - web.txt
    - {source: chats.jsonl, share: 2}

Of the samples each text gives its share (1 where none is said), chosen as they would be of that
text alone; then they alternate, so that the first of them are of all texts, too. A file is looked
for beside the YAML file, a hub dataset is named as elsewhere.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qtool.errors import RecipeError, SourceError, UnsupportedError
from qtool.texts.source import TOPICS, check_text, is_dataset
from qtool.texts.stored import JSON, is_plain, kind_of

_KEYS = {"source", "share"}  # of one text
_EXPECTED = "expected is a list of texts, each a name or {source: NAME, share: NUMBER}"


class TooShortError(SourceError):
    """The text does not have the samples that are asked for."""


@dataclass(frozen=True)
class Part:
    """A text of a mixture."""

    source: str | None  # None: Python's own help
    share: float = 1.0


@dataclass(frozen=True)
class Mixture:
    """Where samples come from: one text, or those that a YAML file names."""

    name: str  # of the YAML file; empty where there is none
    parts: tuple[Part, ...]

    def counts(self, samples: int) -> list[int]:
        """How many samples each text gives, by largest remainders; TooShortError where one is left
        without any."""
        shares = np.array([part.share for part in self.parts], np.float64)
        shares /= shares.max()  # the sum of which is a number
        wanted = samples * shares / shares.sum()
        found = np.floor(wanted).astype(np.int64)
        rest = np.argsort(found - wanted, kind="stable")
        found[rest[: samples - int(found.sum())]] += 1
        if not found.all():
            left = self.parts[int(np.argmin(found))]
            raise TooShortError(
                f"{self.name}: {samples} samples are too few for {len(self.parts)} texts in these "
                f"shares, none is left for {left.source}; ask for more (--samples)"
            )
        return [int(count) for count in found]


def _named(source: str) -> bool:
    return source.lower().endswith((".yaml", ".yml"))


def mixture(source: str | None) -> Mixture:
    """The texts that a source stands for; SourceError of a YAML file that is none of texts."""
    if source is None or not (_named(source) and Path(source).is_file()):
        return Mixture("", (Part(source),))
    from qtool.recipe import file, yaml_source

    path = Path(source)
    try:
        found = yaml_source.parse(file.read(path), source)
    except RecipeError as error:
        raise SourceError(f"{error} ({_EXPECTED})") from None
    if not isinstance(found.value, list) or not found.value:
        raise SourceError(f"{source}: {_EXPECTED}")
    parts = [
        _part(path, value, found.locate((number,))) for number, value in enumerate(found.value)
    ]
    seen: set[str] = set()
    for number, part in enumerate(parts):
        own = str(part.source)
        own = os.path.realpath(own) if Path(own).exists() else own
        if own in seen:
            where = found.locate((number,))
            raise SourceError(f"{where}: {part.source} is named twice; give it a larger share")
        seen.add(own)
    return Mixture(source, tuple(parts))


def check_source(source: str | None) -> None:
    """SourceError for texts that can be told to be of no use without model, network and torch."""
    of = mixture(source)
    for part in of.parts:
        try:
            check_text(part.source)
        except (SourceError, UnsupportedError) as error:
            if not of.name:
                raise
            raise type(error)(f"{of.name}: {error}") from None


def too_few_bytes(source: str | None, tokens: int) -> int | None:
    """Bytes of a file of plain text that cannot have so many tokens, or of several of them."""
    parts = [Path(part.source or "") for part in mixture(source).parts]
    if not all(path.is_file() and is_plain(path) and kind_of(path) not in JSON for path in parts):
        return None
    found = sum(path.stat().st_size for path in parts)
    return found if found < tokens else None


def interleaved(chosen: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Samples of all texts, [samples, length]: those of each at equal distances."""
    places = [(np.arange(len(one)) + 0.5) / len(one) for one in chosen]
    return np.concatenate(chosen)[np.argsort(np.concatenate(places), kind="stable")]


def _part(path: Path, value: object, where: str) -> Part:
    if isinstance(value, str):
        value = {"source": value}
    if not isinstance(value, dict) or not {"source"} <= value.keys() <= _KEYS:
        other = [key for key in value if key not in _KEYS] if isinstance(value, dict) else []
        found = f"{str(other[0])[:40]}: unknown key; " if other else ""
        raise SourceError(f"{where}: {found}{_EXPECTED}")
    source, share = value["source"], value.get("share", 1.0)
    if not isinstance(source, str) or not source:
        raise SourceError(f"{where}: source: {source!r} is no name; {_EXPECTED}")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < math.inf:
        raise SourceError(f"{where}: share: {share!r} is no number above 0; {_EXPECTED}")
    if _named(source):
        raise SourceError(f"{where}: {source}: a mixture within a mixture; name its texts here")
    near = path.parent / source
    try:
        there = near.exists()
    except OSError:  # a text instead of its name, say
        raise SourceError(f"{where}: source: {source[:40]!r} is no name; {_EXPECTED}") from None
    if there:
        return Part(str(near), float(share))
    if source != TOPICS and not is_dataset(source):
        raise SourceError(
            f"{where}: {near}: no such file, and {source} is no hub dataset id (owner/name or "
            "owner/name:FILE)"
        )
    return Part(source, float(share))
