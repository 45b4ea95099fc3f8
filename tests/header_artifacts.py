"""Quantized artifacts that consist of headers: what a config says, over a hole in the disk."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtool.artifact import Artifact
from qtool.formats.safetensors_file import TensorSpec, lay_out

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # name to dtype and shape


def stored(
    folder: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], quantization: Any, **more: Any
) -> Artifact:
    """An artifact of headers."""
    folder.mkdir(exist_ok=True)
    layout = lay_out(
        "model.safetensors", [TensorSpec(n, dtype, shape) for n, (dtype, shape) in tensors.items()]
    )
    with (folder / "model.safetensors").open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.size)
    config = {"num_hidden_layers": 1, "quantization_config": quantization, **more}
    (folder / "config.json").write_text(json.dumps(config))
    return Artifact.open(folder)


def compressed(bits: int = 4, **weights: Any) -> dict[str, Any]:
    arguments = {
        "num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128,
    } | weights  # fmt: skip
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "quantization_status": "compressed",
    }  # fmt: skip


def packed(bits: int, symmetric: bool = True) -> Tensors:
    tensors: Tensors = {
        "model.embed_tokens.weight": ("BF16", (512, 256)),
        "lm_head.weight": ("BF16", (512, 256)),
        "model.norm.weight": ("BF16", (256,)),
    }
    for name, rows, columns in (("gate", 512, 256), ("up", 512, 256), ("down", 256, 512)):
        module = f"model.layers.0.mlp.{name}_proj"
        tensors |= {
            f"{module}.weight_packed": ("I32", (rows, columns * bits // 32)),
            f"{module}.weight_scale": ("BF16", (rows, columns // 128)),
            f"{module}.weight_shape": ("I64", (2,)),
        }
        if not symmetric:
            tensors[f"{module}.weight_zero_point"] = ("I32", (rows * bits // 32, columns // 128))
    return tensors


def plain(strategy: str = "channel") -> Tensors:
    """An MLP of whole numbers in a byte each, as compressed-tensors has it."""
    tensors: Tensors = {"model.embed_tokens.weight": ("BF16", (512, 256))}
    for name, rows, columns in MATRICES:
        module = f"model.layers.0.mlp.{name}_proj"
        groups = {"channel": (rows, 1), "tensor": (1,), "group": (rows, columns // 128)}
        tensors |= {
            f"{module}.weight": ("I8", (rows, columns)),
            f"{module}.weight_scale": ("BF16", groups[strategy]),
        }
    return tensors


MATRICES = (("gate", 512, 256), ("up", 512, 256), ("down", 256, 512))


def gptq(bits: int = 4) -> Tensors:
    """An MLP of GPTQ, in groups of 128."""
    tensors: Tensors = {"model.embed_tokens.weight": ("F16", (512, 256))}
    for name, rows, columns in MATRICES:
        module = f"model.layers.0.mlp.{name}_proj"
        tensors |= {
            f"{module}.qweight": ("I32", (columns * bits // 32, rows)),
            f"{module}.qzeros": ("I32", (columns // 128, rows * bits // 32)),
            f"{module}.scales": ("F16", (columns // 128, rows)),
            f"{module}.g_idx": ("I32", (columns,)),
        }
    return tensors


def awq() -> Tensors:
    """An MLP of AWQ, in groups of 128."""
    tensors: Tensors = {"model.embed_tokens.weight": ("F16", (512, 256))}
    for name, rows, columns in MATRICES:
        module = f"model.layers.0.mlp.{name}_proj"
        tensors |= {
            f"{module}.qweight": ("I32", (columns, rows // 8)),
            f"{module}.qzeros": ("I32", (columns // 128, rows // 8)),
            f"{module}.scales": ("F16", (columns // 128, rows)),
        }
    return tensors
