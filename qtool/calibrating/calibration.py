"""The tokens that the model reads while its activations are measured.

    text    a plain text file; or JSONL, whose `text` fields are joined by newlines; or such a file
            of a dataset on the hub; or, where nothing is named, Python's own help texts
    chunks  the text tokenized as one, without special tokens, and cut consecutively into n chunks
            of equal length; of these, by number,
            sorted(numpy.random.default_rng(seed).permutation(n)[:samples])

The digest is over the chosen token ids: equal digests mean equal calibration, wherever the text
came from.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from qtool import hub
from qtool.errors import SourceError, UnsupportedError
from qtool.formats import safetensors_file as st

_JSONL = (".jsonl", ".ndjson", ".json")
_TEXT = (".txt", ".text", ".md", *_JSONL)
_SHORT = 1 << 20  # characters; the default text has half of that
TOPICS = "pydoc_data.topics"


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


def calibration_tokens(settings: Settings, model: Path) -> Calibration:
    """Read, tokenize with the tokenizer in the folder `model`, cut and choose.

    SourceError where the text is missing or too short, with the numbers.
    """
    text, name = load_text(settings.source)
    if len(text) <= _SHORT:
        ids = _kept_ids(text, model, _state(model / "tokenizer.json"))
    else:  # may be as long as anybody likes, and is not kept
        ids = tokenize(text, model)
    if ids.size and (highest := int(ids.max())) >= (vocabulary := _vocabulary(model, highest + 1)):
        raise SourceError(
            f"{model}: its tokenizer gives the id {highest}, but config.json has a vocabulary of "
            f"{vocabulary}; tokenizer and model do not belong together"
        )
    where = f"the calibration text ({settings.source or TOPICS})"
    tokens = chunks(ids, settings.samples, settings.length, settings.seed, where)
    return Calibration(tokens, name, settings.seed)


def check_length(settings: Settings, model: Path) -> None:
    """SourceError as above of a text that may be too short, before torch is imported."""
    if (model / "tokenizer.json").is_file() and len(load_text(settings.source)[0]) <= _SHORT:
        calibration_tokens(settings, model)


@lru_cache(maxsize=1)
def _kept_ids(text: str, model: Path, _: object) -> NDArray[np.int64]:
    """Of a short text, all of it, since which chunks are taken depends on how many there are.
    A run wants them for a digest, for what it measures and for what it proves: once will do."""
    ids = tokenize(text, model)
    ids.flags.writeable = False
    return ids


def _state(file: Path) -> tuple[int, int, int] | None:
    """Differs where a file was written anew."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def chunks(
    ids: NDArray[np.int64], samples: int, length: int, seed: int, where: str = "the text"
) -> NDArray[np.int64]:
    """`samples` of the consecutive chunks of `length` ids, in order: [samples, length]."""
    n = len(ids) // length
    if n < samples:
        raise TooShortError(
            f"{where} has {len(ids)} tokens, enough for {n} samples of {length}, but {samples} "
            "are asked for; give a longer text, or fewer or shorter samples (--samples, --length)"
        )
    chosen = np.sort(np.random.default_rng(seed).permutation(n)[:samples])
    return ids[: n * length].reshape(n, length)[chosen]


def load_text(source: str | None) -> tuple[str, str]:
    """The text of a file, a hub dataset or (None) of Python's help; and its public name."""
    if source is None or source == TOPICS:
        return default_text(), TOPICS
    if (path := _file(source)) is not None:
        return read_text(path), "file"
    dataset, _, file = source.partition(":")
    return read_text(_download(dataset, file)), source


def check_source(source: str | None) -> None:
    """SourceError for a text that can be told to be of no use without model, network and torch."""
    if source is not None and source != TOPICS and (path := _file(source)) is not None:
        read_text(path)


def _file(source: str) -> Path | None:
    """The file of that name; None where only a hub dataset can be meant. SourceError."""
    path = Path(source)
    if path.is_file():
        return path
    if path.exists():
        raise SourceError(f"{path}: a folder; --calibration wants a text or JSONL file")
    if hub.is_hub_id(source.partition(":")[0]):
        return None
    raise SourceError(
        f"{source}: no such file, and no hub dataset id (owner/name or owner/name:FILE)"
    )


def default_text() -> str:
    """What `help()` knows of the language: about 460,000 characters on every machine."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_text(path: Path, *, raw: bool = False) -> str:
    """A text file, or the `text` fields of a JSONL file.

    Ends of lines become newlines, as Python reads text, unless `raw`, as llama.cpp reads it.
    """
    try:
        with path.open(encoding="utf-8", newline="" if raw else None) as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path}: byte {error.start} is not UTF-8; calibration text must be UTF-8"
        ) from None
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None
    if path.suffix.lower() not in _JSONL:
        return text
    return "\n".join(_records(path, text))


def _records(path: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise SourceError(
                f"{path}:{number}: not JSON; expected JSONL, one object a line with a `text` field"
            ) from None
        found = record.get("text") if isinstance(record, dict) else None
        if not isinstance(found, str):
            raise SourceError(f"{path}:{number}: expected an object whose `text` is a string")
        try:
            found.encode()
        except UnicodeEncodeError:
            raise SourceError(
                f"{path}:{number}: its text has half of a surrogate pair, which is no character"
            ) from None
        yield found


def tokenize(text: str, model: Path, special: bool = False) -> NDArray[np.int64]:
    """Ids of the text as one, with special tokens (BOS and the like) where that is asked for."""
    fast = model / "tokenizer.json"
    if fast.is_file():
        tokenizer = _fast(fast)
        with _TokenizerErrors(fast):
            ids = tokenizer.encode(text, add_special_tokens=special).ids
        return np.array(ids, dtype=np.int64)
    slow = transformers_tokenizer(model)
    return np.array(slow.encode(text, add_special_tokens=special), dtype=np.int64)


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


def transformers_tokenizer(model: Path) -> Any:
    """The tokenizer as transformers loads it; UnsupportedError where it cannot."""
    from transformers import AutoTokenizer

    try:
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


def _download(dataset: str, file: str) -> Path:
    """One text file of a hub dataset, through the hub's cache."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub import errors as hub_errors

    repository, _, revision = dataset.partition("@")
    where = f"{dataset}: dataset on the hub (there is no such file here)"
    transport = cast("tuple[type[Exception], ...]", hub_errors.HfHubHTTPError.__bases__)
    try:
        if not file:
            names = HfApi().list_repo_files(
                repository, repo_type="dataset", revision=revision or None
            )
            file = _choose(where, names)
        return Path(
            hf_hub_download(repository, file, repo_type="dataset", revision=revision or None)
        )
    except (hub_errors.RepositoryNotFoundError, hub_errors.HFValidationError):
        raise SourceError(f"{where} does not exist, or is private; check the spelling") from None
    except hub_errors.EntryNotFoundError as error:
        reason = (
            "cannot be reached, and the cache has no copy; check the network and HF_HUB_OFFLINE"
            if isinstance(error, hub_errors.LocalEntryNotFoundError)
            else f"has no file {file!r}"
        )
        raise SourceError(f"{where} {reason}") from None
    except transport as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise SourceError(f"{where} cannot be downloaded: {said}") from None


def _choose(where: str, names: list[str]) -> str:
    """The text file of a dataset: of several, the first in order that says `train`, if any."""
    usable = sorted(
        name
        for name in names
        if name.lower().endswith(_TEXT) and not name.lower().startswith(("readme", "license"))
    )
    usable = [name for name in usable if Path(name).suffix.lower() != ".json"] or usable
    if not usable:
        raise UnsupportedError(
            f"{where} has no text or JSONL file (it has {', '.join(sorted(names)[:4])}); this "
            "version reads no Parquet: save its text as a file and name that"
        )
    return next((name for name in usable if "train" in name.lower()), usable[0])
