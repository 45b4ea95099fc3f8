"""Tokenizer files and keys that lie: each is refused in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from qtool.errors import FormatError, QtoolError
from qtool.formats.gguf_values import Kind, Value, array, f32, string, strings, u32
from qtool.gguf.tokenizer.files import tokenizer_files
from qtool.gguf.tokenizer.sentencepiece import parse
from support.models import small_tokenizers as small
from support.models.small_tokenizers import SIZE, keys_of

T = "tokenizer.ggml."


def _json(**changes: Any) -> dict[str, Any]:
    data = small.bpe()
    for key, value in changes.items():
        (data if key in data else data["model"])[key] = value
    return {"tokenizer.json": data}


def _split(regex: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    byte_level = small.byte_level(use_regex=False)
    return {"type": "Sequence", "pretokenizers": [split, byte_level]}


def _vocab(**more: Any) -> dict[str, Any]:
    return {**small.bpe()["model"]["vocab"], **more}


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, r"has no tokenizer\.json, which tells the vocabulary; put the model"),
    "broken json": ({"tokenizer.json": '{"model": '}, r"tokenizer\.json: not valid JSON \("),
    "deep json": ({"tokenizer.json": "[" * 100_000}, "nested too deeply"),
    "not utf-8": ({"tokenizer.json": b'{"model": "\xff"}'}, r"tokenizer\.json: not valid JSON \("),
    "a list": ({"tokenizer.json": []}, "expected a JSON object, found a list"),
    "no model": ({"tokenizer.json": {}}, "has no 'model' object"),
    "other model": (_json(type="WordPiece"), "its model is 'WordPiece'; qtool writes BPE and"),
    "no vocabulary": (_json(vocab={}), r"has no vocabulary \(model\.vocab\)"),
    "same id": (_json(vocab=_vocab(twin=5)), "and 'twin' both have id 5"),
    "id of text": (_json(vocab=_vocab(twin="5")), "the token 'twin' has the id '5', expected a n"),
    "negative id": (_json(vocab=_vocab(twin=-1)), "the token 'twin' has the id -1, expected a n"),
    "true as an id": (_json(vocab=_vocab(twin=True)), "the token 'twin' has the id True, expected"),
    "id beyond": (
        _json(vocab=_vocab(far=SIZE)),
        f"the token 'far' has id {SIZE}, but config.json's vocab_size, .* is {SIZE}; the tokenizer",
    ),
    "id far beyond": (_json(vocab=_vocab(far=2**70)), "'far' has id 1180591620717411303424, but"),
    "half a pair": (
        {"tokenizer.json": json.dumps(small.bpe()).replace('"<|end|>"', '"\\ud83d"')},
        "holds half of a surrogate pair",
    ),
    "hole for an added": (
        _json(added_tokens=[small.added(SIZE + 3, "<x>")]),
        f"gives the added token '<x>' id {SIZE + 3}, but the tokenizers library gives it {SIZE}",
    ),
    "added twice": (
        _json(added_tokens=[small.added(0, "<|end|>"), small.added(7, "<|end|>")]),
        "gives the added token '<|end|>' id 7, but the tokenizers library gives it 0",
    ),
    "added without id": (_json(added_tokens=[{"content": "x"}]), "lacks an id or a content"),
    "added no list": (_json(added_tokens={"a": 1}), 'added_tokens is {"a": 1}, expected a list'),
    "added on a used id": (
        _json(
            vocab={t: n + 1 for t, n in _vocab().items()}, added_tokens=[small.added(SIZE, "x<")]
        ),
        f"both have id {SIZE}",
    ),
    "same text in the end": (
        _json(added_tokens=[
            small.added(0, "<|end|>"), small.added(SIZE, f"x{small.SPACE}", special=False),
            small.added(SIZE + 1, "x ", special=False),
        ]),
        f"the ids {SIZE} and {SIZE + 1} are both the token 'x ', and llama.cpp takes",
    ),
    "no merges": (_json(merges=[]), r"has no merges \(model\.merges\)"),
    "merge of three": (_json(merges=["a b c"]), 'merge 0 is "a b c", expected two tokens'),
    "merge of one": (_json(merges=[["a", "n"], ["a"]]), r'merge 1 is \["a"\], expected two tokens'),
    "merge of numbers": (_json(merges=[[1, 2]]), r"merge 0 is \[1, 2\], expected two tokens"),
    "merge of nothing": (_json(merges=[["", "a"]]), r'merge 0 is \["", "a"\], expected two tokens'),
    "merge of strangers": (_json(merges=["a q"]), r"merge 0 \('a' with 'q'\) speaks of a token"),
    "suffix": (_json(end_of_word_suffix="</w>"), "end_of_word_suffix is '</w>'; llama.cpp's BPE"),
    "endless regex": (_json(pre_tokenizer=_split("(.+.+)+\\uffff")), "its pre_tokenizer is none"),
    "broken regex": (_json(pre_tokenizer=_split("(")), "its pre_tokenizer is none of those"),
    "processor": (_json(post_processor=[1]), "the post_processor of tokenizer.json is not an obj"),
    "decoder entries": (
        _json() | {"tokenizer_config.json": {"added_tokens_decoder": {"x": {"content": "y"}}}},
        "added_tokens_decoder entry 'x' is not an id with a content",
    ),
    "template": (
        _json() | {"tokenizer_config.json": {"chat_template": ["x"]}},
        "a chat template in the list is not an object with a name",
    ),
    "jinja": (
        _json() | {"tokenizer_config.json": {"x": 1}, "chat_template.jinja": b"\xff"},
        r"chat_template\.jinja: is not UTF-8 text",
    ),
    "scores of words": (
        {"tokenizer.json": {"model": {"type": "Unigram", "vocab": [["a", "b"]]},
                            "pre_tokenizer": {"type": "Metaspace"}}},
        "entry 0 of the vocabulary is not a text and a score",
    ),
    "word twice": (
        {"tokenizer.json": {"model": {"type": "Unigram", "vocab": [["a", 1], ["a", 2]]},
                            "pre_tokenizer": {"type": "Metaspace"}}},
        "the vocabulary has the token 'a' twice",
    ),
    "other normalizer": (
        {"tokenizer.json": {"model": {"type": "Unigram", "vocab": [["a", 1]]},
                            "normalizer": {"type": "Lowercase"}}},
        "its normalizer 'Lowercase' is not what a SentencePiece model does",
    ),
    "no spaces": (
        _json(byte_fallback=True, pre_tokenizer=None), "lack of a step that makes spaces into"
    ),
    "charsmap": (
        {"tokenizer.json": {"model": {"type": "Unigram", "vocab": [["a", 1]]},
                            "normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}}},
        "its precompiled_charsmap is not base 64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name: str, tmp_path: Path) -> None:
    files, sentence = HOSTILE[name]
    size = SIZE + 2 if name.startswith(("same text", "added on")) else SIZE
    with pytest.raises(QtoolError, match=sentence) as caught:
        keys_of(tmp_path, files, size=size)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "holds no pieces, so it is not a SentencePiece model"),
        (b"\x0a\xff\xff\xff\xff\x0fab", "a field of 4294967295 bytes starts at byte 6 of 8"),
        (b"\x0a" + b"\xff" * 12, "ends, or does not end, within a number"),
        (b"\x0a", "ends, or does not end, within a number"),
        (b"\x50\x4b\x03\x04", "byte 2 says wire type 3, which no SentencePiece model has"),
        (small.field(1, small.field(1, b"\xff")), "a piece is not UTF-8"),
        (small.field(1, small.field(1, b"a") + small.field(3, 9)), "'a' has the type 9, expected"),
        (small.field(1, small.field(1, b"a") + b"\x15\0\0\xc0\x7f"), "'a' has the score nan"),
        (small.field(2, small.field(3, 2)), "holds no pieces"),
    ],
)
def test_hostile_models(data: bytes, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=sentence) as caught:
        keys_of(tmp_path, {"tokenizer.model": data}, "llama")
    assert "tokenizer.model: " in str(caught.value)


def test_models_cut_off_anywhere() -> None:
    """A cut between two fields leaves a smaller model; any other is refused."""
    whole = small.sentencepiece(small.pieces()[:6])
    sizes = []
    for end in range(1, len(whole)):
        try:
            sizes.append(len(parse(whole[:end], "x").pieces))
        except FormatError:
            sizes.append(0)
    assert sizes.count(0) > len(whole) - 12
    assert set(sizes) == {0, 1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {T + "model": string("bert")},
            "is 'bert'; qtool makes tokenizer files of gpt2, llama, t5 and gemma4",
        ),
        ({T + "pre": string("kimi-k2")}, "is 'kimi-k2', and how that cuts a text is not in the"),
        ({T + "tokens": strings([])}, "tokens is missing, but tokenizer.ggml.model is 'gpt2'"),
        ({T + "tokens": u32(3)}, "tokens is not an array of STRING"),
        ({T + "tokens": strings(["a"] * SIZE)}, "tokens has a token twice"),
        ({T + "tokens": strings(["\udcff"])}, "holds half of a surrogate pair"),
        ({T + "token_type": array(Kind.INT32, [1])}, f"has 1 values for {SIZE} tokens"),
        ({T + "token_type": array(Kind.INT32, [7] * SIZE)}, "has values beyond 1 to 6"),
        ({T + "token_type": array(Kind.UINT8, [1])}, "token_type is not an array of INT32"),
        ({T + "merges": strings(["a"])}, "merges: entry 0 is 'a', which is not two tokens"),
        ({T + "merges": strings(["a q"])}, "merges: entry 0 is 'a q', which is not two tokens"),
        ({T + "merges": array(Kind.FLOAT32, [f32(1).value])}, "merges is not an array of STRING"),
    ],
)
def test_hostile_keys(changes: dict[str, Value], sentence: str, tmp_path: Path) -> None:
    keys = keys_of(tmp_path, {"tokenizer.json": small.bpe()})
    with pytest.raises(QtoolError, match=sentence):
        tokenizer_files({"general.architecture": string("olmo2"), **keys, **changes})
