"""Healthy artifacts that an engine refuses or serves slowly, and configs that it trips over."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from support.gallery.case import Broken
from support.gallery.packed import config, dense
from support.gallery.raw import Raw, edited, quantization, settings


def nothing(folder: Path) -> None:
    """It is whole."""


def cache_scales(*names: str, said: bool = True) -> Callable[[Path], None]:
    """A quantized KV cache, with scales of these names in every block."""

    def damage(folder: Path) -> None:
        with edited(folder) as tensors:
            file = next(iter(tensors.values())).file
            for block in (0, 1):
                for name in names:
                    number = np.float32(0.02).tobytes()
                    full = f"model.layers.{block}.self_attn.{name}"
                    tensors[full] = Raw("F32", (1,), number, file)
        if not said:
            return
        with quantization(folder) as found:
            found["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}

    return damage


def quantized_head(folder: Path) -> None:
    """The head is packed, and no key says so."""
    with edited(folder) as tensors:
        file = tensors.pop("lm_head.weight").file
        q = "model.layers.0.self_attn.q_proj"
        for part in ("qweight", "qzeros", "scales"):
            kept = tensors[f"{q}.{part}"]
            columns = kept.shape[1] * 96 // 256
            stored = kept.changed(kept.array[:, :columns])
            tensors[f"lm_head.{part}"] = Raw(stored.dtype, stored.shape, stored.data, file)


def gemma(folder: Path) -> None:
    """A model type that overflows in float16."""
    with settings(folder / "config.json") as content:
        content["model_type"] = "gemma3_text"
    config(group_size=128, zero_point=False)(folder)


def inner_list(folder: Path) -> None:
    """A dense layer that the config does not name."""
    dense("layers.1.self_attn.o_proj")(folder)


SPLIT = "model.layers.0.mlp.down_proj"

CASES = [
    Broken("group-and-tensor-parallel", "vllm#5675", "awq", nothing, "engine-group-split",
           SPLIT, r"384 / 2 = 192 is not a multiple of 128.*--tp 1.*group_size 64.*512",
           engine="vllm", tp=2),
    Broken("group-and-ranks-of-sglang", "sglang#3571", "gptq", nothing, "engine-group-split",
           SPLIT, "384 / 2 = 192 is not a multiple of 128", engine="sglang", tp=2),
    Broken("heads-and-ranks", "vllm#5675", "awq", nothing, "engine-heads", "", "4 attention heads",
           engine="vllm", tp=3),
    Broken("width-and-ranks", "vllm#5675", "awq-experts", nothing, "engine-split", "o_proj",
           "not divisible by 3", engine="vllm", tp=3),
    Broken("gemv-in-vllm", "AutoAWQ#217", "awq-gemv", nothing, "engine-format", "",
           "layout gemv: it reads gemm only.*qtool convert ARTIFACT --to awq", engine="vllm"),
    Broken("gemv-in-transformers", "AutoAWQ#452", "awq-gemv", nothing, "engine-slow", "",
           "on NVIDIA GPUs alone", engine="transformers", severity="warning"),
    Broken("3-bits-in-vllm", "what an engine supports", "gptq-w3", nothing, "engine-scheme",
           "_proj",
           "3-bit symmetric GPTQ", engine="vllm"),
    Broken("3-bits-in-sglang", "what an engine supports", "gptq-w3", nothing, "engine-scheme",
           "_proj",
           "3-bit symmetric GPTQ", engine="sglang"),
    Broken("asymmetric-in-vllm", "vllm#38966", "gptq-v2", nothing, "engine-scheme", "_proj",
           "4-bit asymmetric GPTQ", engine="vllm"),
    Broken("asymmetric-in-sglang", "vllm#38966", "gptq-v2", nothing, "engine-scheme", "_proj",
           "4-bit asymmetric GPTQ", engine="sglang"),
    Broken("asymmetric-v2-in-exllama", "vllm#38966", "gptq-v2", nothing, "engine-zeros", "_proj",
           "spoils the neighbours", engine="exllama", severity="warning"),
    Broken("groups-out-of-order", "vllm#7374", "gptq", config(desc_act=True),
           "engine-scheme", "_proj", "desc_act: true", engine="vllm"),
    Broken("order-and-ranks", "vllm#916", "gptq-g64", config(desc_act=True),
           "engine-order", "", "every rank", engine="sglang", tp=2, severity="warning"),
    Broken("awq-in-exllama", "AutoAWQ#217", "awq", nothing, "engine-format", "", "not awq",
           engine="exllama"),
    Broken("awq-in-llama.cpp", "what an engine supports", "awq", nothing, "engine-format", "",
           "reads GGUF only",
           engine="llama.cpp"),
    Broken("gguf-in-vllm", "what an engine supports", "gguf", nothing, "engine-format", "",
           "no GGUF loader",
           engine="vllm"),
    Broken("head-without-key", "llm-compressor#2798", "awq", quantized_head, "engine-head",
           "lm_head",
           "does not say lm_head: true", engine="vllm"),
    Broken("k-scale-lost", "auto-round#2370", "gptq", cache_scales("v_scale"),
           "kv-scales", "self_attn.k_scale", "2 of them are missing"),
    Broken("scales-of-the-cache-lost", "llm-compressor#959", "gptq", cache_scales(),
           "kv-scales", "self_attn.k_scale", "4 of them are missing"),
    Broken("half-of-the-scales-in-vllm", "auto-round#2370", "gptq",
           cache_scales("v_scale", said=False), "engine-kv-cache", "self_attn",
           "only one of k_scale and v_scale", engine="vllm", severity="warning"),
    Broken("scales-of-unknown-names", "vllm#39764", "gptq",
           cache_scales("k_quant_scale", "v_quant_scale", said=False), "engine-kv-cache",
           "k_quant_scale", "knows no scale called", engine="vllm", severity="warning"),
    Broken("trap-in-vllm", "mlp.gate in mlp.gate_proj", "awq",
           config(modules_to_not_convert=["lm_head", "mlp.gate"]), "engine-skip-list",
           "mlp.gate_proj", "has 'mlp.gate'", engine="vllm"),
    Broken("bfloat16-only-model", "vllm#28857", "awq", gemma, "engine-dtype", "",
           "gemma3_text overflows in float16", engine="sglang"),
    Broken("dense-and-not-named", "Model-Optimizer#1173", "gptq", inner_list, "engine-skip-list",
           "layers.1.self_attn.o_proj", "dynamic does not name it", engine="sglang"),
]  # fmt: skip
