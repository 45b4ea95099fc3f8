"""What GPTQ v1 takes from the zeros of a matrix before it stores them, and what is read back.

One from every field, modulo 2^b: that is what qtool writes and what vLLM's kernels undo (without
the modulo: they read a stored 15 as 16). GPTQModel and AutoRound take ones from a whole word at
once, and GPTQModel, so transformers too, adds the same word when it loads. No difference where no
zero is 0; a zero of 0 borrows from the field above it.

    GPTQModel from 0.9, AutoRound to 0.15   2, 4 and 8 bits: words of ones, 0x11111111 of 4 bits
    GPTQModel to 6.0, 3 bits                the words of ones for the first and the third of three
                                            words are exchanged, so that symmetric files too
                                            hold other zeros field by field; from 7.0 by fields
    GPTQModel to 7.3.1                      ones of the width that the config says for most, even
                                            from matrices to which `dynamic` gives another: the
                                            words of that width or, of 3 bits from 7.0, one from
                                            each field of 3 bits in every three words

Who wrote a file is in `meta.quantizer` (gptqmodel:VERSION, among others) or `provider`
(auto-round). Symmetric zeros that are in the middle when read by fields are read so whoever wrote
them.

Sources: GPTQModel 0.9 to 7.3.4 (utils/model.py: convert_gptq_v2_to_v1_format and its converse; 3
bits: #2763), AutoRound 0.14 (torch/qlinear_torch_zp.py), vLLM (quantization/gptq/q_gemm.cu).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError
from qtool.formats import bits
from qtool.formats.facts import ArtifactScheme, Writer
from qtool.scheme import Scheme

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np


GPTQMODEL, AUTO_ROUND = "GPTQModel", "AutoRound"
_THREE_BY_FIELDS, _OWN_WIDTH = (7,), (7, 3, 2)  # versions of GPTQModel
_QUANTIZER = re.compile(r"gptqmodel:(\d+(?:\.\d+)*)")


def writer_of(config: Mapping[str, Any]) -> Writer | None:
    """Who wrote a config with quant_method gptq, of those who take ones from words; None for
    anybody else."""
    if config.get("provider") == "auto-round":
        return Writer(AUTO_ROUND)
    meta = config.get("meta")
    said = meta.get("quantizer") if isinstance(meta, Mapping) else None
    for text in said if isinstance(said, list) else [said]:
        if isinstance(text, str) and (match := _QUANTIZER.match(text[:40])):
            return Writer(GPTQMODEL, tuple(int(part) for part in match[1].split(".")))
    return None


def meant(
    found: ArtifactScheme, scheme: Scheme, words: NDArray[Any], rows: int
) -> NDArray[np.uint8]:
    """The zeros of stored words [groups, w], uint8 [groups, rows]."""
    zero = by_fields(found, scheme, words, rows)
    middle = np.uint8(1 << (scheme.bits - 1))
    if scheme.symmetric and bool((zero == middle).all()):
        return zero
    stored = np.ascontiguousarray(words).view("<u4")
    if _by_threes(found, scheme.bits):
        return bits.unpack(_threes_given_back(stored), scheme.bits, rows)
    ones = _taken(found, scheme.bits, words.shape[1])
    return zero if ones is None else bits.unpack((stored + ones).view("<i4"), scheme.bits, rows)


def _threes_given_back(words: NDArray[np.uint32]) -> NDArray[np.int32]:
    """Words [groups, w] with one added to every field of 3 bits; FormatError where they do not
    come in threes, which GPTQModel cannot write."""
    if words.shape[1] % 3:
        raise FormatError(
            f"{words.shape[1]} words of zeros, but GPTQModel takes ones of 3 bits from three "
            "words together; the config is of another file"
        )
    fields = bits.unpack(words, 3, words.shape[1] * bits.WORD // 3)
    return bits.pack((fields + np.uint8(1)) & np.uint8(7), 3)


def by_fields(
    found: ArtifactScheme, scheme: Scheme, words: NDArray[Any], rows: int
) -> NDArray[np.uint8]:
    """The same by the field alone, whoever wrote them."""
    zero = bits.unpack(words, scheme.bits, rows)
    if version_of(found, scheme, zero) == 1:
        zero = (zero + np.uint8(1)) & np.uint8((1 << scheme.bits) - 1)
    return zero


def version_of(found: ArtifactScheme, scheme: Scheme, zero: NDArray[np.uint8]) -> int:
    """1 where the stored zeros are one less than those meant, else 2. Files that say v1 and whose
    zeros are in the middle of a symmetric grid already are mislabelled."""
    middle = np.uint8(1 << (scheme.bits - 1))
    mislabelled = scheme.symmetric and bool((zero == middle).all())
    return 1 if found.layout == "v1" and not mislabelled else 2


def said(found: ArtifactScheme) -> str | None:
    """How zeros are read, in words, where that depends on who wrote them."""
    scheme = found.scheme
    if scheme is None:
        return None
    others = any(keys.get("bits", scheme.bits) != scheme.bits for _, keys in found.overrides)
    if _of_most(found) and others:
        return f"as {found.writer} stores them, ones of {scheme.bits} bits taken whatever the width"
    if scheme.symmetric or _taken(found, scheme.bits, 1) is None:
        return None
    return f"as {found.writer} stores them, ones taken from whole words"


def _of_most(found: ArtifactScheme) -> bool:
    """Whether ones are of the width that the config says for most matrices, whatever theirs."""
    writer = found.writer
    if found.layout != "v1" or found.scheme is None or writer is None:
        return False
    return writer.name == GPTQMODEL and writer.version < _OWN_WIDTH


def _by_threes(found: ArtifactScheme, width: int) -> bool:
    """Whether a matrix of another width lost one from every field of 3 bits."""
    scheme, writer = found.scheme, found.writer
    if scheme is None or writer is None or not _of_most(found):
        return False
    return scheme.bits == 3 != width and writer.version >= _THREE_BY_FIELDS


def _taken(found: ArtifactScheme, width: int, count: int) -> NDArray[np.uint32] | None:
    """What was taken from each of so many words in a row; None where one was taken from every
    field, or nothing."""
    writer = found.writer
    if found.layout != "v1" or writer is None:
        return None
    if found.scheme is not None and _of_most(found):
        width = found.scheme.bits
    if width != 3:
        return np.full(count, _ones(width), np.uint32)
    if writer.name != GPTQMODEL or writer.version >= _THREE_BY_FIELDS:
        return None
    first, second, third = (_ones(3) >> 32 * place & 0xFFFFFFFF for place in range(3))
    return np.resize(np.array([third, second, first], np.uint32), count)


def _ones(width: int) -> int:
    """A one in every field of a word, or of three words."""
    return sum(1 << at for at in range(0, bits.WORD * (3 if width == 3 else 1), width))
