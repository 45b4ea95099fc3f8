"""Quantized artifacts that consist of headers: what a config says, over a hole in the disk."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtool.artifacts.artifact import Artifact
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
    """An MLP of integers in a byte each, as compressed-tensors has it."""
    tensors: Tensors = {"model.embed_tokens.weight": ("BF16", (512, 256))}
    for name, rows, columns in MATRICES:
        module = f"model.layers.0.mlp.{name}_proj"
        groups = {"channel": (rows, 1), "tensor": (1,), "group": (rows, columns // 128)}
        tensors |= {
            f"{module}.weight": ("I8", (rows, columns)),
            f"{module}.weight_scale": ("BF16", groups[strategy]),
        }
    return tensors


def floats(strategy: str = "channel", size: int = 128, scales: str = "BF16") -> Tensors:
    """An MLP of FP8, as compressed-tensors has it."""
    tensors: Tensors = {"model.embed_tokens.weight": ("BF16", (512, 256))}
    for name, rows, columns in MATRICES:
        module = f"model.layers.0.mlp.{name}_proj"
        grid = {
            "channel": (rows, 1), "tensor": (1,), "group": (rows, columns // size),
            "block": (rows // size, columns // size),
        }[strategy]  # fmt: skip
        tensors |= {
            f"{module}.weight": ("F8_E4M3", (rows, columns)),
            f"{module}.weight_scale": (scales, grid),
        }
    return tensors


def fours(size: int, scales: str) -> Tensors:
    """An MLP of NVFP4 (16, F8_E4M3) or MXFP4 (32, U8)."""
    tensors: Tensors = {"model.embed_tokens.weight": ("BF16", (512, 256))}
    for name, rows, columns in MATRICES:
        module = f"model.layers.0.mlp.{name}_proj"
        tensors |= {
            f"{module}.weight_packed": ("U8", (rows, columns // 2)),
            f"{module}.weight_scale": (scales, (rows, columns // size)),
        }
        if size == 16:
            tensors[f"{module}.weight_global_scale"] = ("F32", (1,))
    return tensors


def group_config(layout: str, weights: Mapping[str, Any], inputs: Any) -> dict[str, Any]:
    """A config of one group."""
    arguments = {"num_bits": 8, "type": "float", "symmetric": True} | weights
    if isinstance(inputs, Mapping):
        inputs = {"num_bits": 8, "type": "float", "symmetric": True} | inputs
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "quantization_status": "compressed",
    }  # fmt: skip


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


# Floats of compressed-tensors: layout, weights, inputs, tensors; whether vLLM and SGLang refuse.
_NV = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
_MX = {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_BLOCK = {"strategy": "block", "block_structure": [128, 128]}
_ONE = {"strategy": "tensor", "dynamic": False}
_TOKEN = {"strategy": "token", "dynamic": True}
_RUN = {"strategy": "group", "group_size": 128, "dynamic": True}
FLOATS: list[tuple[str, Mapping[str, Any], Any, Tensors, bool, bool]] = [
    ("float-quantized", {"strategy": "tensor"}, _ONE, floats("tensor"), False, False),
    ("float-quantized", {"strategy": "tensor"}, None, floats("tensor"), False, False),
    ("float-quantized", {"strategy": "channel"}, _TOKEN, floats(), False, False),
    ("float-quantized", {"strategy": "channel"}, _RUN, floats(), False, False),
    ("float-quantized", {"strategy": "channel"}, None, floats(), False, False),
    ("float-quantized", _BLOCK, _RUN, floats("block"), False, False),
    ("float-quantized", _BLOCK, _TOKEN, floats("block"), False, False),
    ("float-quantized", _BLOCK, None, floats("block"), False, True),
    ("float-quantized", _RUN | {"dynamic": False}, _TOKEN, floats("group"), True, True),
    ("float-quantized", _RUN | {"dynamic": False}, None, floats("group"), True, True),
    ("mxfp8-quantized", _MX | {"num_bits": 8}, None, floats("group", 32, "U8"), False, True),
    ("nvfp4-pack-quantized", _NV, None, fours(16, "F8_E4M3"), False, False),
    ("nvfp4-pack-quantized", _NV, _NV | {"dynamic": "local"}, fours(16, "F8_E4M3"), False, False),
    ("nvfp4-pack-quantized", _NV, _TOKEN, fours(16, "F8_E4M3"), True, True),
    ("mxfp4-pack-quantized", _MX, None, fours(32, "U8"), False, True),
]
