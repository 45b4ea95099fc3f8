"""Checkpoints that consist of headers: real names and shapes over a hole in the disk."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtool.formats.safetensors_file import TensorSpec, lay_out

Shapes = Mapping[str, tuple[int, ...]]


def write(
    folder: Path, shapes: Shapes, config: Mapping[str, Any] | None = None, dtype: str = "F16"
) -> Path:
    """A folder with the files of a model, and a model.safetensors of zeros that takes no room."""
    folder.mkdir(parents=True, exist_ok=True)
    layout = lay_out(
        "model.safetensors", [TensorSpec(name, dtype, shape) for name, shape in shapes.items()]
    )
    with (folder / "model.safetensors").open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.size)
    (folder / "config.json").write_text(json.dumps({"model_type": "made-up", **(config or {})}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def llama(
    layers: int = 2, hidden: int = 256, inner: int = 768, kv: int = 128, vocabulary: int = 512
) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a Llama with an untied head."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        block = f"model.layers.{i}"
        shapes |= {
            f"{block}.input_layernorm.weight": (hidden,),
            f"{block}.self_attn.q_proj.weight": (hidden, hidden),
            f"{block}.self_attn.k_proj.weight": (kv, hidden),
            f"{block}.self_attn.v_proj.weight": (kv, hidden),
            f"{block}.self_attn.o_proj.weight": (hidden, hidden),
            f"{block}.post_attention_layernorm.weight": (hidden,),
            f"{block}.mlp.gate_proj.weight": (inner, hidden),
            f"{block}.mlp.up_proj.weight": (inner, hidden),
            f"{block}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def experts(
    layers: int, count: int, hidden: int = 256, inner: int = 128
) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a Qwen3-MoE, without its attention."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (512, hidden)}
    for i in range(layers):
        mlp = f"model.layers.{i}.mlp"
        shapes[f"{mlp}.gate.weight"] = (count, hidden)
        for e in range(count):
            shapes[f"{mlp}.experts.{e}.gate_proj.weight"] = (inner, hidden)
            shapes[f"{mlp}.experts.{e}.up_proj.weight"] = (inner, hidden)
            shapes[f"{mlp}.experts.{e}.down_proj.weight"] = (hidden, inner)
    return shapes
