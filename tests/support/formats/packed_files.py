"""Folders of packed tensors with any dtype, written without the formats under test."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Stored = Mapping[str, tuple[str, NDArray[Any]]]  # name -> dtype of safetensors, array of its bytes


def write(folder: Path, tensors: Stored, config: Mapping[str, Any]) -> Path:
    """model.safetensors and config.json; `config` is the quantization_config."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    whole = {"model_type": "llama", "quantization_config": dict(config)}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def compressed_tensors(layout: str, *groups: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A config with these groups' `weights`; every key `targets` in them is the group's own."""
    table = {}
    for number, weights in enumerate(groups):
        kept = dict(weights)
        targets = kept.pop("targets", ["Linear"])
        table[f"group_{number}"] = {"targets": targets, "weights": kept}
    method = {"quant_method": "compressed-tensors", "format": layout}
    return {**method, "config_groups": table, "ignore": ["lm_head"], **more}
