"""Whole GGUF files whose keys or tensors make no sense: each command says so in one sentence, soon
and in little memory, and leaves nothing behind."""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qtool.formats.gguf_values import Kind
from support.gguf import gguf_small
from support.gguf.gguf_small import Keys, Tensors
from support.runs.quantizing import Call

Change = Callable[[Keys, Tensors], object]
COMMANDS = ("convert", "calibrate", "eval", "plan")
EMBEDDING, QUERY = "token_embd.weight", "blk.0.attn_q.weight"
BLOCKS, HEADS, BOS = (
    "llama.block_count",
    "llama.attention.head_count",
    "tokenizer.ggml.bos_token_id",
)
UNIT = 1 if sys.platform == "darwin" else 1024


def says(key: str, *value: Any) -> Change:
    """The key with another value, or none."""

    def change(keys: Keys, _: Tensors) -> None:
        del keys[key]
        if value:
            keys[key] = value

    return change


def adds(key: str, *value: Any) -> Change:
    return lambda keys, _: keys.update({key: value})


def shaped(name: str, *shape: int) -> Change:
    return lambda _, tensors: tensors.update({name: shape})


def without_keys(keys: Keys, _: Tensors) -> None:
    for key in [key for key in keys if key.startswith("llama.")]:
        del keys[key]


def without_embedding(_: Keys, tensors: Tensors) -> None:
    del tensors[EMBEDDING]


# What is changed in which model, and what is said; plan, which needs little of this, may work.
HOSTILE: dict[str, tuple[str, Change, str]] = {
    "no embedding": ("llama", without_embedding, "lacks token_embd.weight, which every model has"),
    "no keys": ("llama", without_keys, "lacks llama.block_count"),
    "no heads": ("llama", says(HEADS, Kind.UINT32, 0), f"{HEADS} is 0"),
    "heads of text": (
        "llama", says(HEADS, Kind.STRING, "x"), "is 'x' (string), expected an integer",
    ),
    "heads that differ": (
        "llama", says(HEADS, Kind.ARRAY, Kind.FLOAT32, [4.0]), "4.0 (float32), expected a",
    ),
    "an empty list": ("llama", says(HEADS, Kind.ARRAY, Kind.STRING, []), "a list of 0 (array)"),
    "four point nought heads": ("llama", says(HEADS, Kind.FLOAT32, 4.0), "4.0 (float32), expected"),
    "no number of blocks": ("gemma2", says("gemma2.block_count"), "lacks gemma2.block_count"),
    "blocks by name": (
        "llama", says(BLOCKS, Kind.ARRAY, Kind.STRING, ["a"]), "a list of 1 (array), expected a",
    ),
    "a million blocks": (
        "llama", says(BLOCKS, Kind.UINT32, 10**6), "is 1000000, and there are only 12 tensors",
    ),
    "a billion experts": (
        "llama-experts", says("llama.expert_count", Kind.UINT32, 10**9), "is 1000000000, expected",
    ),
    "experts that are not there": (
        "llama", adds("llama.expert_count", Kind.UINT32, 4), "expert_used_count is not said",
    ),
    "experts by name": (
        "gemma2", adds("gemma2.expert_count", Kind.STRING, "four"), "gemma2.expert_count is 'four'",
    ),
    "rows beside the heads": ("llama", shaped(QUERY, 30, 32), f"{QUERY} has the shape [30, 32]"),
    "odd rows": ("llama", shaped(QUERY, 31, 32), f"{QUERY} has the shape [31, 32]"),
    "rows in two": ("llama", shaped("blk.0.ffn_up.weight", 2, 64, 32), "has the shape [2, 64, 32]"),
    "a norm without its bias": (
        "gptneox", lambda _, tensors: tensors.pop("blk.0.attn_norm.bias"),
        "lacks blk.0.attn_norm.bias, unlike any gptneox model",
    ),
    "a norm with a bias": (
        "llama", shaped("blk.0.attn_norm.bias", 32), "has blk.0.attn_norm.bias, unlike any llama",
    ),
    "a bias nobody asks for": (
        "gemma2", shaped("blk.0.ffn_up.bias", 64), "has blk.0.ffn_up.bias, unlike any gemma2",
    ),
    "no biases at all": (
        "gptneox",
        lambda _, tensors: [tensors.pop(f"blk.0.ffn_{part}.bias") for part in ("up", "down")],
        "lacks blk.0.ffn_up.bias, which every gptneox model has",
    ),
    "heads turned too far": (
        "stablelm", says("stablelm.rope.dimension_count", Kind.UINT32, 2**31),
        "is 2147483648, expected an even number of the 8 elements",
    ),
    "bos of text": ("llama", says(BOS, Kind.STRING, "x"), f"{BOS} is 'x', expected a token below"),
    "bos far out": ("llama", says(BOS, Kind.UINT32, 2**31), f"{BOS} is 2147483648, expected a"),
    "half of the factors": (
        "phi3", shaped("rope_factors_long.weight", 4), "has rope_factors_long.weight; expected",
    ),
    "factors without end": (
        "llama", shaped("rope_freqs.weight", 1 << 17), "rope_freqs.weight has the shape [131072]",
    ),
    "factors of nought": ("llama", shaped("rope_freqs.weight", 4), "holds 0.0 to 0.0, expected"),
    "a tokenizer of numbers": (
        "llama", says("tokenizer.ggml.model", Kind.ARRAY, Kind.INT32, [1]), "model is no text",
    ),
    "a tokenizer of one number": (
        "llama", says("tokenizer.ggml.model", Kind.UINT32, 3), "model is no text",
    ),
    "a tokenizer without tokens": ("llama", says("tokenizer.ggml.tokens"), "tokens is missing"),
    "lines in a name": (
        "llama", adds("llama.x\n\x1b[31my", Kind.UINT8, 1), r"llama.x\n\x1b[31my is 1, which no",
    ),
    "a key that nobody can be told of": (
        "llama", adds("llama.logit_scale", Kind.FLOAT32, 3.0), "llama.logit_scale is 3.0, which no",
    ),
}  # fmt: skip


def test_heads_of_which_nothing_is_said(tmp_path: Path, call: Call) -> None:
    """Their width is then what llama.cpp takes, and not what the class of transformers does."""
    keys, tensors = gguf_small.model("gemma2", "gpt2")
    for name in ("key_length", "value_length"):
        del keys[f"gemma2.attention.{name}"]
    (tmp_path / "model.gguf").write_bytes(gguf_small.content(keys, tensors))
    assert call(*arguments("convert", tmp_path / "model.gguf", tmp_path)).status == 0
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (config["head_dim"], config["query_pre_attn_scalar"]) == (8, 8)


def arguments(command: str, model: Path, folder: Path) -> list[str]:
    text, made = str(folder / "text.txt"), str(folder / "made")
    more = {
        "convert": ["--to", "hf", "-o", made],
        "calibrate": ["--imatrix", made, "--calibration", text, "--samples", "1", "--length", "8"],
        "eval": ["--text", text],
        "plan": ["--recipe", "q4_k_m"],
    }
    return [command, str(model), *more[command]]


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_lie_each_command_works(command: str, tmp_path: Path, call: Call) -> None:
    """Else every failure below could be one of the models."""
    for architecture in gguf_small.ARCHITECTURES:
        model = tmp_path / f"{architecture}.gguf"
        model.write_bytes(gguf_small.content(*gguf_small.model(architecture, "gpt2")))
        (tmp_path / architecture).mkdir()
        (tmp_path / architecture / "text.txt").write_text("ab a cd " * 100)
        found = call(*arguments(command, model, tmp_path / architecture))
        assert found.status == 0, found.err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", HOSTILE)
def test_one_sentence(name: str, command: str, tmp_path: Path, call: Call) -> None:
    architecture, change, said = HOSTILE[name]
    keys, tensors = gguf_small.model(architecture, "gpt2")
    change(keys, tensors)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_small.content(keys, tensors))
    (tmp_path / "text.txt").write_text("ab a cd " * 100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT
    start = time.process_time()
    found = call(*arguments(command, path, tmp_path))
    assert time.process_time() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT - before < 50e6
    assert {file.name for file in tmp_path.iterdir()} == {"model.gguf", "text.txt"}
    if command == "plan" and found.status == 0:
        return
    lines = [line for line in found.err.splitlines() if not line.startswith("warning: ")]
    assert found.status == 1 and len(lines) == 1 and lines[0].startswith("error: "), found.err
    if command != "plan":
        assert said in lines[0] and str(path) in lines[0], found.err
    assert "/tmp/qtool-" not in found.err
