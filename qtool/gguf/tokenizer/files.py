"""The tokenizer of a GGUF file as the files that transformers loads: the inverse of keys.py.

tokenizer.json holds all that tokenizing takes, tokenizer_config.json the special tokens and the
chat template, and for a SentencePiece vocabulary tokenizer.model holds its scores. What these
forms cannot tell, such as an end-of-turn token, stays in tokenizer_config.json under
`gguf_metadata`, which transformers passes over: so a GGUF file made of them has the same keys
again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qtool.errors import FormatError, QtoolError, UnsupportedError
from qtool.formats.gguf_values import Kind, Value
from qtool.gguf.tokenizer import bytelevel
from qtool.gguf.tokenizer.bpe import PREFIX, TokenType
from qtool.gguf.tokenizer.gemma4 import NAME as GEMMA4
from qtool.gguf.tokenizer.hf_json import CONFIG, NAMED, TOKENIZER
from qtool.gguf.tokenizer.keys import LONG_KEYS, MODEL_KEY, OVERRIDES, tokenizer_metadata
from qtool.gguf.tokenizer.pretokenizers import adds_bos, find_row, write_steps
from qtool.gguf.tokenizer.sentencepiece import BPE, UNIGRAM, Piece, SentencePieceModel, build
from qtool.gguf.tokenizer.special import ADD_KEYS, TEMPLATE, TEMPLATES
from qtool.gguf.tokenizer.spm import ADDED_SCORE, MODEL
from qtool.gguf.tokenizer.spm_json import bpe_model, bpe_normalizer, unigram_tokenizer
from qtool.gguf.tokenizer.stored_vocab import Vocab, list_of, read_vocab

# Phi-3's special tokens take the blanks after them, but for these; llama.cpp knows it by the name.
_PHI3_KEEPING = ("<unk>", "<s>", "<|endoftext|>")
_ATOMS = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)


def tokenizer_files(metadata: Mapping[str, Value]) -> dict[str, bytes]:
    """File names with their contents; none for a GGUF file without a vocabulary.

    Errors: UnsupportedError for a kind of tokenizer, or a pre-tokenizer, that is not known.
    """
    given = metadata.get(MODEL_KEY)
    kind = "none" if given is None else given.value
    if kind in ("none", "no_vocab"):
        return {}
    if not isinstance(kind, str):
        raise FormatError(f"{MODEL_KEY} is no text; this GGUF file is damaged")
    vocab = read_vocab(metadata, kind)
    config = _config(metadata, vocab)
    if kind == "gpt2":
        files = {TOKENIZER: _json(_bpe(metadata, vocab))}
    elif kind == GEMMA4:
        files = {TOKENIZER: _json(_gemma4(metadata, vocab))}
        named = {value for key, value in config.items() if key.endswith("_token")}
        control = (n for n, type_ in enumerate(vocab.types) if type_ == TokenType.CONTROL)
        config["extra_special_tokens"] = [t for n in control if (t := vocab.texts[n]) not in named]
    elif kind in ("llama", "t5"):
        files = _sentencepiece(metadata, vocab, kind, config)
    else:
        raise UnsupportedError(
            f"{MODEL_KEY} is {kind!r}; qtool makes tokenizer files of gpt2, llama, t5 and gemma4: "
            "take those of the original model instead"
        )
    files[CONFIG] = _json(config, indent=2)
    lost = _lost(metadata, files, len(vocab.texts))
    if lost:
        files[CONFIG] = _json(config | {OVERRIDES: lost}, indent=2)
    return files


def _json(value: Any, indent: int | None = None) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=indent) + "\n").encode()


def _config(metadata: Mapping[str, Value], vocab: Vocab) -> dict[str, Any]:
    """tokenizer_config.json."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if (prefix := metadata.get(PREFIX + "add_space_prefix")) is not None:
        config["add_prefix_space"] = bool(prefix.value)
    for name in NAMED:
        number = vocab.ids.get(name)
        # transformers makes a special token of whatever it is told here.
        if number is not None and vocab.types[number] in _ATOMS:
            config[f"{name}_token"] = vocab.texts[number]
    for name, key in ADD_KEYS.items():
        if key in metadata:
            config[f"add_{name}_token"] = bool(metadata[key].value)
    named = metadata.get(TEMPLATES)
    templates = [
        {"name": name, "template": str(metadata[f"{TEMPLATE}.{name}"].value)}
        for name in (named.value if named is not None and named.element is Kind.STRING else ())
        if f"{TEMPLATE}.{name}" in metadata
    ]
    if TEMPLATE in metadata:
        default = str(metadata[TEMPLATE].value)
        config["chat_template"] = (
            [*templates, {"name": "default", "template": default}] if templates else default
        )
    elif templates:
        config["chat_template"] = templates
    return config


def _added(
    number: int, text: str, special: bool, normalized: bool = False, rstrip: bool = False
) -> dict[str, Any]:
    return {
        "id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": rstrip,
        "normalized": normalized, "special": special,
    }  # fmt: skip


def _post_processor(
    metadata: Mapping[str, Value], vocab: Vocab, bos: bool, eos: bool
) -> dict[str, Any] | None:
    """What puts bos and eos around a text; bos and eos: what llama.cpp does if nothing is said."""
    ends = []
    for name, default in (("bos", bos), ("eos", eos)):
        key = metadata.get(ADD_KEYS[name])
        wanted = default if key is None else bool(key.value)
        number = vocab.ids.get(name) if wanted else None
        ends.append([] if number is None else [(vocab.texts[number], number)])
    if ends == [[], []]:
        return None

    def around(*sequences: str) -> list[dict[str, Any]]:
        before, after = (
            [{"SpecialToken": {"id": text, "type_id": 0}} for text, _ in end] for end in ends
        )
        inner = [
            {"Sequence": {"id": name, "type_id": index}} for index, name in enumerate(sequences)
        ]
        return [*before, *inner, *after]

    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": around("A", "B"),
        "special_tokens": {
            text: {"id": text, "ids": [number], "tokens": [text]}
            for end in ends
            for text, number in end
        },
    }


def _bpe(metadata: Mapping[str, Value], vocab: Vocab) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE vocabulary."""
    pre = metadata.get(PREFIX + "pre")
    name = "default" if pre is None else str(pre.value)
    steps = write_steps(name)
    row = find_row(name)
    assert row is not None
    added = [
        _added(
            number, text, vocab.types[number] != TokenType.USER_DEFINED,
            bytelevel.read(text) != text,
        )
        for number, text in enumerate(vocab.texts)
        if vocab.types[number] in _ATOMS
    ]  # fmt: skip
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": row.ignore_merges,
        "vocab": {t: n for n, t in enumerate(vocab.texts) if not vocab.padding(n)},
        "merges": _merges(metadata, vocab),
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": row.normalizer and {"type": row.normalizer},
        "pre_tokenizer": steps,
        "post_processor": _post_processor(metadata, vocab, adds_bos("gpt2", name), False),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": model,
    }  # fmt: skip


def _gemma4(metadata: Mapping[str, Value], vocab: Vocab) -> dict[str, Any]:
    """tokenizer.json of Gemma 4's vocabulary."""
    unknown = vocab.ids.get("unk")
    pieces = tuple(map(Piece, vocab.texts, vocab.scores, vocab.types))
    body = bpe_model(pieces, None if unknown is None else vocab.texts[unknown], False, merge=False)
    kept = {text: n for n, text in enumerate(vocab.texts) if not vocab.padding(n)}
    body["model"] |= {"vocab": kept, "merges": _merges(metadata, vocab)}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            _added(number, text, vocab.types[number] != TokenType.USER_DEFINED)
            for number, text in enumerate(vocab.texts)
            if vocab.types[number] in _ATOMS
        ],
        "normalizer": bpe_normalizer(False),
        "pre_tokenizer": None,
        "post_processor": _post_processor(metadata, vocab, True, False),
        **body,
    }  # fmt: skip


def _merges(metadata: Mapping[str, Value], vocab: Vocab) -> list[list[str]]:
    merges = []
    known = set(vocab.texts)
    for rank, text in enumerate(list_of(metadata, "merges", Kind.STRING) or ()):
        at = text.find(" ", 1)
        pair = [text[:at], text[at + 1 :]]
        if at < 0 or not known.issuperset([*pair, "".join(pair)]):
            raise FormatError(
                f"{PREFIX}merges: entry {rank} is {text!r}, which is not two tokens whose union is "
                "one; take the tokenizer files of the original model instead"
            )
        merges.append(pair)
    return merges


def _sentencepiece(
    metadata: Mapping[str, Value], vocab: Vocab, kind: str, config: dict[str, Any]
) -> dict[str, bytes]:
    """tokenizer.model and tokenizer.json; the tokens that were added to it go into `config`."""
    flag = metadata.get(PREFIX + "add_space_prefix")
    prefix = kind == "llama" if flag is None else bool(flag.value)
    numbers = range(len(vocab.texts))
    atoms = [number for number in numbers if vocab.types[number] in _ATOMS]
    phi3 = metadata["general.architecture"].value == "phi3"
    later = {
        number: _added(
            number,
            vocab.texts[number],
            vocab.types[number] == TokenType.CONTROL,
            rstrip=phi3 and vocab.texts[number] not in _PHI3_KEEPING,
        )
        for number in atoms
        if vocab.scores[number] == ADDED_SCORE and vocab.types[number] != TokenType.UNKNOWN
    }
    if later:
        config["added_tokens_decoder"] = {
            str(number): {key: value for key, value in entry.items() if key != "id"}
            for number, entry in later.items()
        }
    # Phi-3's converter gives every token that tokenizer.json adds the score of an added one.
    added = [
        later.get(number)
        or _added(number, vocab.texts[number], vocab.types[number] != TokenType.USER_DEFINED)
        for number in atoms
        if not phi3 or number in later
    ]
    squeeze = metadata.get(PREFIX + "remove_extra_whitespaces")
    model = SentencePieceModel(
        tuple(map(Piece, vocab.texts, vocab.scores, vocab.types)),
        BPE if kind == "llama" else UNIGRAM,
        TokenType.BYTE in vocab.types,
        bytes(list_of(metadata, "precompiled_charsmap", Kind.UINT8) or ()),
        prefix,
        squeeze is not None and bool(squeeze.value),
    )
    unknown = vocab.ids.get("unk")
    if kind == "llama":
        body = {
            "normalizer": bpe_normalizer(prefix),
            "pre_tokenizer": None,
            **bpe_model(model.pieces, None if unknown is None else vocab.texts[unknown], prefix),
        }
    else:
        body = unigram_tokenizer(model, unknown)
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "post_processor": _post_processor(metadata, vocab, adds_bos(kind, None), kind == "t5"),
        **body,
    }  # fmt: skip
    ids = tuple(vocab.ids.get(name) for name in ("unk", "bos", "eos", "pad"))
    return {TOKENIZER: _json(tokenizer), MODEL: build(model, ids)}


def _lost(
    metadata: Mapping[str, Value], files: Mapping[str, bytes], vocab_size: int
) -> dict[str, Any]:
    """The keys that a GGUF file made of these files would have otherwise, with the right values."""
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        arch = str(metadata["general.architecture"].value)
        try:
            made = tokenizer_metadata(Path(folder), arch, vocab_size, {})
        except QtoolError as error:  # nobody knows the folder
            raise type(error)(str(error).replace(f"{folder}/", "")) from None
    kept = {k: v for k, v in metadata.items() if k.startswith("tokenizer.") and k not in LONG_KEYS}
    lost: dict[str, Any] = {
        key: value.value
        for key, value in kept.items()
        if made.get(key) != value and value.kind in (Kind.STRING, Kind.BOOL, Kind.UINT32)
    }
    lost |= {key: None for key in made if key not in kept and key not in LONG_KEYS}
    return lost
