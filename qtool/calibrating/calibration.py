"""The tokens that the model reads while its activations are measured.

    text    see qtool.calibrating.texts
    chunks  each text tokenized as one, without special tokens, and each chat as its template writes
            it; their ids one after the other, cut consecutively into n chunks of equal length; of
            these, by number, sorted(numpy.random.default_rng(seed).permutation(n)[:samples])

The digest is over the chosen token ids: equal digests mean equal calibration, wherever the text
came from.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qtool.calibrating.chats import Chat, render
from qtool.calibrating.encoding import Encode, encoded
from qtool.calibrating.texts import TOPICS, Piece, Text, Texts, load_text
from qtool.errors import SourceError, UnsupportedError
from qtool.formats import safetensors_file as st
from qtool.runs.progress import Progress

_SHORT = 1 << 20  # bytes; the default text has half of that
_LONG = 1 << 22  # bytes, of which it is shown how many are done


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


class TooShortError(SourceError):
    """The text does not have the samples that are asked for."""


@dataclass(frozen=True)
class Calibration:
    """Token ids, and how they were chosen."""

    tokens: NDArray[np.int64]  # [samples, length]
    source: str  # "file", a hub dataset, or pydoc_data.topics: no path of this machine
    seed: int

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
        }


def calibration_tokens(
    settings: Settings, model: Path, progress: Progress | None = None
) -> Calibration:
    """Read, tokenize with the tokenizer in the folder `model`, cut and choose.

    SourceError where the text is missing or too short, with the numbers. progress: shows how much
    of a long text is done.
    """
    texts = load_text(settings.source)
    ids: NDArray[np.integer]
    if (text := _short(texts)) is not None:
        ids = _kept_ids(text, model, _state(model / "tokenizer.json"))
    else:  # may be as long as anybody likes, and is not kept
        ids = _ids(texts, model, progress)
    if ids.size and (highest := int(ids.max())) >= (vocabulary := _vocabulary(model, highest + 1)):
        raise SourceError(
            f"{model}: its tokenizer gives the id {highest}, but config.json has a vocabulary of "
            f"{vocabulary}; tokenizer and model do not belong together"
        )
    where = f"the calibration text ({settings.source or TOPICS})"
    tokens = chunks(ids, settings.samples, settings.length, settings.seed, where)
    return Calibration(tokens, texts.name, settings.seed)


def check_length(settings: Settings, model: Path) -> None:
    """SourceError as above of a text that may be too short, before torch is imported."""
    if (model / "tokenizer.json").is_file() and _short(load_text(settings.source)) is not None:
        calibration_tokens(settings, model)


def _short(texts: Texts) -> str | None:
    """The text, where it is one, and no longer than is kept."""
    if texts.size > _SHORT:
        return None
    found = ""
    for piece in texts.pieces():
        if isinstance(piece, Chat):
            return None
        found = "".join(piece)
    return found


@lru_cache(maxsize=1)
def _kept_ids(text: str, model: Path, _: object) -> NDArray[np.int64]:
    """Of a short text, all of it, since which chunks are taken depends on how many there are.
    A run wants them for a digest, for what it measures and for what it proves: once will do."""
    ids = tokenize(text, model)
    ids.flags.writeable = False
    return ids


def _ids(texts: Texts, model: Path, progress: Progress | None) -> NDArray[np.uintc]:
    """Of texts and chats, one after the other."""
    if progress is None or texts.size <= _LONG:
        return _joined(_each(texts.pieces(), model))
    with progress.transfer("encoding the calibration text", texts.size) as read:
        return _joined(_each(texts.pieces(read), model))


def _each(pieces: Iterator[Piece], model: Path) -> Iterator[NDArray[np.int64]]:
    theirs = None
    for piece in pieces:
        if isinstance(piece, Chat):
            if theirs is None:
                theirs = transformers_tokenizer(model)
            yield _chat_ids(piece, theirs, model)
        else:
            yield from tokenized(piece, model)


def _joined(some: Iterable[NDArray[np.int64]]) -> NDArray[np.uintc]:
    """Four bytes each while they come."""
    kept = array("I")
    for ids in some:
        kept.frombytes(ids.astype(np.uintc).tobytes())
    return np.array(kept, copy=False) if kept else np.empty(0, np.uintc)


def _chat_ids(chat: Chat, tokenizer: Any, model: Path) -> NDArray[np.int64]:
    """As apply_chat_template(tokenize=True) of transformers gives them."""
    text = render(chat, tokenizer, str(model))
    with _TokenizerErrors(model / "tokenizer.json"):
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
    if n < samples:
        raise TooShortError(
            f"{where} has {len(ids)} tokens, enough for {n} samples of {length}, but {samples} "
            "are asked for; give a longer text, or fewer or shorter samples (--samples, --length)"
        )
    chosen = np.sort(np.random.default_rng(seed).permutation(n)[:samples])
    return ids[: n * length].reshape(n, length)[chosen].astype(np.int64)


def tokenize(text: str, model: Path, special: bool = False) -> NDArray[np.int64]:
    """Ids of the text as one, with special tokens (BOS and the like) where that is asked for."""
    if special:
        return _encode(model, special)(text)
    return np.concatenate([*tokenized([text], model)])


def tokenized(text: Text, model: Path) -> Iterator[NDArray[np.int64]]:
    """Ids of a text as one, without special tokens, of which some come at a time as it does."""
    return encoded(_encode(model), text)


def _encode(model: Path, special: bool = False) -> Encode:
    file = model / "tokenizer.json"
    if not file.is_file():
        theirs = transformers_tokenizer(model)
        return lambda text: np.array(theirs.encode(text, add_special_tokens=special), np.int64)
    fast = _fast(file)

    def encode(text: str) -> NDArray[np.int64]:
        with _TokenizerErrors(file):
            return np.array(fast.encode(text, add_special_tokens=special).ids, np.int64)

    return encode


def text_after(before: Sequence[int], ids: Sequence[int], model: Path) -> str:
    """What ids add to the text of those before them, without special tokens. What characters a
    token is can depend on its neighbours, so that both are decoded and the difference taken."""
    fast = model / "tokenizer.json"
    both = [*before], [*before, *ids]
    if fast.is_file():
        tokenizer = _fast(fast)
        with _TokenizerErrors(fast):
            first, whole = (str(tokenizer.decode(some)) for some in both)
    else:
        slow = transformers_tokenizer(model)
        first, whole = (str(slow.decode(some, skip_special_tokens=True)) for some in both)
    return whole[len(first) :]


def _fast(path: Path) -> Any:
    """Of a tokenizer.json: the same ids as transformers gives, without importing it."""
    from tokenizers import Tokenizer

    content = st.read_json(path)
    if not isinstance(content.get("model"), dict):
        raise SourceError(f"{path}: not a tokenizer (it has no `model`); fetch it again")
    with _TokenizerErrors(path):
        tokenizer = Tokenizer.from_str(json.dumps(content))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


# Of the files that tokenizers of transformers are made of, one is always there.
_TOKENIZERS = ("*token*", "*vocab*", "*.model", "*.tiktoken", "*.spm", "*spiece*", "*.bpe", "*.txt")


def transformers_tokenizer(model: Path) -> Any:
    """The tokenizer as transformers loads it; UnsupportedError where it cannot."""
    if model.is_dir() and not any(path for one in _TOKENIZERS for path in model.glob(one)):
        raise UnsupportedError(
            f"{model}: has no tokenizer; put the model's own (tokenizer.json, "
            "tokenizer_config.json) beside its weights: text is cut into tokens with it"
        )
    from transformers import AutoTokenizer

    try:
        with _TokenizerErrors(model / "tokenizer.json"):
            return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    # What tokenizer classes raise of files that are not theirs, or not as they should be.
    except (OSError, ValueError, ImportError, TypeError, AttributeError, LookupError,
            RuntimeError) as error:  # fmt: skip
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(
            f"{model}: no tokenizer that transformers can load ({said}); calibration needs one"
        ) from None


class _TokenizerErrors:
    """Within, what the tokenizers library says of a file becomes a SourceError.

    Its errors are plain Exceptions: no class of their own, and no other class is taken for one. Of
    some files it panics, which is no Exception at all, and then writes pages to stderr itself.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stderr: int | None = None

    def __enter__(self) -> None:
        with suppress(OSError):  # where there is no stderr, nothing can be written to it
            self._stderr = os.dup(2)
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 2)
            os.close(nothing)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stderr is not None:
            os.dup2(self._stderr, 2)
            os.close(self._stderr)
        if kind is Exception or (kind is not None and kind.__name__ == "PanicException"):
            said = " ".join(str(error).split())[:200]
            raise SourceError(
                f"{self._path}: the tokenizer cannot be used ({said}); fetch it again"
            ) from error


def _vocabulary(model: Path, default: int) -> int:
    """vocab_size of config.json, or `default` where it says none."""
    path = model / "config.json"
    config: Mapping[str, Any] = st.read_json(path) if path.is_file() else {}
    nested = config.get("text_config")
    size = config.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
    return size if isinstance(size, int) else default
