"""The vocabulary that a GGUF file stores: its keys read and checked, for files.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qtool.errors import FormatError
from qtool.formats.gguf_values import Kind, Value
from qtool.gguf.tokenizer.bpe import PREFIX, TokenType
from qtool.gguf.tokenizer.hf_json import check_text
from qtool.gguf.tokenizer.special import ID_KEYS

# llama.cpp's own defaults where a file does not say.
_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "t5": {"eos": 1, "unk": 2, "pad": 0},
}


@dataclass(frozen=True)
class Vocab:
    """The tokens of a GGUF file."""

    texts: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    ids: Mapping[str, int]  # bos, eos ... those that the file, or llama.cpp by itself, names

    def padding(self, number: int) -> bool:
        """Whether a token stands for an id that the tokenizer does not have."""
        return self.types[number] == TokenType.UNUSED and self.texts[number] == f"[PAD{number}]"


def list_of(metadata: Mapping[str, Value], name: str, element: Kind) -> list[Any] | None:
    """An array of the tokenizer's keys, or None. Errors: FormatError for another kind of value."""
    value = metadata.get(PREFIX + name)
    if value is None:
        return None
    if value.kind is not Kind.ARRAY or value.element is not element:
        raise FormatError(
            f"{PREFIX}{name} is not an array of {element.name}; this GGUF file is damaged"
        )
    return list(value.value)


def read_vocab(metadata: Mapping[str, Value], kind: str) -> Vocab:
    """The vocabulary, whose tokens are all there, once each. kind: tokenizer.ggml.model."""
    texts = list_of(metadata, "tokens", Kind.STRING)
    if not texts:
        raise FormatError(
            f"{PREFIX}tokens is missing, but {PREFIX}model is {kind!r}; this GGUF file is damaged"
        )
    if len(set(texts)) != len(texts):
        raise FormatError(f"{PREFIX}tokens has a token twice; this GGUF file is damaged")
    for text in texts:
        check_text(text, f"{PREFIX}tokens")
    types = list_of(metadata, "token_type", Kind.INT32) or [TokenType.NORMAL] * len(texts)
    scores = list_of(metadata, "scores", Kind.FLOAT32) or [0.0] * len(texts)
    for name, values in (("token_type", types), ("scores", scores)):
        if len(values) != len(texts):
            raise FormatError(
                f"{PREFIX}{name} has {len(values)} values for {len(texts)} tokens; "
                "this GGUF file is damaged"
            )
    if not set(types) <= set(TokenType):
        raise FormatError(f"{PREFIX}token_type has values beyond 1 to 6; this GGUF file is damaged")
    ids = dict(_DEFAULT_IDS.get(kind, {}))
    for name, key in ID_KEYS.items():
        if key in metadata and isinstance(metadata[key].value, int):
            ids[name] = metadata[key].value
    return Vocab(
        tuple(texts),
        tuple(map(int, types)),
        tuple(map(float, scores)),
        {name: number for name, number in ids.items() if 0 <= number < len(texts)},
    )
