"""Runs where vLLM is installed: what its own classes make of quantization configs.

Argument: a list of quantization configs. Prints for each [refused, skipped]: whether reading it
fails or no class multiplies such inputs with such weights, and whether the gate and up projection
of an MLP would be left unquantized or refused.
"""

import copy
import json
import sys
from unittest.mock import MagicMock

LAYER = "model.layers.0.mlp.gate_up_proj"
PARTS = {"gate_up_proj": ["gate_proj", "up_proj"]}


def main() -> None:
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors as ct
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import (
        should_ignore_layer,
    )
    from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    classes = {
        "awq": AutoAWQConfig,
        "gptq": AutoGPTQConfig,
        "compressed-tensors": ct.CompressedTensorsConfig,
    }

    def skipped(method: str, read: object, config: dict) -> bool:
        try:
            if method == "gptq":
                return get_dynamic_override(read, LAYER) is False
            if method == "awq":
                names = config.get("modules_to_not_convert") or []
                return is_layer_skipped(LAYER, names, PARTS, match_mode="substring")
            return should_ignore_layer(LAYER, config.get("ignore", []), PARTS)
        except ValueError:  # some parts, but not all
            return True

    # Which class is chosen is asked, not what it needs of a running engine.
    for name in vars(ct):
        if name.startswith("CompressedTensorsW"):
            setattr(ct, name, MagicMock())

    def kernel(read: object) -> None:
        for group in read.target_scheme_map.values():
            read._get_scheme_from_parts(
                group["weights"], group["input_activations"], format=group.get("format")
            )

    answers = []
    for config in json.loads(sys.argv[1]):
        method = config["quant_method"]
        try:
            read = classes[method].from_config(copy.deepcopy(config))
            if method == "compressed-tensors":
                kernel(read)
        except (ValueError, NotImplementedError, AssertionError, AttributeError):
            answers.append([True, False])
            continue
        answers.append([False, skipped(method, read, config)])
    print()
    print(json.dumps(answers))


main()
