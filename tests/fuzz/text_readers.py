"""Readers of what people write: recipes, and the tokenizers and cards of models."""

import json
from pathlib import Path
from typing import Any

import lies
from promises import quietly, tellable

# Nothing of qtool is imported here: coverage is counted of what is imported later.


class Recipe:
    """A recipe: YAML, its keys and their values; lines `--set ` in front of it give such items."""

    name = "recipe"
    beside = 0

    def __init__(self, folder: Path) -> None:
        from qtool.recipe.file import shipped

        self.path = folder / "recipe.yaml"
        self.files = [path.read_bytes() for path in shipped().values()]

    @staticmethod
    def lie(data: bytes, choose: Any) -> bytes:
        lines = data.split(b"\n")
        kind = choose.randrange(4)
        if kind == 0:
            return lies.byte_lie(data, choose)
        at = choose.randrange(len(lines))
        key = lines[at].partition(b":")[0]
        value = choose.choice(lies.VALUES)
        text = json.dumps(value).encode() if choose.random() < 0.7 else choose.choice(lies.WORDS)
        if kind == 1:
            lines[at] = key + b": " + text
        elif kind == 2:
            lines.insert(at, choose.choice(lines) if choose.random() < 0.5 else b"  " * 3 + text)
        else:
            path = key.strip() + b".a" * choose.choice([0, 1, 40])
            lines.insert(0, b"--set " + path + b"=" + text)
        return b"\n".join(lines)

    def seeds(self) -> list[bytes]:
        return self.files

    def attempt(self, data: bytes) -> None:
        from qtool.recipe.recipe import load

        lines = data.split(b"\n")
        sets = [line[6:].decode("utf-8", "replace") for line in lines[:5] if line[:6] == b"--set "]
        self.path.write_bytes(b"\n".join(lines[len(sets) :]))
        recipe = load(str(self.path), sets)
        tellable(recipe.effective())
        assert recipe.name == "recipe"


class Tokenizer:
    """The files of a tokenizer, of which one is told lies about."""

    name = "tokenizer"

    def __init__(self, folder: Path) -> None:
        from support.models import small_tokenizers as small

        self.folder = folder / "model"
        template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        config = {
            "tokenizer_class": "X", "bos_token": "<s>", "eos_token": {"content": "</s>"},
            "add_bos_token": True, "chat_template": template,
            "added_tokens_decoder": {"1": {"content": "<s>", "special": True}},
            "gguf_metadata": {"tokenizer.ggml.eot_token_id": 1},
        }  # fmt: skip
        bpe = small.bpe(extra=[small.added(small.SIZE, "<|more|>")])
        bpe["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
        }  # fmt: skip
        named = [{"name": "default", "template": template}, {"name": "tool_use", "template": "x"}]
        files: dict[str, Any] = {
            "tokenizer.json": bpe,
            "tokenizer_config.json": {"chat_template": named, "eos_token": "<|end|>"},
        }
        spm: dict[str, Any] = {
            "tokenizer.model": small.sentencepiece(small.pieces()),
            "tokenizer_config.json": config,
            "added_tokens.json": {"<more>": len(small.pieces())},
            "chat_template.jinja": template,
        }
        unigram = {
            "tokenizer.json": _unigram(small),
            "tokenizer_config.json": config,
        }
        self.inputs: list[tuple[str, str, dict[str, bytes]]] = []
        for arch, kind in (("qwen2", files), ("llama", spm), ("phi3", spm), ("llama", unigram)):
            raw = {
                name: text if isinstance(text, bytes) else text.encode() if isinstance(text, str)
                else json.dumps(text).encode()
                for name, text in kind.items()
            }  # fmt: skip
            self.inputs += [(arch, name, raw) for name in raw]
        self.beside = 20_000

    def lie(self, data: bytes, choose: Any) -> bytes:
        number = (data[0] if data else 0) % len(self.inputs)
        plain = not self.inputs[number][1].endswith(".json")
        return bytes([number]) + (lies.byte_lie if plain else lies.json_lie)(data[1:], choose)

    def seeds(self) -> list[bytes]:
        return [bytes([n]) + files[name] for n, (_, name, files) in enumerate(self.inputs)]

    def attempt(self, data: bytes) -> None:
        from qtool.gguf.tokenizer.files import tokenizer_files
        from qtool.gguf.tokenizer.keys import tokenizer_metadata
        from qtool.texts.tokenizing import tokenize
        from support.models import small_tokenizers as small

        arch, lied, files = self.inputs[(data[0] if data else 0) % len(self.inputs)]
        for path in self.folder.glob("*"):
            path.unlink()
        small.save(self.folder, {**files, lied: data[1:]})
        size = 300
        if "tokenizer.json" in files:  # else transformers says more than can be read
            quietly(lambda: tokenize("the and in", self.folder))
        made = tokenizer_metadata(self.folder, arch, size, {"vocab_size": size, "eos_token_id": 2})
        assert len(made["tokenizer.ggml.tokens"].value) == size
        for key, value in made.items():
            assert key.startswith("tokenizer."), key
            for text in value.value if isinstance(value.value, list) else [value.value]:
                if isinstance(text, str):
                    text.encode()  # no half of a surrogate pair
        from qtool.formats.gguf_values import string

        quietly(lambda: tokenizer_files({"general.architecture": string(arch), **made}))


def _unigram(small: Any) -> dict[str, Any]:
    """tokenizer.json of a Unigram model."""
    from qtool.gguf.tokenizer.sentencepiece import UNIGRAM, Piece, SentencePieceModel
    from qtool.gguf.tokenizer.spm_json import unigram_tokenizer

    model = SentencePieceModel(tuple(Piece(*one) for one in small.unigram_pieces()), UNIGRAM)
    added = [small.added(n, text) for n, text in enumerate(("<unk>", "<s>", "</s>"))]
    return {"version": "1.0", "added_tokens": added, "post_processor": None,
            **unigram_tokenizer(model, 0)}  # fmt: skip


class Card:
    """README.md and the JSON files that say what a model is called, for the keys of a GGUF file."""

    name = "card"
    beside = 0
    _README = b"""---
license: apache-2.0
language:
- en
- no
base_model: [owner/name, other/model]
base_model_relation: finetune
datasets:
- owner/data
tags: [a, b]
model_name: A Model
model_creator: Somebody
library_name: transformers
license_name: x
license_link: https://example.org/x
version: 1.5
date: 2024-02-03
---
# A Model
"""
    _CONFIG = b'{"_name_or_path": "owner/Name-7B-Instruct-v1.2", "model_type": "llama"}'
    _SAMPLING = b'{"temperature": 0.6, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1}'

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "Name-7B-v1"
        self.folder.mkdir()
        self.files = {"README.md": self._README, "config.json": self._CONFIG,
                      "generation_config.json": self._SAMPLING}  # fmt: skip

    @staticmethod
    def lie(data: bytes, choose: Any) -> bytes:
        number, content = data[:1], data[1:]
        if content[:1] == b"{":
            return number + lies.json_lie(content, choose)
        lines = content.split(b"\n")
        at = choose.randrange(len(lines))
        key = lines[at].partition(b":")[0]
        made = json.dumps(choose.choice(lies.VALUES)).encode()
        text = made if choose.random() < 0.7 else choose.choice(lies.WORDS)
        kind = choose.randrange(4)
        if kind == 0:
            return number + lies.byte_lie(content, choose)
        if kind == 1:
            lines[at] = key + b": " + text
        elif kind == 2:
            lines[at] = key + b": [" + text + b", {name: a, 2: [b]}, 2024-13-45]"
        else:
            lines.insert(at, b"- " + text if choose.random() < 0.5 else choose.choice(lines))
        return number + b"\n".join(lines)

    def seeds(self) -> list[bytes]:
        return [bytes([number]) + content for number, content in enumerate(self.files.values())]

    def attempt(self, data: bytes) -> None:
        from qtool.formats.gguf_values import Kind
        from qtool.formats.gguf_writer import lay_out
        from qtool.formats.safetensors_header import read_json
        from qtool.gguf.from_hf.general import general_metadata

        lied = list(self.files)[(data[0] if data else 0) % len(self.files)]
        for name, content in self.files.items():
            (self.folder / name).write_bytes(data[1:] if name == lied else content)
        config = quietly(lambda: read_json(self.folder / "config.json")) or {}
        made = general_metadata(self.folder, config, [])
        lay_out(made, [])
        for key, value in made.items():
            assert key.startswith("general."), key
            assert isinstance(value.value, list) == (value.kind is Kind.ARRAY)
