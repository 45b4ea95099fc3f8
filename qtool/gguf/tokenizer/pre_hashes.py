"""llama.cpp's fingerprint of a pre-tokenizer: the ids that one test text becomes.

Its converter encodes a text full of blanks, digits, scripts and emoji, and knows the SHA-256 of the
printed list of ids for each tokenizer that it was taught. That tells apart tokenizers that cut a
text alike, which is all that pretokenizers.py can. So the same is done here, in plain Python: for
that one text, byte-level BPE takes no library. A tokenizer with anything unusual in it has no
fingerprint here, and is then known by how it cuts. Source: llama.cpp, conversion/base.py.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any

from qtool.gguf.tokenizer import bytelevel
from qtool.gguf.tokenizer.hf_json import Vocabulary
from qtool.gguf.tokenizer.pretokenizers import (
    BYTE_LEVEL,
    DIGIT_RUNS,
    DIGITS,
    GPT2,
    GPT2_CUT,
    TABLE,
    Step,
    normal_forms,
    read_steps,
)

TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶"
    "\u200d🌫️ (multiple emojis concatenated) ✅ 🦙🦙 3 33 333 3333 33333 3333"
    "33 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天"
    "～ ------======= нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? "
    "I've been 'told he's there, 'RE you sure? 'M not s"
    "ure I'll make it, 'D you like some tea? We'Ve a'lL"
)
# The first 16 digits of the SHA-256.
NAMES = {
    "b0a6b1c0bd5998eb": "a.x-4.0",
    "3c30d3ad1d6b6420": "bloom",
    "81d72c7348a9f0eb": "chatglm-bpe",
    "b6e8e1518dc4305b": "chatglm-bpe",
    "7b3e7548e4308f52": "codeshell",
    "9c2227e4dd922002": "command-r",
    "a8594e3edff7c29c": "dbrx",
    "347715f544604f91": "deepseek-coder",
    "049ecf7629871e30": "deepseek-llm",
    "b3f499bb4255f8ca": "deepseek-r1-qwen",
    "877081d19cf6996e": "deepseek-v3",
    "4e2b24cc4770243d": "exaone",
    "2085e1638f6c377a": "exaone4",
    "862f827721df9560": "f2llmv2",
    "8aeee3860c56296a": "falcon",
    "3eda48b4c4dc7de7": "falcon-h1",
    "48f8e02c0359c0bb": "falcon-h1",
    "60476e1243776c4f": "falcon-h1",
    "a6b57017d60e6edb": "falcon-h1",
    "9d032fcbd5501f4a": "falcon3",
    "ad851be1dba641f2": "gigachat",
    "9ca2dd618e8afaf0": "glm4",
    "a1336059768a55c9": "glm4",
    "cdf5f35325780597": "glm4",
    "0fe1cf6eda062318": "gpt-2",
    "3ce83efda5659b07": "gpt-2",
    "ccc2ef013c104be7": "gpt-4o",
    "bc01ce58980e1db4": "gpt3-finnish",
    "53e325976a6e1423": "granite-docling",
    "66b8d4e19ab16c3b": "grok-2",
    "7e57df22b1fe23a7": "hunyuan",
    "bba3b3366b646dbd": "hunyuan-dense",
    "b53802fb28e26d64": "jais",
    "27949a2493fc4a9f": "jina-v2-de",
    "b3d1dd861f1d4c5c": "jina-v2-de",
    "171aeeedd6fb548d": "jina-v2-es",
    "a023e9fdc5a11f03": "jina-v5-nano",
    "b4b8ca1f9769494f": "joyai-llm",
    "e4d54df1ebc1f2b9": "kanana2",
    "4a2e2abae11ca2b8": "kormo",
    "169bf0296a13c4d9": "lfm2",
    "9e454714343b69b9": "lfm2",
    "0ef9807a4087ebef": "llama-bpe",
    "d353350c764d8c3b": "llama4",
    "d4c8f286ea6b520b": "megrez",
    "a1e163ecab2e718a": "mellum",
    "9dcf830ee9990cdb": "mellum2",
    "f6791d196f87ce6b": "midm-2.0",
    "1431a23e583c9743": "minerva-7b",
    "a0b64b4385f12366": "modern-bert",
    "b6dc8df998e1cfbd": "olmo",
    "fcace8b9cac38ce8": "phi-2",
    "0e9433cbbb161f89": "pixtral",
    "c7ea5862a53e4272": "poro-chat",
    "d4540891389ea895": "qwen2",
    "e636dc30a262dcc0": "qwen2",
    "1444df51289cfa80": "qwen35",
    "d30d75d9059f1aa2": "qwen35",
    "6221ad2852e85ce9": "refact",
    "c136ed14d01c2745": "smaug-bpe",
    "855059429035d75a": "smollm",
    "16389f0a1f51ee53": "solar-open",
    "32d85c31273f8019": "stablelm2",
    "35d91631860c815f": "starcoder",
    "63b97e4253352e6f": "tekken",
    "1994ffd01900cfb3": "trillion",
    "7fc505bd3104ca10": "viking",
    "f4f37b6c8eb9ea29": "minimax-m2",
    "6c81ce329e080288": "exaone-moe",
    "96a5f08be6259352": "bailingmoe",
    "9b1be57e70d20d95": "bailingmoe2",
    "9d70134b369a70e5": "youtu",
}
# No other regular expression is run: one that a file brings may take for ever.
_PATTERNS = {told for row in TABLE for kind, told in row.steps if kind == "Split"}
_CLASS = re.compile(r"\\p\{(\w{1,2})\}")


def known_name(
    vocabulary: Vocabulary, data: Mapping[str, Any], ends: tuple[Sequence[int], Sequence[int]]
) -> str | None:
    """llama.cpp's name for a tokenizer that its converter was taught, else None.

    data: tokenizer.json; ends: the ids that are put before and after a text.
    """
    ids = encode(vocabulary, data, TEXT)
    if ids is None:
        return None
    told = str([*ends[0], *ids, *ends[1]])
    return NAMES.get(sha256(told.encode()).hexdigest()[:16])


def encode(vocabulary: Vocabulary, data: Mapping[str, Any], text: str) -> list[int] | None:
    """The ids of a text, without special ones; None if this tokenizer needs more than is here."""
    forms, steps = normal_forms(data.get("normalizer")), read_steps(data.get("pre_tokenizer"))
    if forms is None or steps is None or not (BYTE_LEVEL in steps or GPT2 in steps):
        return None
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(vocabulary.merges)))}
    numbers = {token: number for number, token in vocabulary.tokens.items()}
    ids: list[int] = []
    for piece, number in _cut_added(text, vocabulary, forms):
        if number is not None:
            ids.append(number)
            continue
        words = _cut(piece, steps)
        if words is None:
            return None
        for word in words:
            parts = [word] if vocabulary.ignore_merges and word in numbers else _merge(word, ranks)
            if any(part not in numbers for part in parts):
                return None
            ids.extend(numbers[part] for part in parts)
    return ids


def _normal(text: str, forms: Sequence[str]) -> str:
    for form in forms:
        text = unicodedata.normalize(form, text)  # type: ignore[arg-type]
    return text


def _cut_added(
    text: str, vocabulary: Vocabulary, forms: Sequence[str]
) -> list[tuple[str, int | None]]:
    """A text at its added tokens: (normalized text, None) or (token, id)."""
    pieces: list[tuple[str, int | None]] = [(text, None)]
    for normalized in (False, True):
        found = {
            _normal(token.content, forms) if normalized else token.content: token.id
            for token in vocabulary.added.values()
            if token.normalized == normalized
        }
        if normalized:
            pieces = [(_normal(p, forms) if n is None else p, n) for p, n in pieces]
        found = {content: n for content, n in found.items() if any(content in p for p, _ in pieces)}
        if not found:
            continue
        longest_first = sorted(found, key=len, reverse=True)
        split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        pieces = [
            (part, found[part] if odd else None)
            for piece, number in pieces
            for odd, part in (
                [(index % 2, part) for index, part in enumerate(split.split(piece))]
                if number is None
                else [(1, piece)]
            )
            if part
        ]
    return pieces


def _cut(text: str, steps: Sequence[Step]) -> list[str] | None:
    """A text as byte-level words; None for a step that is not in the table."""
    words = [text]
    spelled = False
    for step in steps:
        kind, told = step
        if kind == "ByteLevel" and step == BYTE_LEVEL:
            words, spelled = [bytelevel.spell(word) for word in words], True
            continue
        pattern = {GPT2: GPT2_CUT, DIGITS: r"\p{N}", DIGIT_RUNS: r"\p{N}+"}.get(step)
        if kind == "Split" and told in _PATTERNS:
            pattern = told
        elif kind == "Punctuation" and told == "Contiguous":
            pattern = r"[\p{P}\$\+<=>\^~\|`]+"
        if pattern is None:
            return None
        regex = re.compile(_expand(pattern, "".join(words)))
        words = [part for word in words for part in _isolate(regex, word)]
        if step == GPT2:
            words, spelled = [bytelevel.spell(word) for word in words], True
    return words if spelled else None


def _isolate(regex: re.Pattern[str], text: str) -> list[str]:
    """The matches and what lies between them."""
    parts: list[str] = []
    end = 0
    for match in regex.finditer(text):
        parts += [text[end : match.start()], match.group()]
        end = match.end()
    return [part for part in [*parts, text[end:]] if part]


def _expand(pattern: str, text: str) -> str:
    r"""A pattern with each \p{L} replaced by the letters of this one text: all that it can meet."""

    def inside(match: re.Match[str]) -> str:
        wanted = match[1]
        letters = sorted({c for c in text if unicodedata.category(c).startswith(wanted)})
        members = "".join(map(re.escape, letters)) or "\\uffff"
        before = pattern[: match.start()]
        # Within [...] the members stand alone; a "[" that is escaped opens nothing.
        opened = len(re.findall(r"(?<!\\)\[", before)) > len(re.findall(r"(?<!\\)\]", before))
        return members if opened else f"[{members}]"

    return _CLASS.sub(inside, pattern)


def _merge(word: str, ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Byte-level BPE of one word: the pair of lowest rank first, the leftmost of equals."""
    parts = list(word)
    while len(parts) > 1:
        pairs = list(pairwise(parts))
        best = min(range(len(pairs)), key=lambda i: (ranks.get(pairs[i], len(ranks)), i))
        if pairs[best] not in ranks:
            break
        parts[best : best + 2] = ["".join(pairs[best])]
    return parts
