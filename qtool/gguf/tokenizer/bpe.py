"""Byte-level BPE from tokenizer.json to the keys of a GGUF file (tokenizer.ggml.model = gpt2)."""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_values import Kind, Value, array, string, strings
from qtool.gguf.tokenizer import bytelevel, pre_hashes, pretokenizers
from qtool.gguf.tokenizer.hf_json import TOKENIZER, Vocabulary, bpe_vocabulary, special_names

PREFIX = "tokenizer.ggml."
# SentencePiece's sign for a space.
SPACE = "\u2581"
_SPECIAL_TEXTS = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")


class TokenType(IntEnum):
    """llama_token_type; SentencePiece's own numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def looks_special(text: str) -> bool:
    """Whether an added token must be a control token though its file does not say so.

    command-r, deepseek-coder and gemma leave the flag out; llama.cpp's converter has this list.
    """
    return (
        text in _SPECIAL_TEXTS
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<｜") and text.endswith("｜>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )


def bpe_metadata(
    folder: Path,
    data: Mapping[str, Any],
    tokenizer_config: Mapping[str, Any],
    vocab_size: int,
    pre: str | None,
) -> dict[str, Value]:
    """model, pre, tokens, token_type and merges of a byte-level BPE tokenizer.json.

    Ids up to vocab_size (the rows of the embedding) that no token has become [PAD...] tokens.
    """
    vocabulary = bpe_vocabulary(folder, data, tokenizer_config)
    last = max(vocabulary.tokens)
    if last >= vocab_size:
        raise FormatError(
            f"{folder / TOKENIZER}: the token {vocabulary.tokens[last]!r} has id {last}, but "
            f"config.json's vocab_size, the rows of the embedding, is {vocab_size}; "
            "the tokenizer and the model do not belong together"
        )
    name = pre or pre_name(folder, data, tokenizer_config, vocabulary)
    texts: list[str] = []
    types: list[int] = []
    for number in range(vocab_size):
        text = vocabulary.tokens.get(number)
        added = vocabulary.added.get(number)
        if text is None:
            text, kind = f"[PAD{number}]", TokenType.UNUSED
        elif added is None:
            kind = TokenType.NORMAL
        else:
            if not added.normalized:
                text = bytelevel.read(text)
            if added.special or looks_special(text):
                kind = TokenType.CONTROL
            else:
                text, kind = text.replace(SPACE, " "), TokenType.USER_DEFINED
        texts.append(text)
        types.append(int(kind))
    return {
        PREFIX + "model": string("gpt2"),
        PREFIX + "pre": string(name),
        PREFIX + "tokens": strings(texts),
        PREFIX + "token_type": array(Kind.INT32, types),
        PREFIX + "merges": strings(merge_texts(vocabulary.merges)),
    }


def merge_texts(merges: Sequence[tuple[str, str]]) -> list[str]:
    """Merges as "left right"; a space within a token is spelled as byte-level text spells it."""
    space = bytelevel.CHARACTER[0x20]
    return [f"{left.replace(' ', space)} {right.replace(' ', space)}" for left, right in merges]


def pre_name(
    folder: Path,
    data: Mapping[str, Any],
    tokenizer_config: Mapping[str, Any],
    vocabulary: Vocabulary,
) -> str:
    """llama.cpp's name of the pre-tokenizer: by its fingerprint, else by how it cuts a text.

    Errors: UnsupportedError where neither tells.
    """
    ends = _ends(data, tokenizer_config, vocabulary)
    name = pre_hashes.known_name(vocabulary, data, ends)
    row = pretokenizers.match_row(data)
    told = None if name is None else pretokenizers.find_row(name)
    # The test text does not meet every difference: what cuts otherwise is not what it tells.
    if told is not None and (row is None or row.steps == told.steps):
        return str(name)
    if row is not None:
        return row.names[0]
    raise UnsupportedError(
        f"{folder / TOKENIZER}: its pre_tokenizer is none of those whose name in llama.cpp qtool "
        "knows (the table in qtool/gguf/tokenizer/pretokenizers.py), so llama.cpp would cut a text "
        "into other words than the model was trained on; add a row to that table"
    )


def _ends(
    data: Mapping[str, Any], tokenizer_config: Mapping[str, Any], vocabulary: Vocabulary
) -> tuple[list[int], list[int]]:
    """The ids that transformers puts before and after a text."""
    numbers = {token: number for number, token in vocabulary.tokens.items()}
    processor = data.get("post_processor")
    told = [tokenizer_config.get(f"add_{kind}_token") for kind in ("bos", "eos")]
    if processor is None or told != [None, None]:
        names = special_names(tokenizer_config)
        first, last = (
            [numbers[names[kind]]] if add and names.get(kind) in numbers else []
            for kind, add in zip(("bos", "eos"), told, strict=True)
        )
        return first, last
    before: list[int] = []
    after: list[int] = []
    parts = processor.get("processors") if isinstance(processor, dict) else []
    for part in parts if isinstance(parts, list) and parts else [processor]:
        single = part.get("single") if isinstance(part, dict) else None
        target = before
        for item in single if isinstance(single, list) else ():
            special = item.get("SpecialToken") if isinstance(item, dict) else None
            if not isinstance(special, dict):
                target = after
            elif special.get("id") in numbers:
                target.append(numbers[special["id"]])
    return before, after
