"""Runs where compressed-tensors is installed: inputs rounded by the library's own emulation.

Argument: [file, output, [[QuantizationArgs, global scale, scale, zero point], ...]] as JSON; `file`
holds x [1, tokens, in], output gets what the library makes of it under each number in the list.
"""

import json
import sys
from types import SimpleNamespace

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from safetensors.torch import load_file, save_file


def main() -> None:
    file, output, wanted = json.loads(sys.argv[1])
    x = load_file(file)["x"]
    found = {}
    for number, (arguments, outer, scale, zero) in enumerate(wanted):
        module = SimpleNamespace(quantization_status=QuantizationStatus.FROZEN)
        for name, value in (("global_scale", outer), ("scale", scale)):
            if value is not None:
                setattr(module, f"input_{name}", torch.tensor([value]))
        if zero is not None:
            module.input_zero_point = torch.tensor([zero], dtype=torch.int8)
        args = QuantizationArgs.model_validate(arguments)
        found[str(number)] = forward_quantize(module, x, "input", args).float().contiguous()
    save_file(found, output)
    print(len(found))


main()
