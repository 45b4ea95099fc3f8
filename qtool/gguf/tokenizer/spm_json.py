"""A SentencePiece vocabulary as the model of a tokenizer.json.

The tokenizers library merges pairs in a given order where SentencePiece's BPE merges the pair
whose union scores best: so each way to part a token into two tokens is a merge, in the order of
the scores of the whole. A Unigram model is kept as it is.
"""

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from qtool.gguf.tokenizer.bpe import SPACE, TokenType
from qtool.gguf.tokenizer.sentencepiece import Piece, SentencePieceModel


def bpe_normalizer(prefix: bool) -> dict[str, Any]:
    """Spaces as U+2581, and one before each text (between special tokens) if `prefix`."""
    parts: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    parts.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return {"type": "Sequence", "normalizers": parts}


def bpe_model(
    pieces: Sequence[Piece], unknown: str | None, prefix: bool, *, merge: bool = True
) -> dict[str, Any]:
    """The model and decoder of a tokenizer.json; merge: merges are told by the scores."""
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": unknown,
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True,
            "byte_fallback": True, "ignore_merges": False,
            "vocab": {piece.text: number for number, piece in enumerate(pieces)},
            "merges": merges(pieces) if merge else [],
        },
    }  # fmt: skip


def merges(pieces: Sequence[Piece]) -> list[list[str]]:
    """Every pair of tokens whose union is a token, the best scored first."""
    scores = {p.text: p.score for p in pieces if p.type == TokenType.NORMAL}
    order = {piece.text: number for number, piece in enumerate(pieces)}
    found: list[tuple[float, int, int, int, str, str]] = []
    for text, score in scores.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in scores and right in scores:
                # Of equal scores SentencePiece takes the leftmost pair: the longer left part is
                # the one that grew from there.
                found.append((-score, -cut, order[left], order[right], left, right))
    found.sort()
    return [[left, right] for *_, left, right in found]


def unigram_tokenizer(model: SentencePieceModel, unknown: int | None) -> dict[str, Any]:
    """Normalizer, pre-tokenizer, decoder and model of a Unigram tokenizer.json."""
    parts: list[dict[str, Any]] = []
    if model.charsmap:
        charsmap = b64encode(model.charsmap).decode()
        parts.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if model.remove_extra_whitespaces:
        parts.append({"type": "Strip", "strip_left": True, "strip_right": True})
        parts.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    space = {
        "type": "Metaspace", "replacement": SPACE, "split": True,
        "prepend_scheme": "always" if model.add_dummy_prefix else "never",
    }  # fmt: skip
    return {
        "normalizer": {"type": "Sequence", "normalizers": parts} if parts else None,
        "pre_tokenizer": space,
        "decoder": space,
        "model": {
            "type": "Unigram", "unk_id": unknown, "byte_fallback": False,
            "vocab": [[piece.text, piece.score] for piece in model.pieces],
        },
    }  # fmt: skip
