"""mlx-lm loads an artifact, in float32: its logits, and what mx.dequantize makes of its codes.

Request: folder, tokens, out (a file of arrays by name), and source where mlx-lm is first to make
the artifact of a checkpoint, with bits (null: plain), group and mode.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

request = json.loads(sys.argv[1])
folder = Path(request["folder"])
if "source" in request:
    model, config = load_model(Path(request["source"]), lazy=True)
    if request["bits"] is not None:
        model, config = quantize_model(
            model, config, request["group"], request["bits"], request["mode"]
        )
    save_model(folder, model)
    save_config(config, folder / "config.json")
model, _ = load_model(folder)
model.set_dtype(mx.float32)
logits = model(mx.array(request["tokens"]))
found = {"logits": np.array(logits)}
for name, module in model.named_modules():
    if hasattr(module, "scales"):
        parts = module.weight, module.scales, module.get("biases")
        how = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        matrix = mx.dequantize(*parts, dtype=mx.float32, **how)
        found[f"{name}.weight"] = np.array(matrix)
np.savez(request["out"], **found)
print(json.dumps(len(found) - 1))
