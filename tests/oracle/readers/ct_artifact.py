"""Runs where compressed-tensors is installed: read a pack-quantized artifact.

Argument: [folder, output] as JSON; output gets every matrix in float32 [out, in] by the library's
own unpacking and dequantizing, by its config's arguments.
"""

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file


def main() -> None:
    folder, output = json.loads(sys.argv[1])
    config = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
    (group,) = QuantizationConfig.model_validate(config).config_groups.values()
    args = group.weights
    stored = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        stored |= load_file(file)
    found = {}
    for key in stored:
        name, _, leaf = key.rpartition(".")
        if leaf != "weight_packed":
            continue
        shape = torch.Size(stored[f"{name}.weight_shape"].tolist())
        codes = unpack_from_int32(stored[key], args.num_bits, shape)
        scale = stored[f"{name}.weight_scale"].float()
        zero = stored.get(f"{name}.weight_zero_point")
        if zero is not None:
            zero = unpack_from_int32(zero, args.num_bits, scale.shape, packed_dim=0)
        found[f"{name}.weight"] = dequantize(codes, scale, zero, args=args, dtype=torch.float32)
    save_file(found, output)
    print(len(found))


main()
