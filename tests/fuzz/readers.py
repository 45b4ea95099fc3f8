"""The readers that `fuzz_readers` tries: honest inputs, lies about them, and what is read of each.

A reader has `seeds()`, `lie(data, choose)`, `attempt(data)`, and `beside`: the bytes of the files
that are read with the input. What is accepted has to keep its promises.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lies

LONG = 2_000_000  # bytes of the inputs of readers of JSON, for what grows with the text

# Nothing of qtool is imported here: coverage is counted of what is imported later.


def _quietly(read: Callable[[], Any]) -> Any:
    """What `read` gives; None where it refuses."""
    from qtool.errors import QtoolError

    try:
        return read()
    except QtoolError as error:
        assert len(str(error)) < 4000, error
        return None


def _no_constant(text: str) -> None:
    raise AssertionError(f"{text} in JSON")


def _prefixed(lie: lies.Lie) -> lies.Lie:
    """A lie about what follows the first byte, which says what kind of input it is."""

    def told(data: bytes, choose: Any) -> bytes:
        first = bytes([choose.randrange(256)]) if not data or choose.random() < 0.03 else data[:1]
        return first + lie(data[1:], choose)

    return told


class Header:
    """The header of a safetensors file, and what it says of tensors."""

    name = "header"
    beside = 400
    longest = LONG
    lie = staticmethod(_prefixed(partial(lies.contained, most=LONG - 20_000)))

    def __init__(self, folder: Path) -> None:
        import numpy as np
        from artifact_files import random_quant, write_folder

        from qtool.scheme import Scheme

        self.folder = folder
        self.made = []
        for number, kind in enumerate(("dense", "awq", "gptq", "compressed-tensors")):
            place = folder / f"seed{number}"
            place.mkdir()
            quants = {} if kind == "dense" else {"a": random_quant(Scheme(4, 32, True), 8, 32)}
            floats = {"norm.weight": np.ones(4, np.float32), "m.weight": np.ones((2, 3), "<f2")}
            write_folder(place, kind, quants, floats)
            self.made.append(bytes([number]) + (place / "model.safetensors").read_bytes())
        self.configs = [
            (folder / f"seed{number}" / "config.json").read_bytes() for number in range(4)
        ]
        self.path = folder / "model" / "model.safetensors"
        self.path.parent.mkdir()

    def seeds(self) -> list[bytes]:
        return self.made

    def attempt(self, data: bytes) -> None:
        from qtool.artifact import Artifact
        from qtool.inspect import inspection

        kind, content = (data[0] if data else 0), data[1:]
        self.path.write_bytes(content)
        (self.path.parent / "config.json").write_bytes(self.configs[kind % len(self.configs)])
        artifact = Artifact.open(self.path.parent)
        checkpoint = artifact.checkpoint
        for name, info in checkpoint.tensors.items():
            assert 8 <= info.start <= info.end <= len(content)
            assert len(checkpoint.raw(name)) == info.nbytes
            if info.shape and info.shape[0]:
                checkpoint.part(name, 0, 1)
            _quietly(lambda n=name: checkpoint.array(n))
            _quietly(lambda n=name: checkpoint.float32(n))
        for name in artifact.entries:
            _quietly(lambda n=name: artifact.read(n))
        found = inspection(artifact, len(content))
        json.loads(json.dumps(found.json()), parse_constant=_no_constant)
        [*found.rows(True)]


class Index:
    """model.safetensors.index.json over two files, one of them in a folder below."""

    name = "index"
    longest = LONG
    lie = staticmethod(partial(lies.json_lie, most=LONG - 20_000))

    def __init__(self, folder: Path) -> None:
        from qtool.formats.safetensors_file import INDEX_NAME, TensorSpec, lay_out

        self.folder = folder / "model"
        (self.folder / "sub").mkdir(parents=True)
        (folder / "outside.safetensors").write_bytes(b"never to be read")
        self.map: dict[str, str] = {}
        self.beside = 0
        for number, file in enumerate(("a.safetensors", "sub/b.safetensors")):
            specs = [TensorSpec(f"model.layers.{number}.{n}", "F16", (2, 2)) for n in "wxy"]
            layout = lay_out(file, specs)
            content = layout.header + bytes(layout.size - len(layout.header))
            (self.folder / file).write_bytes(content)
            self.map |= {spec.name: file for spec in specs}
            self.beside += len(content)
        self.path = self.folder / INDEX_NAME

    def seeds(self) -> list[bytes]:
        small = {"weight_map": self.map}
        whole = {"metadata": {"total_size": 48}, **small}
        return [json.dumps(one, indent=n).encode() for one in (small, whole) for n in (0, 2)]

    def attempt(self, data: bytes) -> None:
        from qtool.artifact import Artifact

        self.path.write_bytes(data)
        artifact = Artifact.open(self.folder)
        for name in artifact.checkpoint.tensors:
            file = artifact.checkpoint.file_of(name)
            assert self.folder.resolve() in file.resolve().parents, file
            assert len(artifact.checkpoint.raw(name)) == 8
        assert artifact.entries


class Config:
    """config.json, of a model as published and of quantized ones, and the JSON files beside it."""

    name = "config"
    longest = LONG
    lie = staticmethod(_prefixed(partial(lies.json_lie, most=LONG - 20_000)))

    def __init__(self, folder: Path) -> None:
        import hf_arrays
        import numpy as np
        from artifact_files import random_quant, write_folder

        from qtool.formats import FORMATS
        from qtool.scheme import Scheme

        self.folders: list[tuple[Path, str]] = []  # and the file that is told lies about
        self.beside = 0

        def add(place: Path, file: str) -> None:
            self.folders.append((place, file))
            size = sum(path.stat().st_size for path in place.iterdir())
            self.beside = max(self.beside, size)

        made = [(hf_arrays.LLAMA, hf_arrays.llama()), (hf_arrays.NEOX, hf_arrays.neox()),
                (hf_arrays.MIXTRAL, hf_arrays.mixtral(fused=False)),
                (hf_arrays.GEMMA, hf_arrays.gemma("float16"))]  # fmt: skip
        for number, (config, arrays) in enumerate(made):
            place = folder / f"float{number}"
            kind = {"model_type": ("llama", "gpt_neox", "mixtral", "gemma")[number]}
            more = {"rope_theta": 1e4, "rms_norm_eps": 1e-5,
                    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                     "high_freq_factor": 4.0,
                                     "original_max_position_embeddings": 16}}  # fmt: skip
            hf_arrays.write(place, {**config, **kind, **(more if number == 0 else {})}, arrays)
            add(place, "config.json")
        sampling = folder / "float0" / "generation_config.json"
        sampling.write_text('{"temperature": 0.6, "top_k": 5}')
        add(sampling.parent, sampling.name)
        scheme = Scheme(4, 32, True)
        name = "model.layers.0.mlp.up_proj"
        dense = {"model.layers.0.mlp.down_proj.weight": np.ones((64, 8), np.float16),
                 "model.norm.weight": np.ones(64, np.float16)}  # fmt: skip
        for kind in ("awq", "gptq", "compressed-tensors", "fp8"):
            place = folder / kind
            place.mkdir()
            assert kind in FORMATS
            if kind == "fp8":
                config = _fp8(place)
            else:
                write_folder(place, kind, {name: random_quant(scheme, 16, 64)}, dense)
                config = json.loads((place / "config.json").read_text())
                config["num_hidden_layers"] = 1
            (place / "config.json").write_text(json.dumps(config))
            add(place, "config.json")
        (folder / "gptq" / "quantize_config.json").write_text('{"bits": 4, "group_size": 32}')
        add(folder / "gptq", "quantize_config.json")
        add(folder / "fp8", "hf_quant_config.json")
        (folder / "fp8" / "hf_quant_config.json").write_text(
            '{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": null}}'
        )
        (folder / "awq" / "qtool.json").write_text('{"qtool_version": "0", "layers": []}')
        add(folder / "awq", "qtool.json")
        self.contents = [(place / file).read_bytes() for place, file in self.folders]

    def seeds(self) -> list[bytes]:
        return [bytes([number]) + content for number, content in enumerate(self.contents)]

    def attempt(self, data: bytes) -> None:
        from qtool.artifact import Artifact
        from qtool.gguf.from_hf import hf_source
        from qtool.gguf.plan import make_gguf_plan
        from qtool.inspect import inspection
        from qtool.plan.plan import make_plan
        from qtool.recipe.recipe import load
        from qtool.verification.run import verify_artifact

        number = (data[0] if data else 0) % len(self.folders)
        place, file = self.folders[number]
        (place / file).write_bytes(data[1:])

        def looked() -> None:
            artifact = Artifact.open(place)
            for name in artifact.entries:
                _quietly(lambda n=name: artifact.read(n))
            json.loads(json.dumps(inspection(artifact, 1).json()), parse_constant=_no_constant)
            plan = _quietly(
                lambda: make_plan(
                    load("w4g128-rtn", ["weights.group_size=16"]), artifact.checkpoint
                )
            )
            if plan is not None:
                assert plan.layout.size > 0
            source = _quietly(lambda: hf_source(artifact.checkpoint))
            if source is not None:
                _quietly(lambda: make_gguf_plan(load("q8_0"), source))
            if number < 4 and len(data) < 60_000:  # transformers keeps longer ones several times
                from qtool.calibrating.stream import Skeleton

                _quietly(lambda: Skeleton.open(artifact.checkpoint))

        try:
            looked()
            engine = (None, "vllm", "sglang", "transformers", "exllama")[len(data) % 5]
            verdict = verify_artifact(place, engine=engine, threads=1)
            json.loads(json.dumps(verdict.json()), parse_constant=_no_constant)
        finally:
            (place / file).write_bytes(self.contents[number])


def _fp8(place: Path) -> dict[str, Any]:
    """Two matrices of FP8 with one scale each, by their headers over zeros."""
    from qtool.formats.safetensors_file import TensorSpec, lay_out

    module = "model.layers.0.mlp.up_proj"
    specs = [TensorSpec(f"{module}.weight", "F8_E4M3", (16, 64)),
             TensorSpec(f"{module}.weight_scale", "F32", (1,)),
             TensorSpec(f"{module}.input_scale", "F32", (1,))]  # fmt: skip
    layout = lay_out("model.safetensors", specs)
    data = bytes(16 * 64) + b"\0\0\x80?" * 2
    content = (layout.header + data)[: layout.size]
    (place / "model.safetensors").write_bytes(content)
    return {
        "model_type": "llama", "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "static",
                                "ignored_layers": ["lm_head"]},
    }  # fmt: skip


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
        json.loads(json.dumps(recipe.effective()), parse_constant=_no_constant)
        assert recipe.name == "recipe"


class Tokenizer:
    """The files of a tokenizer, of which one is told lies about."""

    name = "tokenizer"

    def __init__(self, folder: Path) -> None:
        import small_tokenizers as small

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
        import small_tokenizers as small

        from qtool.calibrating.calibration import tokenize
        from qtool.gguf.tokenizer_files import tokenizer_files
        from qtool.gguf.tokenizers import tokenizer_metadata

        arch, lied, files = self.inputs[(data[0] if data else 0) % len(self.inputs)]
        for path in self.folder.glob("*"):
            path.unlink()
        small.save(self.folder, {**files, lied: data[1:]})
        size = 300
        if "tokenizer.json" in files:  # else transformers says more than can be read
            _quietly(lambda: tokenize("the and in", self.folder))
        made = tokenizer_metadata(self.folder, arch, size, {"vocab_size": size, "eos_token_id": 2})
        assert len(made["tokenizer.ggml.tokens"].value) == size
        for key, value in made.items():
            assert key.startswith("tokenizer."), key
            for text in value.value if isinstance(value.value, list) else [value.value]:
                if isinstance(text, str):
                    text.encode()  # no half of a surrogate pair
        from qtool.formats.gguf_values import string

        _quietly(lambda: tokenizer_files({"general.architecture": string(arch), **made}))


def _unigram(small: Any) -> dict[str, Any]:
    """tokenizer.json of a Unigram model."""
    from qtool.gguf.sentencepiece import UNIGRAM, Piece, SentencePieceModel
    from qtool.gguf.spm_json import unigram_tokenizer

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
        from qtool.gguf.general import general_metadata

        lied = list(self.files)[(data[0] if data else 0) % len(self.files)]
        for name, content in self.files.items():
            (self.folder / name).write_bytes(data[1:] if name == lied else content)
        made = general_metadata(self.folder, [])
        lay_out(made, [])
        for key, value in made.items():
            assert key.startswith("general."), key
            assert isinstance(value.value, list) == (value.kind is Kind.ARRAY)


class Stats:
    """A file of statistics."""

    name = "stats"
    longest = LONG
    lie = staticmethod(partial(lies.contained, most=LONG - 20_000))
    beside = 0

    def __init__(self, folder: Path) -> None:
        import numpy as np
        from safetensors.numpy import save

        sites = {"a.q": ["a.q.weight", "a.k.weight"], "a.o": ["a.o.weight"], "a.e": ["a.e.weight"]}
        made: dict[str, Any] = {}
        for number, site in enumerate(sites):
            x = np.random.default_rng(number).normal(size=(16, 4)).astype(np.float32)
            made[f"site.{site}.count"] = np.array([16 if number < 2 else 0])
            if number < 2:
                made |= {f"site.{site}.gram": x.T @ x, f"site.{site}.square": (x * x).sum(0),
                         f"site.{site}.mean_abs": abs(x).mean(0),
                         f"site.{site}.max_abs": abs(x).max(0)}  # fmt: skip
        metadata = {"qtool.statistics": json.dumps(sites), "source": "x", "samples": "4"}
        self.made = save(made, metadata)
        self.path = folder / "stats.safetensors"
        self.names = [name for names in sites.values() for name in names]

    def seeds(self) -> list[bytes]:
        return [self.made]

    def attempt(self, data: bytes) -> None:
        import numpy as np

        from qtool.calibrating.stats import NEEDS, StatsFile

        self.path.write_bytes(data)
        file = StatsFile.open(self.path)
        refusals = 0
        for name in self.names:
            found = _quietly(lambda n=name: file.read(n, NEEDS, 4))
            _quietly(lambda n=name: file.read(n, ("gram",)))
            refusals += found is None
            if found is not None and found.count:
                assert found.gram.shape == (4, 4) and (np.diag(found.gram) >= 0).all()
                for one in (found.mean_abs, found.max_abs, found.square):
                    assert one.shape == (4,) and (one >= 0).all()
        if refusals:
            file.read("nothing", NEEDS)


class Journal:
    """The journal of a run, and the hidden states that it speaks of."""

    name = "journal"
    _CUT = b"\n\x1ehidden\x1e\n"

    def __init__(self, folder: Path) -> None:
        from types import SimpleNamespace

        import numpy as np
        import torch

        from qtool.formats.safetensors_file import StreamWriter, TensorSpec, plan_shards
        from qtool.native.sums import checksum
        from qtool.runs.journal import Journal as Real
        from qtool.runs.outcome import Outcome
        from qtool.runs.resume import commit
        from qtool.runs.summary import ExpertReport, LayerReport

        self.folder = folder
        self.by_block: dict[int | None, list[Any]] = {
            block: [TensorSpec(f"{block}.{n}", "F32", (2, 2)) for n in "ab"]
            for block in (0, 1, None)
        }
        self.layout = plan_shards([spec for some in self.by_block.values() for spec in some], 10**9)
        (folder / "artifact").mkdir()
        self.stub = SimpleNamespace(
            plan=SimpleNamespace(
                by_block={b: [SimpleNamespace(outputs=some)] for b, some in self.by_block.items()}
            )
        )
        self.writer = StreamWriter(folder / "artifact", self.layout)
        for some in self.by_block.values():
            for number, spec in enumerate(some):
                self.writer.add(spec.name, np.full((2, 2), number + 1, np.float32))
        self.right = dict(self.writer.checksums)
        self.hidden = [torch.arange(6.0).reshape(1, 2, 3), torch.ones(1, 2, 3)]
        sums = [checksum(h.numpy().reshape(-1).view(np.uint8)) for h in self.hidden]
        kept = b"".join(h.numpy().tobytes() for h in self.hidden)
        journal = Real(folder / "made")
        for name, value in self._facts().items():
            journal.agree(name, value, "differs")
        layers = [LayerReport("0.a", "4 bits", 0.1)]
        experts = [ExpertReport("0.e", [1, 2])]
        for block in (None, 0, 1):
            sums_ = {spec.name: self.right[spec.name] for spec in self.by_block[block]}
            sink: Any = SimpleNamespace(checksums=lambda _, s=sums_: s)
            commit(journal, sink, block, Outcome(layers, ["note"], None, experts), sums)
        journal.close()
        lines = (folder / "made").read_bytes()
        # Without the last block, so that the hidden states are asked for.
        fewer = b"".join(lines.splitlines(keepends=True)[:-1])
        self.made = [one + self._CUT + kept for one in (fewer, lines)]
        self.beside = self.layout.size

    @staticmethod
    def _facts() -> dict[str, Any]:
        return {"version of qtool": "0", "recipe": {"name": "x", "bits": 4}, "source": [["a", 1]]}

    def lie(self, data: bytes, choose: Any) -> bytes:
        import zlib

        text, _, states = data.partition(self._CUT)
        kind = choose.randrange(6)
        lines = text.splitlines(keepends=True) or [b""]
        at = choose.randrange(len(lines))
        if kind == 0:
            text = lies.byte_lie(text, choose)
        elif kind == 1:
            states = lies.byte_lie(states, choose)
        elif kind == 2:
            lines.insert(choose.randrange(len(lines) + 1), choose.choice(lines))
            text = b"".join(lines)
        elif kind == 3:
            del lines[at]
            text = b"".join(lines)
        else:
            said = lies.json_lie(lines[at][9:].rstrip(b"\n"), choose).replace(b"\n", b" ")
            lines[at] = b"%08x %s\n" % (zlib.crc32(said), said)
            text = b"".join(lines)
        return text + self._CUT + states

    def seeds(self) -> list[bytes]:
        return self.made

    def attempt(self, data: bytes) -> None:
        from types import SimpleNamespace

        from qtool.calibrating import hidden
        from qtool.calibrating.stream import Workers
        from qtool.runs import resume
        from qtool.runs.journal import Journal as Real
        from qtool.runs.sink import Sink

        text, _, states = data.partition(self._CUT)
        path = self.folder / "journal"
        path.write_bytes(text)
        for file in ("hidden-0", "hidden-1"):
            (self.folder / file).write_bytes(states)
        self.writer.checksums.clear()
        sink: Any = SimpleNamespace(plan=self.stub.plan, writer=self.writer, folder=self.folder)
        sink.checksums = lambda block: Sink.checksums(sink, block)
        sink.restore = lambda block, sums: Sink.restore(sink, block, sums)
        sink.forget = lambda block: Sink.forget(sink, block)
        stream: Any = SimpleNamespace(hidden=[h.clone() * 0 for h in self.hidden])
        journal = Real(path)
        try:
            for name, value in self._facts().items():
                journal.agree(name, value, f"another {name}")
            with Workers(1) as workers:

                def found(index: int, kept: Any) -> bool:
                    return hidden.take_up(self.folder, index, kept, stream, workers)

                outside = resume.finished(journal, sink, None)
                done = resume.finished_blocks(journal, sink, 3, found)
            # What is believed is what the disk has.
            believed = [spec for b in range(len(done)) for spec in self.by_block[b]]
            believed += self.by_block[None] if outside is not None else []
            for spec in believed:
                assert self.writer.checksums[spec.name] == self.right[spec.name]
            if done and len(done) < 3:
                import torch

                pairs = zip(stream.hidden, self.hidden, strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)
            # And the run goes on and says what it did.
            for one in [*done, *([outside] if outside else [])]:
                json.dumps([sum(e.tokens) for e in one.experts])
                sorted(layer.relative_error for layer in one.layers)
                "".join(one.notes)
            journal.commit("block 99", hidden=None)
        finally:
            journal.close()
        again = Real(path)
        again.close()
        assert "block 99" in again.done


class Remote:
    """What a server answers when a model is opened by its headers; one answer after another."""

    name = "remote"
    beside = 0
    _CUT = b"\n\x1e\n"
    _ADDRESSES = ("http://h/m/", "http://h/m/model.safetensors", "http://h/m/m.gguf", "hf://a/m",
                  "hf://a/g", "https://u:p@h/m/")  # fmt: skip

    def __init__(self, folder: Path) -> None:
        import gguf_bytes

        from qtool.formats.safetensors_file import INDEX_NAME, TensorSpec, lay_out

        layout = lay_out("m", [TensorSpec("model.layers.0.q.weight", "F16", (4, 8))])
        content = layout.header + bytes(layout.size - len(layout.header))
        index = {"weight_map": {"model.layers.0.q.weight": "model.safetensors"}}
        listed = [{"rfilename": n} for n in ("config.json", "model.safetensors", INDEX_NAME)]
        only = [{"rfilename": "m.gguf"}]
        commit = "0" * 40
        self.files = {
            "/m/config.json": b'{"model_type": "llama"}',
            "/m/model.safetensors": content,
            "/m/m.gguf": bytes(gguf_bytes.Gguf()),
            f"/m/{INDEX_NAME}": json.dumps(index).encode(),
        }
        for name, siblings in (("m", listed), ("g", only)):
            said = json.dumps({"sha": commit, "siblings": siblings}).encode()
            self.files[f"/api/models/a/{name}/revision/main"] = said
        for name in ("config.json", "model.safetensors", INDEX_NAME):
            self.files[f"/a/m/resolve/{commit}/{name}"] = self.files[f"/m/{name}"]
        self.files[f"/a/g/resolve/{commit}/m.gguf"] = self.files["/m/m.gguf"]
        self.answers: list[bytes] | None = None  # None: honest ones, which are kept
        self.given: list[bytes] = []
        self.made: list[bytes] = []
        for number in range(len(self._ADDRESSES)):
            self.answers, self.given = None, []
            self.attempt(bytes([number]))
            self.made.append(bytes([number]) + self._CUT.join(self.given))
        self.answers = []

    def seeds(self) -> list[bytes]:
        return self.made

    @staticmethod
    def lie(data: bytes, choose: Any) -> bytes:
        number = data[:1] if data and choose.random() > 0.03 else bytes([choose.randrange(6)])
        some = data[1:].split(Remote._CUT)
        at = choose.randrange(len(some))
        head, gap, body = some[at].partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        kind = choose.randrange(8)
        if kind == 0:
            some[at] = lies.byte_lie(some[at], choose)
        elif kind == 1:
            lie = lies.json_lie if body[:1] == b"{" else lies.contained
            some[at] = head + gap + lie(body, choose)
        elif kind == 2:
            some.insert(at, choose.choice(some))
        elif kind == 3 and len(some) > 1:
            del some[at]
        elif kind == 4:
            lines[0] = b"HTTP/1.1 %d x" % choose.choice(
                [100, 200, 204, 206, 301, 302, 304, 308, 401, 404, 408, 416, 429, 500, 503, 999]
            )
            some[at] = b"\r\n".join(lines) + gap + body
        else:
            size = choose.choice([0, 1, 8, len(body), 10**6, 2**31, 2**63, 10**17, 10**30, -1])
            line = choose.choice([
                b"Content-Length: %d" % size, b"Transfer-Encoding: chunked",
                b"Content-Range: bytes 0-%d/%d" % (max(0, len(body) - 1), size),
                b"Content-Range: bytes 0-7/%d" % size, b"Content-Range: bytes %d-8/9" % size,
                b"Content-Encoding: gzip", b"Content-Encoding: identity",
                b"Location: http://other/x", b"Location: file:///etc/passwd", b"Location: //[",
                b"Location: /m/\xff\xfe\n x", b"Location: " + b"a" * 3000, b"Location: https://h:0/",
                b"Retry-After: 9999999", b"X-Error-Code: GatedRepo", b"Connection: close",
                b"x" * 300 + b": y", b"X: " + b"y" * 70_000, b"Content-Range: bytes 0-7/*",
            ])  # fmt: skip
            name = line.partition(b":")[0]
            lines = [one for one in lines if not one.startswith(name + b":")] + [line]
            some[at] = b"\r\n".join(lines) + (gap or b"\r\n\r\n") + body
        return number + Remote._CUT.join(some)

    def _answer(self, request: bytes) -> bytes:
        if self.answers is not None:
            return self.answers.pop(0) if self.answers else b""
        head = request.decode("latin-1")
        found = self.files.get(head.split(" ")[1])
        if found is None:
            made = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
        elif "Range: bytes=" in head:
            first, last = head.partition("Range: bytes=")[2].split("\r\n")[0].split("-")
            part = found[int(first) : int(last) + 1]
            end = int(first) + len(part) - 1
            made = b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\n" % len(part)
            made += b"Content-Range: bytes %s-%d/%d\r\n\r\n" % (first.encode(), end, len(found))
            made += part
        else:
            made = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(found) + found
        self.given.append(made)
        return made

    def attempt(self, data: bytes) -> None:
        import http.client
        import io
        import ssl
        import time
        from unittest.mock import patch

        from huggingface_hub import constants

        from qtool.remote import open as remote_open
        from qtool.remote import ranges

        reader = self

        class Socket:
            """What was asked gets the next answer."""

            asked = b""

            def sendall(self, sent: bytes) -> None:
                self.asked += bytes(sent)

            def makefile(self, *_: object) -> io.BufferedReader:
                asked, self.asked = self.asked, b""
                return io.BufferedReader(io.BytesIO(reader._answer(asked)))  # type: ignore[arg-type]

            def close(self) -> None:
                pass

            def shutdown(self, _: int) -> None:
                pass

        def connect(connection: Any) -> None:
            if connection.host not in ("h", "other", "hub"):
                raise OSError("no such host")
            connection.sock = Socket()

        if self.answers is not None:
            self.answers = data[1:].split(self._CUT)
        address = self._ADDRESSES[(data[0] if data else 0) % len(self._ADDRESSES)]
        with (
            patch.object(http.client.HTTPConnection, "connect", connect),
            patch.object(http.client.HTTPSConnection, "connect", connect),
            patch.object(ranges.Server, "_context", ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)),
            patch.object(ranges, "getproxies", dict),
            patch.object(time, "sleep", lambda _: None),
            patch.object(remote_open, "_AT_ONCE", 1),  # answers come in one order
            patch.object(constants, "ENDPOINT", "https://hub"),
            patch.object(constants, "HUGGINGFACE_CO_URL_TEMPLATE", _TEMPLATE),
            patch.object(constants, "HF_HUB_OFFLINE", False),
            remote_open.opened(address) as (found, fetched),
        ):
            json.loads(json.dumps(found.json()), parse_constant=_no_constant)
            assert 0 <= fetched() <= max(len(data), 10**6)


_TEMPLATE = "https://hub/{repo_id}/resolve/{revision}/{filename}"
READERS: dict[str, Callable[[Path], Any]] = {
    reader.name: reader
    for reader in (Header, Index, Config, Recipe, Tokenizer, Card, Stats, Journal, Remote)
}
