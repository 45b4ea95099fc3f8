"""Healthy artifacts as other tools write them, made without qtool's own writers.

Sources: the checkpoints that AutoAWQ, GPTQModel, AutoRound, llm-compressor, bitsandbytes and
DeepSeek publish, by their configs and the names, dtypes and shapes in their headers.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.formats.packed_files import write

HIDDEN, INNER, VOCABULARY = 256, 512, 320
TOKENS = 300  # of the tokenizer; the embedding has more rows, as that of most models
LINEARS = {
    "self_attn.q_proj": (256, HIDDEN), "self_attn.k_proj": (128, HIDDEN),
    "self_attn.v_proj": (128, HIDDEN), "self_attn.o_proj": (HIDDEN, 256),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
Tensors = dict[str, tuple[str, NDArray[Any]]]
Store = Callable[[str, NDArray[np.float32]], Tensors]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def bfloat16(values: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    """Truncated."""
    return "BF16", (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2")


def dense(module: str, weight: NDArray[np.float32]) -> Tensors:
    """As it is."""
    return {f"{module}.weight": bfloat16(weight)}


def _words(fields: NDArray[Any], order: Iterable[int] = range(8)) -> tuple[str, NDArray[Any]]:
    """Eight fields of 4 bits a word, along the last axis."""
    words = np.zeros((*fields.shape[:-1], fields.shape[-1] // 8), np.uint32)
    for place, field in enumerate(order):
        words |= fields[..., field::8].astype(np.uint32) << np.uint32(4 * place)
    return "I32", words.view("<i4")


def gptq(*, signed: bool = False) -> Store:
    """Symmetric, v1, groups of 128; signed: the largest weight of a group always gets code 0."""

    def store(module: str, weight: NDArray[np.float32]) -> Tensors:
        groups = weight.reshape(len(weight), -1, 128)
        place = np.abs(groups).argmax(axis=2)[..., None]
        largest = np.take_along_axis(groups, place, axis=2)[..., 0]
        scale = (-largest / 8 if signed else np.abs(largest) / 7.5).astype(np.float16)
        codes = np.clip(np.rint(groups / scale.astype(np.float32)[..., None]) + 8, 0, 15)
        codes = codes.astype(np.uint8).reshape(weight.shape)
        kind, words = _words(codes)
        return {
            f"{module}.qweight": (kind, np.ascontiguousarray(words.T)),
            f"{module}.qzeros": _words(np.full(scale.T.shape, 7, np.uint8)),
            f"{module}.scales": ("F16", np.ascontiguousarray(scale.T)),
            f"{module}.g_idx": ("I32", (np.arange(weight.shape[1]) // 128).astype("<i4")),
        }

    return store


def awq(module: str, weight: NDArray[np.float32]) -> Tensors:
    """AutoAWQ's gemm, which gives a group of zeros the zero 0 and the code 0."""
    groups = weight.reshape(len(weight), -1, 128)
    high, low = groups.max(axis=2), groups.min(axis=2)
    scale = (np.maximum(high - low, 1e-5) / 15).astype(np.float16)
    wide = scale.astype(np.float32)
    zero = np.clip(-np.rint(low / wide), 0, 15)
    codes = np.clip(np.rint(groups / wide[..., None]) + zero[..., None], 0, 15)
    codes = codes.astype(np.uint8).reshape(weight.shape)
    return {
        f"{module}.qweight": _words(np.ascontiguousarray(codes.T), _AWQ_ORDER),
        f"{module}.qzeros": _words(np.ascontiguousarray(zero.astype(np.uint8).T), _AWQ_ORDER),
        f"{module}.scales": ("F16", np.ascontiguousarray(scale.T)),
    }


def pack_quantized(module: str, weight: NDArray[np.float32]) -> Tensors:
    """llm-compressor's W4A16."""
    groups = weight.reshape(len(weight), -1, 128)
    kind, stored = bfloat16(np.abs(groups).max(axis=2) / 7.5)
    scale = (stored.astype(np.uint32) << 16).view(np.float32)
    codes = (np.clip(np.rint(groups / scale[..., None]), -8, 7) + 8).astype(np.uint8)
    return {
        f"{module}.weight_packed": _words(codes.reshape(weight.shape)),
        f"{module}.weight_scale": (kind, stored),
        f"{module}.weight_shape": ("I64", np.array(weight.shape, "<i8")),
    }


def _e4m3(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Powers of two below the values, which is all that the checks look at."""
    power = np.clip(np.floor(np.log2(np.maximum(np.abs(values), 2.0**-6))), -6, 8).astype(np.int32)
    return (((power + 7) << 3) | np.where(values < 0, 128, 0)).astype(np.uint8)


def fp8_blocks(module: str, weight: NDArray[np.float32]) -> Tensors:
    """DeepSeek's and Qwen's FP8: blocks of 128 by 128."""
    rows, columns = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
    blocks = weight.reshape(rows, 128, columns, 128)
    scale = (np.abs(blocks).max(axis=(1, 3)) / 448).astype(np.float32)
    codes = _e4m3(blocks / scale[:, None, :, None]).reshape(weight.shape)
    return {f"{module}.weight": ("F8_E4M3", codes), f"{module}.weight_scale_inv": ("F32", scale)}


def int8(module: str, weight: NDArray[np.float32]) -> Tensors:
    """bitsandbytes."""
    most = np.maximum(np.abs(weight).max(axis=1), 1e-3)
    return {
        f"{module}.weight": ("I8", np.rint(weight / most[:, None] * 127).astype(np.int8)),
        f"{module}.SCB": ("F32", most.astype(np.float32)),
        f"{module}.weight_format": ("U8", np.zeros((), np.uint8)),
    }


def model(store: Store, left: Mapping[str, Store] | None = None, blocks: int = 2) -> Tensors:
    """A whole model; `left`: modules, as ends of names, that are stored otherwise."""
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) * 0.03).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": bfloat16(normal(VOCABULARY, HIDDEN)),
        "model.norm.weight": bfloat16(np.ones(HIDDEN)),
        "lm_head.weight": bfloat16(normal(VOCABULARY, HIDDEN)),
    }
    for block in range(blocks):
        start = f"model.layers.{block}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{start}{norm}.weight"] = bfloat16(np.ones(HIDDEN))
        for name, shape in LINEARS.items():
            module = start + name
            chosen = next((s for end, s in (left or {}).items() if module.endswith(end)), store)
            tensors |= chosen(module, normal(*shape))
    return tensors


def folder(path: Path, tensors: Tensors, quantization: Mapping[str, Any], **more: Any) -> Path:
    """With a config of Llama's and a tokenizer."""
    write(path, tensors, {})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": 2,
    } | ({"quantization_config": dict(quantization)} if quantization else {}) | more  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    vocabulary = {f"t{number}": number for number in range(TOKENS)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
    "lm_head": False, "checkpoint_format": "gptq", "pack_dtype": "int32", "dynamic": None,
    "meta": {"quantizer": ["gptqmodel:2.0"]},
}  # fmt: skip
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": None, "do_fuse": False, "exllama_config": None,
}  # fmt: skip
CT = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "input_activations": None, "output_activations": None, "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 128,
                "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "strategy": "group",
                "symmetric": True, "type": "int",
            },
        }
    },
    "kv_cache_scheme": None, "global_compression_ratio": None,
    "quantization_status": "compressed",
}  # fmt: skip
FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
    "weight_block_size": [128, 128],
}  # fmt: skip
INT8 = {
    "quant_method": "bitsandbytes", "_load_in_8bit": True, "load_in_8bit": True,
    "load_in_4bit": False, "llm_int8_skip_modules": None, "llm_int8_threshold": 6.0,
}  # fmt: skip
