"""Tiny checkpoints written by hand: model.safetensors and config.json without transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.gguf.source import GgufSource

Arrays = dict[str, NDArray[Any]]
DTYPES = {"float16": "F16", "uint16": "BF16", "float32": "F32", "uint8": "U8"}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 10, "max_position_embeddings": 64,
}  # fmt: skip


def write(folder: Path, config: dict[str, Any], tensors: Arrays) -> Checkpoint:
    """model.safetensors and config.json; uint16 stands for bfloat16."""
    folder.mkdir(exist_ok=True)
    header: dict[str, Any] = {}
    at = 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": DTYPES[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    text = json.dumps(header).encode()
    data = b"".join(values.tobytes() for values in tensors.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint.open(folder)


def numbers(*shape: int, seed: int = 0, dtype: str = "float16") -> NDArray[Any]:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def llama(dtype: str = "float16", *, mlp: bool = True, heads: int = 4, kv: int = 2) -> Arrays:
    found = {"model.embed_tokens.weight": (10, 16), "model.norm.weight": (16,)}
    for b in range(2):
        block = f"model.layers.{b}."
        found |= {
            f"{block}self_attn.q_proj.weight": (heads * 4, 16),
            f"{block}self_attn.k_proj.weight": (kv * 4, 16),
            f"{block}self_attn.v_proj.weight": (kv * 4, 16),
            f"{block}self_attn.o_proj.weight": (16, heads * 4),
            f"{block}input_layernorm.weight": (16,),
            f"{block}post_attention_layernorm.weight": (16,),
        }
        if mlp:
            found |= {
                f"{block}mlp.gate_proj.weight": (24, 16),
                f"{block}mlp.up_proj.weight": (24, 16),
                f"{block}mlp.down_proj.weight": (16, 24),
            }
    found["lm_head.weight"] = (10, 16)
    return {
        name: numbers(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(found.items())
    }


def values(source: GgufSource, name: str) -> NDArray[Any]:
    tensor = next(t for t in source.tensors if t.name == name)
    dtype = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[tensor.type.name]
    return tensor.read(0, tensor.rows).view(dtype).reshape(tensor.shape)


def mixtral(*, fused: bool) -> Arrays:
    """Three experts a block, in six tensors or in two."""
    tensors = llama(mlp=False)
    for b in range(2):
        block = f"model.layers.{b}."
        gate, up = numbers(3, 24, 16, seed=50 + b), numbers(3, 24, 16, seed=60 + b)
        down = numbers(3, 16, 24, seed=70 + b)
        router = numbers(3, 16, seed=80 + b)
        if fused:
            tensors[f"{block}mlp.gate.weight"] = router
            tensors[f"{block}mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
            tensors[f"{block}mlp.experts.down_proj"] = down
            continue
        tensors[f"{block}block_sparse_moe.gate.weight"] = router
        for i in range(3):
            for name, weight in (("w1", gate), ("w2", down), ("w3", up)):
                tensors[f"{block}block_sparse_moe.experts.{i}.{name}.weight"] = weight[i]
    return tensors


MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 3}


def neox() -> Arrays:
    shapes: dict[str, tuple[int, ...]] = {
        "gpt_neox.embed_in.weight": (10, 16), "gpt_neox.final_layer_norm.weight": (16,),
        "gpt_neox.final_layer_norm.bias": (16,), "embed_out.weight": (10, 16),
    }  # fmt: skip
    for b in range(2):
        for name, shape in {
            "attention.query_key_value": (48, 16), "attention.dense": (16, 16),
            "mlp.dense_h_to_4h": (24, 16), "mlp.dense_4h_to_h": (16, 24),
            "input_layernorm": (16,), "post_attention_layernorm": (16,),
        }.items():  # fmt: skip
            shapes[f"gpt_neox.layers.{b}.{name}.weight"] = shape
            shapes[f"gpt_neox.layers.{b}.{name}.bias"] = shape[:1]
    made = {name: numbers(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    return made | {"gpt_neox.layers.0.attention.bias": np.ones((1, 1, 8, 8), np.uint8)}


NEOX = {**LLAMA, "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu"}


def gemma(dtype: str) -> Arrays:
    made = llama(dtype)
    del made["lm_head.weight"]
    return made


def gemma2(dtype: str) -> Arrays:
    made = gemma(dtype)
    for b in range(2):
        for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            made[f"model.layers.{b}.{norm}.weight"] = numbers(16, dtype=dtype)
    return made


GEMMA = {**LLAMA, "architectures": ["GemmaForCausalLM"], "head_dim": 4, "hidden_act": "gelu"}
