"""What a Hugging Face tokenizer is, read from its JSON files: no tokenizer library is needed.

tokenizer.json holds the model (BPE: a vocabulary and merges; or Unigram: pieces and scores), the
added tokens, and the normalizer, pre-tokenizer, post-processor and decoder around the model.
tokenizer_config.json names the special tokens and holds the chat template. Source: the formats that
the tokenizers and transformers libraries write.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.errors import FormatError, SourceError
from qtool.formats.safetensors_file import read_json
from qtool.messages.printable import in_json

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
_OLDER = ("tokenizer.model", "vocab.json", "spiece.model")  # of which transformers makes the other
NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in the text before the model sees it."""

    id: int
    content: str
    special: bool
    normalized: bool


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE vocabulary; an id without a token is a hole."""

    tokens: Mapping[int, str]
    added: Mapping[int, AddedToken]
    merges: tuple[tuple[str, str], ...]
    ignore_merges: bool


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or an empty one where there is no such file."""
    return read_json(path) if path.is_file() else {}


def check_text(text: str, where: str) -> str:
    """The text, unless it cannot be stored as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FormatError(
            f"{where}: {text!r} holds half of a surrogate pair and cannot be stored as UTF-8; "
            "get the file again"
        ) from None
    return text


def model_of(folder: Path) -> dict[str, Any]:
    """tokenizer.json of a folder, its model checked to be an object."""
    path = folder / TOKENIZER
    if not path.is_file():
        way = "put the model's own there"
        if any((folder / name).is_file() for name in _OLDER):
            way = (
                "write one with transformers: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        raise SourceError(f"{folder}: has no {TOKENIZER}, which tells the vocabulary; {way}")
    data = read_object(path)
    if not isinstance(data.get("model"), dict):
        raise FormatError(f"{path}: has no 'model' object, so no vocabulary; get the file again")
    return data


def special_names(config: Mapping[str, Any]) -> dict[str, str]:
    """bos, eos ... of tokenizer_config.json, as text; the first form that tells one counts."""
    found = {}
    for kind in NAMED:
        entry = config.get(f"{kind}_token")
        text = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(text, str):
            found[kind] = text
    return found


def added_tokens(
    folder: Path, data: Mapping[str, Any], config: Mapping[str, Any], vocab: Mapping[str, int]
) -> dict[int, AddedToken]:
    """Added tokens by id: tokenizer.json's, then those that transformers adds when it loads.

    An added token that the model's vocabulary holds keeps that id; any other gets the next free
    one, whatever its entry says, and an entry that says something else is refused.
    """
    path = folder / TOKENIZER
    found: dict[str, AddedToken] = {}
    following = len(vocab)

    def add(
        content: str, expected: int | None, special: bool, normalized: bool, where: str
    ) -> None:
        nonlocal following
        if not content or (content in found and expected is None):
            return
        number = found[content].id if content in found else vocab.get(content, following)
        if expected is not None and expected != number:
            raise FormatError(
                f"{where}: gives the added token {content!r} id {expected}, but the tokenizers "
                f"library gives it {number} (the vocabulary's own id, else the next free one); "
                "write the file again with transformers' save_pretrained"
            )
        following = max(following, number + 1)
        if content in found:
            return
        found[content] = AddedToken(number, check_text(content, where), special, normalized)

    entries = data.get("added_tokens") or []
    if not isinstance(entries, list):
        raise FormatError(f"{path}: added_tokens is {in_json(entries)}, expected a list")
    for entry in entries:
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("content"), str)
            or type(entry.get("id")) is not int
        ):
            raise FormatError(
                f"{path}: the added token {json.dumps(entry)[:100]} lacks an id or a content"
            )
        add(
            entry["content"], entry["id"], bool(entry.get("special")),
            bool(entry.get("normalized", True)), str(path),
        )  # fmt: skip
    where = str(folder / CONFIG)
    for _, entry in sorted(decoder_entries(folder, config).items()):
        special = bool(entry.get("special"))
        add(entry["content"], None, special, bool(entry.get("normalized", not special)), where)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    texts: list[Any] = list(special_names(config).values())
    if isinstance(extra, list | dict):  # by name, since transformers 5
        named = extra.values() if isinstance(extra, dict) else extra
        texts += [e.get("content") if isinstance(e, dict) else e for e in named]
    for text in texts:
        if isinstance(text, str):
            add(text, None, True, False, where)
    by_id: dict[int, AddedToken] = {}
    for token in found.values():
        if token.id in by_id:
            raise FormatError(
                f"{path}: the tokens {by_id[token.id].content!r} and {token.content!r} both have "
                f"id {token.id}; get the file again"
            )
        by_id[token.id] = token
    return by_id


def decoder_entries(folder: Path, config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """added_tokens_decoder of tokenizer_config.json, by id."""
    path = folder / CONFIG
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise FormatError(f"{path}: 'added_tokens_decoder' is not an object")
    found = {}
    for key, entry in entries.items():
        if (
            not (key.isascii() and key.isdigit() and len(key) < 10)
            or not isinstance(entry, dict)
            or not isinstance(entry.get("content"), str)
        ):
            raise FormatError(
                f"{path}: added_tokens_decoder entry {key!r} is not an id with a content"
            )
        found[int(key)] = entry
    return found


def bpe_vocabulary(folder: Path, data: Mapping[str, Any], config: Mapping[str, Any]) -> Vocabulary:
    """The BPE model of a tokenizer.json: tokens by id, added tokens, merges."""
    path = folder / TOKENIZER
    model = data["model"]
    if "type" in model and model["type"] != "BPE":
        raise FormatError(f"{path}: its model is {model['type']!r}, expected 'BPE'")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise FormatError(
                f"{path}: {key} is {model[key]!r}; llama.cpp's BPE has no such thing, so this "
                "tokenizer cannot be stored in a GGUF file"
            )
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not vocab:
        raise FormatError(f"{path}: has no vocabulary (model.vocab); get the file again")
    tokens: dict[int, str] = {}
    for text, number in vocab.items():
        if type(number) is not int or number < 0:
            raise FormatError(
                f"{path}: the token {text!r} has the id {number!r}, expected a number"
            )
        if number in tokens:
            raise FormatError(
                f"{path}: the tokens {tokens[number]!r} and {text!r} both have id {number}; "
                "get the file again"
            )
        tokens[number] = check_text(text, str(path))
    added = added_tokens(folder, data, config, vocab)
    for number, token in added.items():
        other = tokens.setdefault(number, token.content)
        if other != token.content:
            raise FormatError(
                f"{path}: the tokens {other!r} and {token.content!r} both have id {number}; "
                "get the file again"
            )
    merges = _merges(path, model.get("merges"), vocab)
    return Vocabulary(tokens, added, merges, bool(model.get("ignore_merges", False)))


def _merges(path: Path, entries: Any, vocab: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """Merges in order, from either form: "a b", or ["a", "b"] (since tokenizers 0.20)."""
    if not isinstance(entries, list) or not entries:
        raise FormatError(
            f"{path}: has no merges (model.merges), without which llama.cpp refuses a BPE "
            "vocabulary; get the file again"
        )
    merges = []
    for rank, entry in enumerate(entries):
        pair = entry.split(" ") if isinstance(entry, str) else entry
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(part, str) and part for part in pair)
        ):
            raise FormatError(
                f"{path}: merge {rank} is {json.dumps(entry)[:100]}, expected two tokens"
            )
        left, right = pair
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise FormatError(
                f"{path}: merge {rank} ({left!r} with {right!r}) speaks of a token that the "
                "vocabulary does not have; get the file again"
            )
        merges.append((left, right))
    return tuple(merges)
