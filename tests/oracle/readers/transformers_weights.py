"""Runs where transformers can load an artifact: its weights after a forward pass.

Argument: [[folder, dtype, output], ...] as JSON; output gets every projection's weight.
"""

import json
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

for folder, dtype, output in json.loads(sys.argv[1]):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.no_grad():  # where weights are decompressed when they are first used
        model(torch.arange(32)[None])
    state = model.state_dict()
    save_file({k: v.clone() for k, v in state.items() if k.endswith("proj.weight")}, output)
print("{}")
