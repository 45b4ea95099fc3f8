"""Gemma 4's tokenizer.json to the keys of a GGUF file: tokenizer.ggml.model = gemma4.

BPE by ranks of merges over the text itself, spaces spelled U+2581, with tokens for bytes to fall
back to. Unlike llama.cpp's converter, which goes by tokenizer_config.json alone, every token that
tokenizer.json calls special is one here: as a plain one llama.cpp would not find it in a text.
Source: llama.cpp, conversion/gemma.py and gguf-py (LlamaHfVocab).
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_values import Kind, Value, array, string, strings
from qtool.gguf.tokenizer.bpe import PREFIX, SPACE, TokenType, merge_texts
from qtool.gguf.tokenizer.hf_json import TOKENIZER, AddedToken, bpe_vocabulary
from qtool.gguf.tokenizer.spm import ADDED_SCORE

NAME = "gemma4"
# Shown wherever they are, so that what reads a conversation finds them.
_VISIBLE = {
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
    "<tool_response|>", '<|"|>',
}  # fmt: skip
_EXTRA = ("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens")
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


def gemma4_metadata(
    folder: Path, data: Mapping[str, Any], tokenizer_config: Mapping[str, Any], vocab_size: int
) -> dict[str, Value]:
    """model, tokens, scores, token_type and merges."""
    path, told = folder / TOKENIZER, data["model"]
    if told.get("type", "BPE") != "BPE" or not told.get("byte_fallback"):
        raise UnsupportedError(
            f"{path}: its model is no BPE that falls back to bytes, as Gemma 4's is, and llama.cpp "
            "reads no other for this architecture"
        )
    if not _cuts_alike(data):
        raise UnsupportedError(
            f"{path}: it does more to a text than to spell spaces U+2581, as Gemma 4's does, and "
            "llama.cpp would cut the text elsewhere"
        )
    vocabulary = bpe_vocabulary(folder, data, tokenizer_config)
    last = max(vocabulary.tokens)
    if last >= vocab_size:
        raise FormatError(
            f"{path}: the token {vocabulary.tokens[last]!r} has id {last}, but the embedding has "
            f"{vocab_size} rows; the tokenizer and the model do not belong together"
        )
    names, base = set(_named(tokenizer_config)), len(told["vocab"])
    texts = [vocabulary.tokens.get(n, f"[PAD{n}]") for n in range(vocab_size)]
    types = [
        int(_type(text, vocabulary.added.get(n), text in names, n < base))
        if n in vocabulary.tokens
        else int(TokenType.UNUSED)
        for n, text in enumerate(texts)
    ]
    return {
        PREFIX + "model": string(NAME),
        PREFIX + "tokens": strings(texts),
        PREFIX + "scores": array(Kind.FLOAT32, [ADDED_SCORE] * vocab_size),
        PREFIX + "token_type": array(Kind.INT32, types),
        PREFIX + "merges": strings(merge_texts(vocabulary.merges)),
    }


def _cuts_alike(data: Mapping[str, Any]) -> bool:
    """Whether spaces are spelled so; to cut at spaces, of which none is left, does nothing."""
    given, pre = data.get("normalizer"), data.get("pre_tokenizer")
    parts = (
        given.get("normalizers") if isinstance(given, dict) and "normalizers" in given else given
    )
    wanted = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    idle = isinstance(pre, dict) and (pre.get("type"), pre.get("pattern")) == (
        "Split",
        {"String": " "},
    )
    return parts in (wanted, [wanted]) and (pre is None or idle)


def _type(text: str, added: AddedToken | None, named: bool, in_model: bool) -> TokenType:
    if text in _VISIBLE:
        return TokenType.USER_DEFINED
    if _BYTE.fullmatch(text):
        return TokenType.BYTE
    if named or (added is not None and added.special):
        return TokenType.CONTROL
    return TokenType.NORMAL if in_model else TokenType.USER_DEFINED


def _named(tokenizer_config: Mapping[str, Any]) -> Iterable[str]:
    """All special tokens that tokenizer_config.json names."""
    found = [value for key, value in tokenizer_config.items() if key.endswith("_token")]
    for key in _EXTRA:
        given = tokenizer_config.get(key)
        found += given.values() if isinstance(given, dict) else given or []
    for entry in found:
        text = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(text, str):
            yield text
