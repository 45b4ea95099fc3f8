"""Runs where compressed-tensors is installed: a model with the rotations of a transform_config.

Argument: [folder with config.json, dequantized weights, where logits go, tokens]. Prints the
warnings that reading the table gave.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from compressed_tensors.transform import TransformConfig, apply_transform_config
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    folder, weights, out, tokens = json.loads(sys.argv[1])
    config = json.loads((Path(folder) / "config.json").read_text())
    table = config.pop("quantization_config")["transform_config"]
    kind = config.pop("model_type")
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **config), dtype=torch.float32
    ).eval()
    missing, unexpected = model.load_state_dict(load_file(weights), strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    ids = torch.tensor(tokens)
    with torch.no_grad():
        without = model(ids).logits
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        read = TransformConfig.model_validate(table)
    apply_transform_config(model, read)
    with torch.no_grad():
        found = model(ids).logits
    save_file({"rotated": found.contiguous(), "without": without.contiguous()}, out)
    print()
    print(json.dumps([str(one.message) for one in said]))


main()
