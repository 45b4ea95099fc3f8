"""A SentencePiece model file (tokenizer.model), a protocol buffer: read and written without one.

    ModelProto       1: SentencePiece, repeated   2: TrainerSpec   3: NormalizerSpec
    SentencePiece    1: piece, string   2: score, float   3: type, enum (1 if absent)
    TrainerSpec      3: model_type, enum   35: byte_fallback, bool   40..43: unk, bos, eos, pad id
    NormalizerSpec   1: name   2: precompiled_charsmap, bytes   3: add_dummy_prefix, bool
                     4: remove_extra_whitespaces   5: escape_whitespaces, bool

A message is fields one after the other: a varint (number << 3 | wire type), then a varint (0),
eight bytes (1), a length and that many bytes (2), or four bytes (5). Source: the file
sentencepiece_model.proto and the protocol buffer encoding.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from qtool.errors import FormatError

UNIGRAM, BPE = 1, 2
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of the vocabulary; its type's numbers are GGUF's token types."""

    text: str
    score: float
    type: int


@dataclass(frozen=True)
class SentencePieceModel:
    """What llama.cpp and the tokenizers library use of a model file."""

    pieces: tuple[Piece, ...]
    model_type: int = BPE
    byte_fallback: bool = False
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


def _varint(data: memoryview, at: int, where: str) -> tuple[int, int]:
    """A varint and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise FormatError(f"{where}: ends, or does not end, within a number; get the file again")


def _fields(data: memoryview, where: str) -> Iterator[tuple[int, int, int, memoryview]]:
    """(field number, wire type, varint value, bytes) of each field of a message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at, where)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at, where)
            yield number, wire, value, data[:0]
            continue
        if wire == _BYTES:
            size, at = _varint(data, at, where)
        elif wire in (_EIGHT, _FOUR):
            size = 8 if wire == _EIGHT else 4
        else:
            raise FormatError(
                f"{where}: byte {at - 1} says wire type {wire}, which no SentencePiece model has; "
                "this is another kind of file"
            )
        if size > len(data) - at:
            raise FormatError(
                f"{where}: a field of {size} bytes starts at byte {at} of {len(data)}: the file is "
                "cut off; get it again"
            )
        yield number, wire, 0, data[at : at + size]
        at += size


def _piece(data: memoryview, where: str) -> Piece:
    text, score, kind = "", 0.0, 1
    for number, wire, value, content in _fields(data, where):
        if number == 1 and wire == _BYTES:
            try:
                text = bytes(content).decode()
            except UnicodeDecodeError:
                raise FormatError(f"{where}: a piece is not UTF-8; get the file again") from None
        elif number == 2 and wire == _FOUR:
            score = struct.unpack("<f", content)[0]
        elif number == 3 and wire == _VARINT:
            kind = value
    if not text:
        raise FormatError(f"{where}: a piece is empty, so this is no SentencePiece model")
    if not isfinite(score):
        raise FormatError(f"{where}: the piece {text!r} has the score {score}; get the file again")
    if not 1 <= kind <= 6:
        raise FormatError(f"{where}: the piece {text!r} has the type {kind}, expected 1 to 6")
    return Piece(text, score, kind)


def parse(data: bytes, where: str) -> SentencePieceModel:
    """The model in a file's bytes. Errors: FormatError, which names `where`."""
    pieces: list[Piece] = []
    model_type, byte_fallback, charsmap = UNIGRAM, False, b""
    prefix = remove = True
    for number, wire, _, content in _fields(memoryview(data), where):
        if wire != _BYTES:
            continue
        if number == 1:
            pieces.append(_piece(content, where))
        elif number == 2:
            for inner, kind, value, _ in _fields(content, where):
                if inner == 3 and kind == _VARINT:
                    model_type = value
                elif inner == 35 and kind == _VARINT:
                    byte_fallback = bool(value)
        elif number == 3:
            for inner, kind, value, text in _fields(content, where):
                if inner == 2 and kind == _BYTES:
                    charsmap = bytes(text)
                elif inner == 3 and kind == _VARINT:
                    prefix = bool(value)
                elif inner == 4 and kind == _VARINT:
                    remove = bool(value)
    if not pieces:
        raise FormatError(f"{where}: holds no pieces, so it is not a SentencePiece model")
    return SentencePieceModel(tuple(pieces), model_type, byte_fallback, charsmap, prefix, remove)


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _block(number: int, content: bytes) -> bytes:
    return _number(number << 3 | _BYTES) + _number(len(content)) + content


def _flag(number: int, value: int) -> bytes:
    return _number(number << 3 | _VARINT) + _number(value)


def build(model: SentencePieceModel, ids: tuple[int | None, ...]) -> bytes:
    """The file of a model; ids: of unk, bos, eos and pad, None for one that there is not."""
    pieces = [
        _block(
            1,
            _block(1, piece.text.encode())
            + _number(2 << 3 | _FOUR)
            + struct.pack("<f", piece.score)
            + (_flag(3, piece.type) if piece.type != 1 else b""),
        )
        for piece in model.pieces
    ]
    trainer = _flag(3, model.model_type) + _flag(4, len(pieces))
    trainer += _flag(35, int(model.byte_fallback))
    for number, value in zip((40, 41, 42, 43), ids, strict=True):
        # An absent id is -1, which the encoding spells as 64 bits.
        trainer += _flag(number, value if value is not None else (1 << 64) - 1)
    normalizer = _block(1, b"identity" if not model.charsmap else b"user_defined")
    normalizer += _block(2, model.charsmap) if model.charsmap else b""
    normalizer += _flag(3, int(model.add_dummy_prefix))
    normalizer += _flag(4, int(model.remove_extra_whitespaces)) + _flag(5, 1)
    return b"".join([*pieces, _block(2, trainer), _block(3, normalizer)])
