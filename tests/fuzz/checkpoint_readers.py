"""Readers of a model's folder: headers of safetensors files, their index, configurations."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import lies
from promises import LONG, prefixed, quietly, tellable

# Nothing of qtool is imported here: coverage is counted of what is imported later.


class Header:
    """The header of a safetensors file, and what it says of tensors."""

    name = "header"
    beside = 400
    longest = LONG
    lie = staticmethod(prefixed(partial(lies.contained, most=LONG - 20_000)))

    def __init__(self, folder: Path) -> None:
        import numpy as np

        from qtool.scheme import Scheme
        from support.formats.artifact_files import random_quant, write_folder

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
        from qtool.artifacts.artifact import Artifact
        from qtool.inspecting.inspect import inspection

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
            quietly(lambda n=name: checkpoint.array(n))
            quietly(lambda n=name: checkpoint.float32(n))
        for name in artifact.entries:
            quietly(lambda n=name: artifact.read(n))
        found = inspection(artifact, len(content))
        tellable(found.json())
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
        from qtool.artifacts.artifact import Artifact

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
    lie = staticmethod(prefixed(partial(lies.json_lie, most=LONG - 20_000)))

    def __init__(self, folder: Path) -> None:
        import numpy as np

        from qtool.formats import FORMATS
        from qtool.scheme import Scheme
        from support.formats.artifact_files import random_quant, write_folder
        from support.models import hf_arrays

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
        from qtool.artifacts.artifact import Artifact
        from qtool.gguf.from_hf.source import hf_source
        from qtool.inspecting.inspect import inspection
        from qtool.planning.gguf.plan import make_gguf_plan
        from qtool.planning.plan import make_plan
        from qtool.recipe.recipe import load
        from qtool.verification.run import verify_artifact

        number = (data[0] if data else 0) % len(self.folders)
        place, file = self.folders[number]
        (place / file).write_bytes(data[1:])

        def looked() -> None:
            artifact = Artifact.open(place)
            for name in artifact.entries:
                quietly(lambda n=name: artifact.read(n))
            tellable(inspection(artifact, 1).json())
            plan = quietly(
                lambda: make_plan(
                    load("w4g128-rtn", ["weights.group_size=16"]), artifact.checkpoint
                )
            )
            if plan is not None:
                assert plan.layout.size > 0
            source = quietly(lambda: hf_source(artifact.checkpoint))
            if source is not None:
                quietly(lambda: make_gguf_plan(load("q8_0"), source))
            if number < 4 and len(data) < 60_000:  # transformers keeps longer ones several times
                from qtool.streaming.skeleton import Skeleton

                quietly(lambda: Skeleton.open(artifact.checkpoint))

        try:
            looked()
            engine = (None, "vllm", "sglang", "transformers", "exllama")[len(data) % 5]
            verdict = verify_artifact(place, engine=engine, threads=1)
            tellable(verdict.json())
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
