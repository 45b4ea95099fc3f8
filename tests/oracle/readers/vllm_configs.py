"""Runs where vLLM is installed: what its own classes make of quantization configs.

Argument: a list of quantization configs. Prints for each [refused, skipped]: whether reading it
fails or no class multiplies such inputs with such weights, and whether the gate and up projection
of an MLP would be left unquantized or refused.
"""

import copy
import json
import sys
from unittest.mock import MagicMock

LAYER, DOWN = "model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj"
PARTS = {"gate_up_proj": ["gate_proj", "up_proj"]}


def main() -> None:
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors as ct
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import (
        should_ignore_layer,
    )
    from vllm.model_executor.layers.quantization.inc.inc import INCConfig
    from vllm.model_executor.layers.quantization.inc.schemes import inc_wna16_scheme
    from vllm.model_executor.layers.quantization.inc.schemes.factory import resolve_scheme
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    classes = {
        "awq": AutoAWQConfig,
        "gptq": AutoGPTQConfig,
        "compressed-tensors": ct.CompressedTensorsConfig,
        "auto-round": INCConfig,
    }
    # Linear layers of AutoRound are asked for their kernels, on a GPU of NVIDIA's.
    gpu = MagicMock()
    gpu.is_cpu.return_value = gpu.is_xpu.return_value = gpu.is_rocm.return_value = False
    gpu.get_device_capability.return_value.to_int.return_value = 80
    inc_wna16_scheme.current_platform = marlin_utils.current_platform = gpu
    inc_wna16_scheme._build_humming_linear_method = MagicMock()  # a package of its own

    def skipped(method: str, read: object, config: dict) -> bool:
        try:
            if method == "gptq":
                return get_dynamic_override(read, LAYER) is False
            if method == "awq":
                names = config.get("modules_to_not_convert") or []
                return is_layer_skipped(LAYER, names, PARTS, match_mode="substring")
            if method == "auto-round":
                read.packed_modules_mapping = PARTS
                return not read.config_parser.resolve(MagicMock(), LAYER).quantized
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
            if method == "auto-round":
                chosen = read.config_parser.resolve(MagicMock(), DOWN)
                if chosen.quantized:
                    resolve_scheme(chosen).get_linear_method(read, MagicMock(), DOWN, chosen)
        except (ValueError, NotImplementedError, AssertionError, AttributeError):
            answers.append([True, False])
            continue
        answers.append([False, skipped(method, read, config)])
    print()
    print(json.dumps(answers))


main()
