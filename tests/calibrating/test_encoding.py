"""Long texts, encoded some at a time: the ids of the text as one, by tokenizers of all kinds."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)  # fmt: skip

from qtool.texts import encoding
from qtool.texts.source import default_text

LINES = default_text()[:40_000]
CHINESE = "".join(chr(0x4E00 + k * k % 900) + ("。" if k % 17 == 0 else "") for k in range(9000))
RUNS = "".join(mark * 64 for mark in ("\n", " ", "=", "ab")) + "\n"
TEXTS = {
    "lines": LINES,
    "words": " ".join(LINES.split()),
    "blanks": LINES.replace("\n", "\n\n \n\t").replace(" ", "  "),
    "numbers": "".join(str(k * k) for k in range(9000)),
    "chinese": CHINESE,
    "run of lines": "x" + "\n" * 9001 + " end",
    "run of blanks": "xy" + " " * 9000 + LINES[:3000],
    "run in prose": LINES[:900] + "\n" * 6000 + LINES[:3000],
    "run of signs": LINES[:950] + "=" * 3001 + LINES[:3000] + "ab" * 3000,
    "a long line first": " ".join(LINES.split())[:9000] + "\n" + LINES[:900],
    "specials": LINES.replace("the", "<s>").replace("of", "</s>\n"),
}
SPECIALS = ["<s>", "</s>", "<unk>"]


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def with_prefix() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return made


def without_words() -> Tokenizer:
    """As Gemma's: spaces are letters, and nothing parts words."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return made


def llama() -> Tokenizer:
    """As Llama 2's: a space before any text, and merges across words."""
    made = with_prefix()
    made.normalizer = normalizers.Replace(" ", "▁")
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "prefix": with_prefix,
    "no words": without_words,
    "unigram": unigram,
    "llama": llama,
}


@cache
def trained(kind: str) -> Tokenizer:
    made = KINDS[kind]()
    options: dict[str, Any] = {
        "vocab_size": 2500,
        "special_tokens": SPECIALS,
        "show_progress": False,
    }
    of = trainers.UnigramTrainer if kind == "unigram" else trainers.BpeTrainer
    if kind == "unigram":
        options["unk_token"] = "<unk>"
    made.train_from_iterator([LINES, CHINESE, *[RUNS] * 40], of(**options))
    if kind == "llama":
        made.pre_tokenizer = None
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), made.normalizer])
    pairs = [(name, made.token_to_id(name)) for name in SPECIALS[:2]]
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=None, special_tokens=pairs
    )
    return made


class Watched:
    """A tokenizer that notes how long the texts are which it gets."""

    def __init__(self, kind: str) -> None:
        self.tokenizer = trained(kind)
        self.longest = 0

    def encode(self, text: str) -> NDArray[np.int64]:
        self.longest = max(self.longest, len(text))
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int64)


def some_at_a_time(text: str, size: int) -> Iterator[str]:
    for start in range(0, len(text), size):
        yield text[start : start + size]


@pytest.fixture(autouse=True)
def _some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_AT_ONCE", 1000)
    monkeypatch.setattr(encoding, "_AROUND", 128)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=[] if kind in ("byte level", "unigram", "llama") else pytest.mark.slow
        )
        for kind in KINDS
    ],
)
def test_ids_are_those_of_the_text_as_one(kind: str, name: str) -> None:
    text, watched = TEXTS[name], Watched(kind)
    found = [*encoding.encoded(watched.encode, some_at_a_time(text, 700))]
    whole = np.concatenate(found)
    assert whole.dtype == np.int64
    assert whole.tolist() == trained(kind).encode(text, add_special_tokens=False).ids
    assert [*map(len, encoding.encoded(watched.encode, [text]))] == [*map(len, found)]
    # What puts a space before any text can be cut at spaces alone, and a run nowhere.
    if "run" not in name and (kind not in ("prefix", "llama") or " " in text):
        assert watched.longest < 2500


@pytest.mark.parametrize("text", ["", "a", "\n" * 3000, "a" * 3000, " " * 1001])
@pytest.mark.parametrize("kind", KINDS)
def test_odd_texts(kind: str, text: str) -> None:
    found = np.concatenate([*encoding.encoded(Watched(kind).encode, some_at_a_time(text, 7))])
    assert found.tolist() == trained(kind).encode(text, add_special_tokens=False).ids


def test_a_text_that_comes_at_once_takes_no_longer() -> None:
    """What is left of it is not copied at each cut."""

    def encode(text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    parts = 0
    for ids in encoding.encoded(encode, ["a word " * 1_000_000]):
        parts += 1
        assert len(ids) < 1500
    assert parts > 5000


def test_no_more_of_a_text_is_read_than_is_asked_for() -> None:
    read: list[str] = []

    def text() -> Iterator[str]:
        for part in some_at_a_time(LINES, 100):
            read.append(part)
            yield part

    next(encoding.encoded(Watched("byte level").encode, text()))
    assert 1000 < sum(map(len, read)) < 2000
