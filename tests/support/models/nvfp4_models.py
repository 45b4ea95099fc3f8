"""Small models in NVFP4, and GGUF files of them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from qtool.hub import resolve
from support.runs import quantizing

SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "head_dim": 16,
}  # fmt: skip


def model(kind: str, folder: Path, **settings: Any) -> Path:
    """A checkpoint of random numbers."""
    config = getattr(transformers, f"{kind}Config")(**SIZES | settings)
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    made.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((resolve("tiny") / name).read_bytes())
    return folder


def rounded(source: Path, out: Path, recipe: str = "nvfp4", *sets: str) -> Path:
    return quantizing.quantize(source, recipe, out, *sets).out


def their_numbers(file: Path) -> dict[str, NDArray[np.float32]]:
    """As gguf-py dequantizes blocks, each expert's matrix times its second scale."""
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    values = {}
    for name, tensor in found.items():
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        scale = found.get(name.replace(".weight", ".scale"))
        if tensor.tensor_type == gguf.GGMLQuantizationType.NVFP4 and scale is not None:
            shape = (-1,) + (1,) * (numbers.ndim - 1)
            numbers = numbers * scale.data.reshape(shape if numbers.ndim > 2 else (1, 1))
        values[name] = numbers
    return values
