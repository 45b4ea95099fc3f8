"""Small tokenizers made by hand, as the files of a Hugging Face folder."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qtool.formats.gguf_values import Value
from qtool.gguf.tokenizer import bytelevel
from qtool.gguf.tokenizer.keys import tokenizer_metadata

SPACE = "\u2581"
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ġ Ġ", "a n", "an d", "Ã ©", "1 2", "\u010a \u010a"]
SIZE = 1 + 256 + len(MERGES)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def added(number: int, content: str, *, special: bool = True, **more: Any) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": content, "special": special, **plain, **more}


def byte_level(*, use_regex: bool = True) -> dict[str, Any]:
    return {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
        "use_regex": use_regex,
    }  # fmt: skip


def bpe(
    *, pre: Any = None, extra: Sequence[dict[str, Any]] = (), merges: Any = None, **model: Any
) -> dict[str, Any]:
    """tokenizer.json: <|end|>, the 256 bytes, what the merges make, then `extra` added tokens."""
    vocab = {"<|end|>": 0}
    for character in bytelevel.CHARACTER.values():
        vocab[character] = len(vocab)
    for merge in MERGES:
        vocab[merge.replace(" ", "")] = len(vocab)
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [added(0, "<|end|>"), *extra],
        "normalizer": None,
        "pre_tokenizer": byte_level() if pre is None else pre,
        "post_processor": None,
        "decoder": byte_level(),
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": vocab,
            "merges": [m.split(" ") for m in MERGES] if merges is None else merges, **model,
        },
    }  # fmt: skip


def save(folder: Path, files: Mapping[str, Any]) -> Path:
    """The folder, made if need be; a str or bytes is written as it is, anything else as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if not isinstance(content, str | bytes):
            content = json.dumps(content, ensure_ascii=False)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


# What merges to words, best first; every other character is spelled by its bytes.
WORDS = ["th", "the", f"{SPACE}the", "in", f"{SPACE}{SPACE}", "an", "and", f"{SPACE}and", "ing"]
LETTERS = [SPACE, *"etainhdgs"]


def pieces() -> list[tuple[str, float, int]]:
    """A SentencePiece vocabulary: (text, score, type)."""
    return [
        ("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3),
        *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
        *((word, -float(rank), 1) for rank, word in enumerate(WORDS)),
        *((letter, -100.0 - rank, 1) for rank, letter in enumerate(LETTERS)),
    ]  # fmt: skip


def unigram_pieces() -> list[tuple[str, float, int]]:
    return [
        ("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3),
        *((word, -2.0 - rank / 4, 1) for rank, word in enumerate(WORDS)),
        *((letter, -5.0 - rank / 8, 1) for rank, letter in enumerate(LETTERS)),
    ]  # fmt: skip


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number % 128 + 128])
        number //= 128
    return out + bytes([number])


def field(number: int, content: bytes | int) -> bytes:
    if isinstance(content, int):
        return varint(number * 8) + varint(content)
    return varint(number * 8 + 2) + varint(len(content)) + content


def sentencepiece(
    entries: Sequence[tuple[str, float, int]] = (),
    *, model_type: int = 2, fallback: int = 1, prefix: int | None = None, charsmap: bytes = b"",
) -> bytes:  # fmt: skip
    """tokenizer.model, with fields that no reader needs in between."""
    out = b""
    for text, score, kind in entries or pieces():
        body = field(1, text.encode()) + b"\x15" + struct.pack("<f", score)
        out += field(1, body + (field(3, kind) if kind != 1 else b""))
    trainer = field(1, b"input.txt") + field(3, model_type) + field(35, fallback)
    trainer += varint(10 * 8 + 5) + struct.pack("<f", 0.9995)
    normalizer = field(1, b"nmt_nfkc") + (field(2, charsmap) if charsmap else b"")
    normalizer += b"" if prefix is None else field(3, prefix)
    normalizer += field(4, 0)
    return out + field(2, trainer) + field(3, normalizer) + field(4, b"")


def keys_of(
    folder: Path, files: Mapping[str, Any], arch: str = "olmo2", size: int = SIZE, **config: Any
) -> dict[str, Value]:
    """The keys of the files, written into the folder first."""
    return tokenizer_metadata(save(folder, files), arch, size, config)


# Gemma 4's: special, shown, and of the vocabulary's end; bytes of U+2581 are tokens as all others.
GEMMA4 = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|tool_call>"]
GEMMA4_CONFIG = {
    "tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>",
    "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>",
    "sot_token": "<|turn>", "extra_special_tokens": ["<turn|>"],
}  # fmt: skip


def gemma4(*, byte_tokens: int = 256, extra: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """tokenizer.json: special tokens, bytes, words with the merges that make them, letters."""
    words = [[word[:-1], word[-1]] for word in (*WORDS[:2], *WORDS[3:7], "\n\n")]
    words.insert(2, [SPACE, "the"])
    spelled = [f"<0x{byte:02X}>" for byte in range(256 - byte_tokens, 256)]
    tokens = [*GEMMA4, *spelled, *("".join(pair) for pair in words), *LETTERS, "\n"]
    data = bpe(merges=words, vocab={text: number for number, text in enumerate(tokens)})
    data["model"] |= {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    special = [added(n, text, special=n < 7) for n, text in enumerate(GEMMA4)]
    around = [
        {"SpecialToken": {"id": "<bos>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    return data | {
        "added_tokens": [*special, *extra],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "},
                          "behavior": "MergedWithPrevious", "invert": False},
        "post_processor": {
            "type": "TemplateProcessing", "single": around, "pair": around,
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
        ]},
    }  # fmt: skip
