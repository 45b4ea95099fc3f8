"""SentencePiece tokenizers to the keys of a GGUF file: tokenizer.ggml.model = llama, or t5.

llama.cpp's "llama" merges the pair whose union scores best, as SentencePiece's BPE does; its "t5"
finds the best path, as Unigram does, but has no byte tokens to fall back to. So a Unigram model is
written as "t5" if it has none, and as "llama", as llama.cpp's converter writes every model of a
decoder, if it has. Source: llama.cpp, conversion/base.py, phi.py and t5.py.
"""

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_values import Kind, Value, array, boolean, string, strings
from qtool.gguf.tokenizer.bpe import PREFIX, SPACE, TokenType, looks_special
from qtool.gguf.tokenizer.hf_json import (
    TOKENIZER,
    AddedToken,
    bpe_vocabulary,
    check_text,
    decoder_entries,
    read_object,
    special_names,
)
from qtool.gguf.tokenizer.hf_json import added_tokens as all_added
from qtool.gguf.tokenizer.sentencepiece import BPE, UNIGRAM, Piece, SentencePieceModel, parse

MODEL = "tokenizer.model"
# The converter's scores: of an added token, and of an id that no token has.
ADDED_SCORE, PADDING_SCORE = -1000.0, -10000.0
_LARGEST = 3.4e38  # of float32, roughly
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/=]+ \d+\r?\n")


def read_model(folder: Path) -> SentencePieceModel | None:
    """tokenizer.model, or None: there is none, or it is Llama 3's, a list of words in base 64."""
    path = folder / MODEL
    if not path.is_file():
        return None
    data = path.read_bytes()
    return None if _TIKTOKEN.match(data) else parse(data, str(path))


def spm_metadata(
    folder: Path,
    model: SentencePieceModel,
    tokenizer_config: Mapping[str, Any],
    vocab_size: int,
    phi3: bool,
) -> dict[str, Value]:
    """model, pre, tokens, scores and token_type of a tokenizer.model and the tokens added to it.

    phi3: that converter takes tokenizer.json's added tokens too, all of them user-defined.
    """
    pieces = [
        Piece(piece.text, piece.score, TokenType.NORMAL if piece.type == 4 else piece.type)
        for piece in model.pieces[:vocab_size]
    ]
    for number in range(len(pieces), vocab_size):
        pieces.append(Piece(f"[PAD{number}]", PADDING_SCORE, TokenType.UNUSED))
    for number, text, special in _additions(folder, tokenizer_config, phi3):
        if number >= vocab_size:
            continue  # it has no row in the embedding: an image's place, say
        kind = TokenType.USER_DEFINED
        if special or (special is not None and not phi3 and looks_special(text)):
            kind = TokenType.CONTROL
        elif special is not None and not phi3:
            text = text.replace(SPACE, " ")
        pieces[number] = Piece(check_text(text, str(folder)), ADDED_SCORE, kind)
    if model.model_type == UNIGRAM and not model.byte_fallback:
        return unigram_keys(pieces, model)
    return _keys("llama", pieces)


def _additions(
    folder: Path, tokenizer_config: Mapping[str, Any], phi3: bool
) -> Iterator[tuple[int, str, bool | None]]:
    """(id, text, special) of added tokens, in the order in which one overrides another.

    added_tokens.json does not tell whether a token is special: None.
    """
    path = folder / "added_tokens.json"
    for text, number in read_object(path).items():
        if type(number) is not int or number < 0:
            raise FormatError(
                f"{path}: the token {text!r} has the id {number!r}, expected a number from 0 on"
            )
        yield number, text, None
    for number, entry in decoder_entries(folder, tokenizer_config).items():
        yield number, entry["content"], bool(entry.get("special"))
    if phi3:
        data = read_object(folder / TOKENIZER)
        model = data.get("model")
        vocab = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocab, dict):
            for number, token in all_added(folder, data, {}, vocab).items():
                yield number, token.content, token.special


def _keys(name: str, pieces: list[Piece]) -> dict[str, Value]:
    return {
        PREFIX + "model": string(name),
        PREFIX + "pre": string("default"),
        PREFIX + "tokens": strings([piece.text for piece in pieces]),
        PREFIX + "scores": array(Kind.FLOAT32, [piece.score for piece in pieces]),
        PREFIX + "token_type": array(Kind.INT32, [int(piece.type) for piece in pieces]),
    }


def unigram_keys(pieces: list[Piece], model: SentencePieceModel) -> dict[str, Value]:
    """The keys of a Unigram vocabulary, with how it normalizes a text."""
    keys = _keys("t5", pieces)
    keys[PREFIX + "add_space_prefix"] = boolean(model.add_dummy_prefix)
    keys[PREFIX + "remove_extra_whitespaces"] = boolean(model.remove_extra_whitespaces)
    if model.charsmap:
        keys[PREFIX + "precompiled_charsmap"] = array(Kind.UINT8, list(model.charsmap))
    return keys


def json_metadata(
    folder: Path, data: Mapping[str, Any], tokenizer_config: Mapping[str, Any], vocab_size: int
) -> dict[str, Value]:
    """The keys of a tokenizer.json that was a SentencePiece model once, where that file is lost.

    A BPE one has merges in place of scores: a token's score is then minus the rank of the first
    merge that makes it, which puts the merges of "llama" in that order. (llama.cpp's converter
    writes -1000 for all, and llama.cpp then cuts words elsewhere.)
    """
    path = folder / TOKENIZER
    told = data["model"]
    unigram = told.get("type") == "Unigram"
    prefix, squeeze, charsmap = _normalization(path, data)
    if unigram:
        scored = _unigram_vocabulary(path, told)
        vocab = {text: number for number, (text, _) in enumerate(scored)}
        texts = dict(enumerate(vocab))
        scores = dict(scored)
        added = all_added(folder, data, tokenizer_config, vocab)
        texts |= {number: token.content for number, token in added.items()}
        unknown = texts.get(told["unk_id"]) if type(told.get("unk_id")) is int else None
    else:
        vocabulary = bpe_vocabulary(folder, data, tokenizer_config)
        texts, added = dict(vocabulary.tokens), dict(vocabulary.added)
        scores = {a + b: -float(r) for r, (a, b) in reversed(list(enumerate(vocabulary.merges)))}
        unknown = told.get("unk_token") or special_names(tokenizer_config).get("unk")
    last = max(texts)
    if last >= vocab_size:
        raise FormatError(
            f"{path}: the token {texts[last]!r} has id {last}, but config.json's vocab_size, the "
            f"rows of the embedding, is {vocab_size}; the tokenizer and the model do not belong "
            "together"
        )
    pieces = [
        _json_piece(number, texts.get(number), added.get(number), scores, unknown)
        for number in range(vocab_size)
    ]
    fallback = bool(told.get("byte_fallback"))
    model = SentencePieceModel((), UNIGRAM if unigram else BPE, fallback, charsmap, prefix, squeeze)
    if unigram and not fallback:
        return unigram_keys(pieces, model)
    keys = _keys("llama", pieces)
    if not prefix:
        keys = {PREFIX + "add_space_prefix": boolean(False)} | keys
    return keys


def _json_piece(
    number: int,
    text: str | None,
    added: AddedToken | None,
    scores: Mapping[str, float],
    unknown: str | None,
) -> Piece:
    if text is None:
        return Piece(f"[PAD{number}]", PADDING_SCORE, TokenType.UNUSED)
    if text == unknown:
        return Piece(text, scores.get(text, 0.0), TokenType.UNKNOWN)
    if _BYTE.fullmatch(text):
        return Piece(text, scores.get(text, 0.0), TokenType.BYTE)
    if added is None:
        return Piece(text, scores.get(text, 0.0), TokenType.NORMAL)
    if added.special or looks_special(text):
        return Piece(text, ADDED_SCORE, TokenType.CONTROL)
    return Piece(text.replace(SPACE, " "), ADDED_SCORE, TokenType.USER_DEFINED)


def _unigram_vocabulary(path: Path, told: Mapping[str, Any]) -> list[tuple[str, float]]:
    entries = told.get("vocab")
    if not isinstance(entries, list) or not entries:
        raise FormatError(f"{path}: has no vocabulary (model.vocab); get the file again")
    found: dict[str, float] = {}
    for number, entry in enumerate(entries):
        if (
            not isinstance(entry, list)
            or len(entry) != 2
            or not isinstance(entry[0], str)
            or not isinstance(entry[1], int | float)
        ):
            raise FormatError(f"{path}: entry {number} of the vocabulary is not a text and a score")
        if not abs(entry[1]) < _LARGEST:
            raise FormatError(
                f"{path}: the piece {entry[0]!r} has the score {str(entry[1])[:30]}, which float32 "
                "cannot hold; get the file again"
            )
        if entry[0] in found:
            raise FormatError(f"{path}: the vocabulary has the token {entry[0]!r} twice")
        found[check_text(entry[0], str(path))] = float(entry[1])
    return list(found.items())


def _parts(entry: Any, inner: str) -> list[dict[str, Any]]:
    """A normalizer or pre_tokenizer as a flat list of its parts."""
    if not isinstance(entry, dict):
        return []
    if entry.get("type") == "Sequence":
        items = entry.get(inner)
        return [p for i in (items if isinstance(items, list) else ()) for p in _parts(i, inner)]
    return [entry]


def _normalization(path: Path, data: Mapping[str, Any]) -> tuple[bool, bool, bytes]:
    """(a space is put before a text, runs of spaces become one, charsmap) of a tokenizer.json."""
    prefix = squeeze = spaces = False
    charsmap = b""
    for part in _parts(data.get("normalizer"), "normalizers"):
        kind, pattern = part.get("type"), part.get("pattern")
        if kind == "Prepend" and part.get("prepend") == SPACE:
            prefix = True
        elif kind == "Replace" and pattern == {"String": " "} and part.get("content") == SPACE:
            spaces = True
        elif (kind == "Replace" and pattern == {"Regex": " {2,}"}) or kind == "Strip":
            squeeze = True
        elif kind == "Precompiled":
            try:
                charsmap = b64decode(part.get("precompiled_charsmap") or "", validate=True)
            except (Base64Error, TypeError, ValueError):
                raise FormatError(f"{path}: its precompiled_charsmap is not base 64") from None
        else:
            raise _unlike(path, f"normalizer {kind!r}")
    for part in _parts(data.get("pre_tokenizer"), "pretokenizers"):
        kind = part.get("type")
        if kind == "Metaspace" and part.get("replacement", SPACE) == SPACE:
            scheme = part.get("prepend_scheme")
            prefix |= part.get("add_prefix_space", True) if scheme is None else scheme != "never"
            spaces = True
        elif kind == "WhitespaceSplit":
            squeeze = True
        elif kind != "Split":  # Gemma's, at the spaces that its normalizer has replaced already
            raise _unlike(path, f"pre_tokenizer {kind!r}")
    if not spaces:
        raise _unlike(path, "lack of a step that makes spaces into U+2581")
    return prefix, squeeze, charsmap


def _unlike(path: Path, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{path}: its {what} is not what a SentencePiece model does, so llama.cpp would read a "
        "text differently; put the model's tokenizer.model beside it if there is one"
    )
