"""Runs where GPTQModel is installed: load each artifact with its torch kernel, dequantize, save.

Argument: [[artifact, kernel, output], ...] as JSON, kernel "gptq_torch" or "awq_torch"; output gets
every quantized module's weight in float16 as [in, out], which is how these kernels multiply.
"""

import json
import os
import sys

# The kernels compile their unpacking otherwise, which takes a minute and changes nothing.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from gptqmodel import BACKEND, GPTQModel
from safetensors.torch import save_file


def weight(module: torch.nn.Module, kernel: str) -> torch.Tensor:
    """float16 [in, out]"""
    if kernel == "gptq_torch":
        return module.dequantize_weight()
    probe = torch.zeros(1, module.in_features, dtype=torch.float16)
    return module._dequantize_weight_for_inference(probe, dtype=torch.float16)


def main() -> None:
    sizes = {}
    for artifact, kernel, output in json.loads(sys.argv[1]):
        loaded = GPTQModel.load(
            artifact, backend=BACKEND(kernel), device="cpu", dtype=torch.float16
        )
        found = {}
        for name, module in loaded.model.named_modules():
            if hasattr(module, "qweight"):
                found[name] = weight(module, kernel).detach().contiguous()
                assert found[name].dtype == torch.float16, (name, found[name].dtype)
        save_file(found, output)
        sizes[artifact] = len(found)
    print()
    print(json.dumps(sizes))


main()
