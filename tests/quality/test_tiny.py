"""The model that ships in qtool/tiny: its files are what they claim, and it is a trained model."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import qtool.tiny
from qtool.tiny.train import CONFIG, Document, documents, round_to_nearest

# Of TEXT, measured: 21.39 as shipped, 22.34 rounded to 4 bits, 27.21 to 3 bits.
PERPLEXITY_BOUND = 22.0
THREE_BIT_RATIO = 1.15

TINY = Path(qtool.tiny.__file__).parent

# Written for this test, so that no training corpus holds it.
TEXT = '''"""Count the words of a file and print the most common ones."""

import argparse
import collections
import sys


class WordCounter:
    """Counts words; a word is a run of letters, compared without case."""

    def __init__(self, minimum=1):
        self.minimum = minimum
        self.counts = collections.Counter()

    def add(self, line):
        """Add the words of one line to the counts."""
        for word in line.split():
            word = word.strip(".,;:!?()").lower()
            if word:
                self.counts[word] += 1

    def most_common(self, n=None):
        """Return a list of (word, count) pairs, the most common first.

        If *n* is omitted or None, all pairs are returned. Words that were
        seen fewer than *minimum* times are left out.
        """
        return [pair for pair in self.counts.most_common(n) if pair[1] >= self.minimum]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("filename", help="the file to read")
    parser.add_argument("-n", type=int, default=10, help="number of words to print")
    args = parser.parse_args()
    counter = WordCounter()
    try:
        with open(args.filename, encoding="utf-8") as file:
            for line in file:
                counter.add(line)
    except OSError as error:
        print(f"cannot read {args.filename}: {error}", file=sys.stderr)
        return 1
    for word, count in counter.most_common(args.n):
        print(f"{count:8} {word}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
'''

LAYER = {
    "input_layernorm": [256],
    "post_attention_layernorm": [256],
    "self_attn.q_proj": [256, 256],
    "self_attn.k_proj": [128, 256],
    "self_attn.v_proj": [128, 256],
    "self_attn.o_proj": [256, 256],
    "mlp.gate_proj": [768, 256],
    "mlp.up_proj": [768, 256],
    "mlp.down_proj": [256, 768],
}


def load_json(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((TINY / name).read_text(encoding="utf-8"))
    return content


def text_perplexity(model: Any) -> float:
    ids = AutoTokenizer.from_pretrained(TINY)(TEXT, return_tensors="pt")["input_ids"][:, :512]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1].float()
    return math.exp(F.cross_entropy(logits, ids[0, 1:]).item())


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def test_files_are_there_and_small() -> None:
    expected = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "train.py",
    }
    files = {p.name: p.stat().st_size for p in TINY.iterdir() if p.is_file()}
    assert expected <= files.keys()
    assert sum(files.values()) < 9_000_000


def test_config_is_the_one_trained() -> None:
    config = load_json("config.json")
    assert config == CONFIG
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "bfloat16"


def test_stored_tensors() -> None:
    raw = (TINY / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    expected = {"model.embed_tokens.weight": [2048, 256], "model.norm.weight": [256]}
    for index in range(4):
        for name, shape in LAYER.items():
            expected[f"model.layers.{index}.{name}.weight"] = shape
    assert {name: entry["shape"] for name, entry in header.items()} == expected
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(raw) - 8 - length


@pytest.mark.parametrize("text", [TEXT, "\tnaïve — 你好 🐍\r\n\n  x  = 1 ", "\x00\x7f"])
def test_tokenizer_round_trip(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < 2048


def test_tokenizer_compresses_python() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    assert len(tokenizer) == 2048
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 0
    assert len(tokenizer(TEXT)["input_ids"]) < len(TEXT) / 2.5


def test_head_is_tied(model: Any) -> None:
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_perplexity_of_unseen_text(model: Any) -> None:
    assert text_perplexity(model) < PERPLEXITY_BOUND


def test_three_bits_hurt_visibly() -> None:
    """What the model ships for: a quantizer's quality must show in its perplexity."""
    found = {}
    for bits in (16, 4, 3):
        model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        if bits < 16:
            for layer in model.model.layers.modules():
                if isinstance(layer, torch.nn.Linear):
                    layer.weight.data = round_to_nearest(layer.weight.data, bits)
        found[bits] = text_perplexity(model)
    assert found[3] > THREE_BIT_RATIO * found[16], found
    assert found[4] < found[3], found


def test_split_is_by_name() -> None:
    """The same name falls on the same side on every machine."""
    sides = {name: Document("topics", name, "").held_out for name in ("topics:calls", "topics:for")}
    assert sides["topics:calls"] and not sides["topics:for"]


@pytest.mark.slow
def test_the_corpus_is_this_python() -> None:
    """Reads the whole standard library."""
    kinds = {d.kind for d in documents()}
    assert kinds == {"source", "docs", "topics"}
