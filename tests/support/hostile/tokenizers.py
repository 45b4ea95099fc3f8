"""Tokenizers, as GGUF recipes read them and as calibration loads them."""

import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.hostile.row import Make, Row, edited, gguf_model, honest
from support.models import small_tokenizers as small


def files(*, size: int = small.SIZE, **content: Any) -> Make:
    """A GGUF recipe over these files; a name's underscore stands for its dot."""

    def make(folder: Path) -> list[object]:
        named = {name.replace("_dot_", "."): text for name, text in content.items()}
        model = gguf_model(folder, named, size)
        return ["quantize", model, "--recipe", "q8_0", "-o", folder / "out.gguf"]

    return make


def model(**change: Any) -> Make:
    """tokenizer.json with keys of its model changed."""
    made = small.bpe()
    made["model"] |= change
    return files(tokenizer_dot_json=made)


def read(change: Callable[[dict[str, Any]], object]) -> Make:
    """Calibration over a tokenizer.json that something was done to."""

    def make(folder: Path) -> list[object]:
        found = honest(folder)

        def run(content: dict[str, Any]) -> None:
            change(content)

        edited(found / "tokenizer.json", run)
        return ["calibrate", found, "-o", folder / "stats", "--samples", 2, "--length", 16]

    return make


def unigram(score: float) -> Make:
    """A Unigram vocabulary with one such score."""
    space = {"type": "Metaspace", "replacement": small.SPACE, "prepend_scheme": "always"}
    vocab = [[text, number] for text, number, _ in small.unigram_pieces()]
    vocab[-1][1] = score
    told = {"type": "Unigram", "unk_id": 0, "vocab": vocab}
    return files(tokenizer_dot_json={"model": told, "pre_tokenizer": space})


VOCAB = dict(small.bpe()["model"]["vocab"])
SPM = small.sentencepiece(small.pieces())

TOKENIZERS = [
    Row("an id of 2^60", model(vocab=VOCAB | {"zz": 2**60}), "has id 1152921504606846976, but"),
    Row("a negative id", model(vocab=VOCAB | {"zz": -1}), "has the id -1, expected a number"),
    Row("an id that is no number", model(vocab=VOCAB | {"zz": 1e3}), "has the id 1000.0"),
    Row("an id twice", model(vocab=VOCAB | {"zz": 3}), "both have id 3"),
    Row("a merge of nothing known", model(merges=["q zz"]), "speaks of a token that the"),
    Row("a merge of three", model(merges=[["a", "b", "c"]]), "expected two tokens"),
    Row("a vocabulary that is a list", model(vocab=[1]), "has no vocabulary"),
    Row("half a pair as a token", files(
        tokenizer_dot_json=json.dumps(small.bpe()).replace("<|end|>", "\\ud800")),
        "half of a surrogate pair"),
    Row("a tokenizer nested too deeply", files(tokenizer_dot_json="[" * 200_000),
        "nested too deeply"),
    Row("a tokenizer of empty lists",
        files(tokenizer_dot_json='{"a":[' + "[]," * 4_300_000 + "0]}"), "JSON so dense"),
    Row("a pre-tokenizer nobody knows", files(tokenizer_dot_json=small.bpe(pre={"type": "Evil"})),
        "its pre_tokenizer is none of those"),
    Row("a template of bytes", files(
        tokenizer_dot_json=small.bpe(), tokenizer_config_dot_json={"eos_token": "<|end|>"},
        chat_template_dot_jinja=b"{{ \xff }}"), r"chat_template\.jinja: is not UTF-8"),
    Row("added ids out of order", files(tokenizer_dot_json=small.bpe(
        extra=[small.added(10**15, "<|x|>")])), "gives the added token '<|x|>' id 1000000"),
    Row("a tokenizer.model cut off", files(size=400, tokenizer_dot_model=SPM[:200]),
        "within a number|the file is cut off"),
    Row("a tokenizer.model of another kind", files(size=400, tokenizer_dot_model=b"\x0b" * 50),
        "wire type 3"),
    Row("a piece that is empty", files(size=400, tokenizer_dot_model=small.field(
        1, small.field(1, b""))), "a piece is empty"),
    Row("a piece whose score is NaN", files(size=400, tokenizer_dot_model=small.field(
        1, small.field(1, b"a") + b"\x15\x00\x00\xc0\x7f")), "has the score nan"),
    Row("a piece longer than the file", files(size=400, tokenizer_dot_model=b"\x0a" + small.varint(
        2**62) + b"abc"), "the file is cut off"),
    Row("a length without an end", files(size=400, tokenizer_dot_model=b"\x0a" + b"\xff" * 30),
        "does not end, within a number"),
    Row("a piece that is no text", files(size=400, tokenizer_dot_model=small.field(
        1, small.field(1, b"\xff\xfe"))), "is not UTF-8"),
    Row("a score beyond float32", unigram(1e300), "the score 1e.300, which float32 cannot hold"),
    Row("a score of NaN in JSON", unigram(float("nan")), "the score nan, which float32"),
    Row("a normalizer that makes its reader panic", read(lambda c: c.update(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})),
        "the tokenizer cannot be used"),
    Row("a table that leads beyond itself", read(lambda c: c.update(
        normalizer={"type": "Precompiled", "precompiled_charsmap": b64encode(
            (4).to_bytes(4, "little") + b"\xff" * 4).decode()})), "the tokenizer cannot be used"),
    Row("an expression that never ends", read(lambda c: c.update(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "(.+.+)+$^"}, "behavior": "Isolated",
                       "invert": False})), "the tokenizer cannot be used"),
    Row("an id of 2^40 for its reader", read(lambda c: c["model"]["vocab"].update(zz=2**40)),
        "the tokenizer cannot be used"),
    Row("a tokenizer without a model", read(lambda c: c.pop("model")), "it has no `model`"),
]  # fmt: skip
