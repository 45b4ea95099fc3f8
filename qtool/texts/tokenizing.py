"""A model's own tokenizer: ids of texts, and text of ids."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.errors import SourceError, UnsupportedError
from qtool.formats import safetensors_file as st
from qtool.texts.encoding import Encode, encoded
from qtool.texts.source import Text


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
        with TokenizerErrors(file):
            return np.array(fast.encode(text, add_special_tokens=special).ids, np.int64)

    return encode


def text_after(before: Sequence[int], ids: Sequence[int], model: Path) -> str:
    """What ids add to the text of those before them, without special tokens. What characters a
    token is can depend on its neighbours, so that both are decoded and the difference taken."""
    decode = decoder(model)
    return decode([*before, *ids])[len(decode(before)) :]


def decoder(model: Path, special: bool = False) -> Callable[[Sequence[int]], str]:
    """What makes text of ids, without special tokens or with them, as they are spelled."""
    fast = model / "tokenizer.json"
    if not fast.is_file():
        slow = transformers_tokenizer(model)
        return lambda ids: str(slow.decode([*ids], skip_special_tokens=not special))
    tokenizer = _fast(fast)

    def decode(ids: Sequence[int]) -> str:
        with TokenizerErrors(fast):
            return str(tokenizer.decode([*ids], skip_special_tokens=not special))

    return decode


def _fast(path: Path) -> Any:
    """Of a tokenizer.json: the same ids as transformers gives, without importing it."""
    from tokenizers import Tokenizer

    content = st.read_json(path)
    if not isinstance(content.get("model"), dict):
        raise SourceError(f"{path}: not a tokenizer (it has no `model`); fetch it again")
    with TokenizerErrors(path):
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
        with TokenizerErrors(model / "tokenizer.json"):
            return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    # What tokenizer classes raise of files that are not theirs, or not as they should be.
    except (OSError, ValueError, ImportError, TypeError, AttributeError, LookupError,
            RuntimeError) as error:  # fmt: skip
        said = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedError(
            f"{model}: no tokenizer that transformers can load ({said[:200]}); put the model's own "
            "beside its weights: text is cut into tokens with it"
        ) from None


class TokenizerErrors:
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
