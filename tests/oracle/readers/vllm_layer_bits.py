"""Runs where vLLM is installed: how many bits its own classes take each layer's weights to have.

Argument: {"config": a quantization config, "layers": [name as vLLM has it, fused, ...]}. Prints the
bits of each, or null where it takes a layer not to be quantized.
"""

import copy
import json
import sys

import torch

PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def main() -> None:
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors as ct
    from vllm.model_executor.layers.quantization.utils import gptq_utils

    request = json.loads(sys.argv[1])
    found = []
    for layer in request["layers"]:
        config = copy.deepcopy(request["config"])
        if config["quant_method"] == "gptq":
            read = AutoGPTQConfig.from_config(config)
            if gptq_utils.get_dynamic_override(read, layer) is False:
                found.append(None)
                continue
            gptq_utils.override_config(read, layer)
            found.append(read.weight_bits)
            continue
        read = ct.CompressedTensorsConfig.from_config(config)
        read.packed_modules_mapping = PARTS
        scheme = read.get_scheme_dict(torch.nn.Linear(1, 1), layer)
        found.append(None if scheme is None else scheme["weights"].num_bits)
    print()
    print(json.dumps(found))


main()
