"""The shipped model with its four blocks over and over, for what has to take many of them."""

import json
from pathlib import Path

import memory
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from qtool.checkpoints.checkpoint import Checkpoint

DEEP = 24


def deep(folder: Path) -> Path:
    """The shipped model with its blocks repeated; what they add to the stream is made smaller."""
    config = json.loads((memory.TINY / "config.json").read_text(encoding="utf-8"))
    count = config["num_hidden_layers"]
    source = _float32(memory.TINY)  # numpy has no bfloat16
    found = {name: value for name, value in source.items() if ".layers." not in name}
    for layer in range(DEEP):
        prefix = f"model.layers.{layer % count}."
        for name in (name for name in source if name.startswith(prefix)):
            value = source[name]
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value = value * np.float32(count / DEEP)
            found[f"model.layers.{layer}.{name.removeprefix(prefix)}"] = value
    folder.mkdir(parents=True)
    save_file(found, folder / "model.safetensors")
    return memory.add_files(
        folder, config | {"num_hidden_layers": DEEP, "dtype": "float32", "torch_dtype": "float32"}
    )


def _float32(folder: Path) -> dict[str, NDArray[np.float32]]:
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.float32(name) for name in checkpoint.tensors}
