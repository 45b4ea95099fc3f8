"""Runs where bitsandbytes and transformers are installed: load an int8 artifact on the CPU.

Argument: [folder, tokens, output] as JSON; tokens are lists of ids. output gets `weight` of every
Linear8bitLt in float32, as the library dequantizes it, `input` and `output` of each, the input made
up, float32 and with outliers, and `logits`, of layers in bfloat16. Warnings of transformers about
tensors that are missing or not used fail.
"""

import json
import sys

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import int8_vectorwise_dequant
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def main() -> None:
    folder, tokens, output = json.loads(sys.argv[1])
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[key], (key, sorted(info[key])[:5])
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear8bitLt):
            weight = module.weight
            assert weight.dtype == torch.int8 and module.state.threshold == 6.0, name
            found[f"{name}.weight"] = int8_vectorwise_dequant(weight.data, weight.SCB).float()
    layers = len(found)
    for name in [name.removesuffix(".weight") for name in found]:
        module = model.get_submodule(name)
        x = torch.randn(16, module.in_features, generator=torch.Generator().manual_seed(len(found)))
        x[:, 5] *= 20.0
        x[3, 9] = 7.0
        far = (x.abs() >= 6.0).any(0)  # what is not rounded to int8 stays in the input's own dtype
        x[:, far] = x[:, far].half().float()
        found[f"{name}.input"] = x
        with torch.no_grad():
            found[f"{name}.output"] = module(x.clone())
    with torch.no_grad():
        found["logits"] = model(input_ids=torch.tensor(tokens)).logits.float()
    save_file({name: value.contiguous() for name, value in found.items()}, output)
    print(layers)


main()
