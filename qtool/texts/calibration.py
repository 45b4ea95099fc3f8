"""The tokens that the model reads while its activations are measured.

    text    see qtool.texts.source; several of them in qtool.texts.mixture
    chunks  each text tokenized as one, without special tokens, and each chat as its template writes
            it; their ids one after the other, of many the first, cut consecutively into n chunks of
            equal length; of these, by number,
            sorted(numpy.random.default_rng(seed).permutation(n)[:samples])

The digest is over the chosen token ids: equal digests mean equal calibration, wherever the text
came from.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints.structure import text_config
from qtool.errors import SourceError
from qtool.formats import safetensors_file as st
from qtool.messages.progress import Progress
from qtool.recipe.file import Precision, said_of
from qtool.texts.chats import Chat, render
from qtool.texts.mixture import TooShortError, interleaved, mixture
from qtool.texts.source import TOPICS, Piece, Texts, load_text, most_read
from qtool.texts.tokenizing import (
    TokenizerErrors,
    tokenize,
    tokenized,
    transformers_tokenizer,
)

_SHORT = 1 << 20  # bytes; the default text has half of that
_LONG = 1 << 22  # bytes, of which it is shown how many are done
_MOST_KEPT = 1 << 24  # bytes of ids of short texts
_KEPT: dict[tuple[str, Path, object], NDArray[np.uintc]] = {}


class Settings(Protocol):
    """The calibration table of a recipe."""

    @property
    def source(self) -> str | None: ...
    @property
    def samples(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True)
class Calibration:
    """Token ids, and how they were chosen."""

    tokens: NDArray[np.int64]  # [samples, length]
    source: str  # "file", a hub dataset, or pydoc_data.topics: no path of this machine
    seed: int
    precision: Precision = "float32"  # of the products that were made with them

    @property
    def digest(self) -> str:
        """sha256 over the ids, as little-endian int64, sample after sample."""
        return hashlib.sha256(np.ascontiguousarray(self.tokens, dtype="<i8").tobytes()).hexdigest()

    def record(self) -> dict[str, Any]:
        """For the provenance."""
        samples, length = self.tokens.shape
        return {
            "source": self.source,
            "samples": samples,
            "length": length,
            "seed": self.seed,
            "digest": f"sha256:{self.digest}",
            **said_of(self.precision),
        }


def calibration_tokens(
    settings: Settings, model: Path, progress: Progress | None = None
) -> Calibration:
    """Read, tokenize with the tokenizer in the folder `model`, cut and choose.

    SourceError where the text is missing or too short, with the numbers. progress: shows how much
    of a long text is done.
    """
    of = mixture(settings.source)
    chosen, name = [], ""
    for part, count in zip(of.parts, of.counts(settings.samples), strict=True):
        own = load_text(part.source)
        if progress is not None and part.source and own.name not in ("file", part.source):
            progress.say(f"note: {part.source}: its texts are those of {own.name}")
        where = f"the calibration text ({part.source or TOPICS})"
        # Ids of all of a text are there no longer than this.
        ids = _ids_of(own, model, most_read(count * settings.length), progress)
        some = chunks(ids, count, settings.length, settings.seed, where)
        chosen.append(some)
        name = "file" if of.name else own.name
    return Calibration(interleaved(chosen), name, settings.seed)


def _ids_of(texts: Texts, model: Path, most: int, progress: Progress | None) -> NDArray[np.integer]:
    """Of a text, so many at most; SourceError where the model has no such ids."""
    ids: NDArray[np.integer]
    if (text := _short(texts)) is not None:
        ids = _kept_ids(text, model, _state(model / "tokenizer.json"))
    else:  # may be as long as anybody likes, and is not kept
        ids = _ids(texts, model, most, progress)
    if ids.size and (highest := int(ids.max())) >= (vocabulary := _vocabulary(model, highest + 1)):
        raise SourceError(
            f"{model}: its tokenizer gives the id {highest}, but config.json has a vocabulary of "
            f"{vocabulary}; tokenizer and model do not belong together"
        )
    return ids


def check_length(settings: Settings, model: Path) -> None:
    """SourceError as above of a text that may be too short, before torch is imported."""
    of = mixture(settings.source)
    of.counts(settings.samples)
    if (model / "tokenizer.json").is_file() and all(
        _short(load_text(part.source)) is not None for part in of.parts
    ):
        calibration_tokens(settings, model)


def _short(texts: Texts) -> str | None:
    """The text, where it is one, and no longer than is kept."""
    if texts.size > _SHORT or not texts.plain:
        return None
    found = ""
    for piece in texts.pieces():
        if isinstance(piece, Chat):
            return None
        found = "".join(piece)
    return found


def _kept_ids(text: str, model: Path, state: object) -> NDArray[np.uintc]:
    """Of a short text, all of it, since which chunks are taken depends on how many there are.
    A run wants them for a digest, for what it measures and for what it proves: once will do."""
    key = hashlib.sha256(text.encode()).hexdigest(), model, state
    ids = _KEPT.get(key)
    if ids is None:
        ids = tokenize(text, model).astype(np.uintc)
        ids.flags.writeable = False
        while sum(one.nbytes for one in _KEPT.values()) + ids.nbytes > _MOST_KEPT and _KEPT:
            _KEPT.pop(next(iter(_KEPT)), None)
        _KEPT[key] = ids
    return ids


def _ids(texts: Texts, model: Path, most: int, progress: Progress | None) -> NDArray[np.uintc]:
    """Of texts and chats, one after the other."""
    if progress is None or texts.size <= _LONG:
        return _joined(_each(texts.pieces(), model), most)
    with progress.transfer("encoding the calibration text", texts.size) as read:
        ids = _joined(_each(texts.pieces(read), model), most)
    if len(ids) == most:
        progress.say(f"note: of the calibration text the first {most:,} tokens are read")
    return ids


def _each(pieces: Iterator[Piece], model: Path) -> Iterator[NDArray[np.int64]]:
    theirs = None
    for piece in pieces:
        if isinstance(piece, Chat):
            if theirs is None:
                theirs = transformers_tokenizer(model)
            yield _chat_ids(piece, theirs, model)
        else:
            yield from tokenized(piece, model)


def _joined(some: Iterable[NDArray[np.int64]], most: int) -> NDArray[np.uintc]:
    """Four bytes each while they come."""
    kept = array("I")
    for ids in some:
        kept.frombytes(ids.astype(np.uintc).tobytes())
        if len(kept) >= most:
            break
    return np.array(kept, copy=False)[:most] if kept else np.empty(0, np.uintc)


def _chat_ids(chat: Chat, tokenizer: Any, model: Path) -> NDArray[np.int64]:
    """As apply_chat_template(tokenize=True) of transformers gives them."""
    text = render(chat, tokenizer, str(model))
    with TokenizerErrors(model / "tokenizer.json"):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return np.array(ids, dtype=np.int64)


def _state(file: Path) -> tuple[int, int, int] | None:
    """Differs where a file was written anew."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def chunks(
    ids: NDArray[np.integer], samples: int, length: int, seed: int, where: str = "the text"
) -> NDArray[np.int64]:
    """`samples` of the consecutive chunks of `length` ids, in order: [samples, length]."""
    n = len(ids) // length
    if not len(ids):
        raise SourceError(f"{where} is empty, or has no tokens; give another one")
    if n < samples:
        raise TooShortError(
            f"{where} has {len(ids)} tokens, enough for {n} samples of {length}, but {samples} "
            "are asked for; give a longer text, or fewer or shorter samples (--samples, --length)"
        )
    chosen = np.sort(np.random.default_rng(seed).permutation(n)[:samples])
    return ids[: n * length].reshape(n, length)[chosen].astype(np.int64)


def _vocabulary(model: Path, default: int) -> int:
    """vocab_size of config.json, or `default` where it says none."""
    path = model / "config.json"
    config: Mapping[str, Any] = st.read_json(path) if path.is_file() else {}
    size = config.get("vocab_size", text_config(config).get("vocab_size"))
    return size if isinstance(size, int) else default
