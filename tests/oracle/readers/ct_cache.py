"""Runs where compressed-tensors is installed: scales of the KV cache as the library places them.

Argument: folders as JSON. Each config goes through the library's parser, with every warning an
error, and is applied to the model that transformers makes of config.json. Prints, for each folder,
the shapes of k_scale and v_scale that it gives the attention layers, by their names.
"""

import json
import sys
import warnings
from pathlib import Path

from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.apply import apply_quantization_config
from transformers import AutoConfig, AutoModelForCausalLM


def one(folder: Path) -> dict[str, list[int]]:
    content = json.loads((folder / "config.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = QuantizationConfig.model_validate(content.pop("quantization_config"))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content))
    apply_quantization_config(model, config)
    return {
        name: list(value.shape)
        for name, value in model.named_parameters()
        if name.endswith(("k_scale", "v_scale"))
    }


print(json.dumps([one(Path(folder)) for folder in json.loads(sys.argv[1])]))
