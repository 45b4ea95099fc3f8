"""Runs where compressed-tensors is installed: read GPTQ tensors as its pack-quantized format.

A symmetric GPTQ `qweight` of 2, 3, 4 or 8 bits without act_order is, transposed, that format's
`weight_packed`. Argument: [file, bits, output] as JSON; output gets, for every module, `codes` int8
[out, in] (signed) and `weight` float32 [out, in] by the library's own unpacking and dequantizing.
"""

import json
import sys

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file


def main() -> None:
    file, bits, output = json.loads(sys.argv[1])
    stored = load_file(file)
    found = {}
    for key in stored:
        name, _, leaf = key.rpartition(".")
        if leaf != "qweight":
            continue
        packed = stored[key].T.contiguous()
        scale = stored[f"{name}.scales"].T.float().contiguous()
        shape = torch.Size((packed.shape[0], stored[f"{name}.g_idx"].numel()))
        codes = unpack_from_int32(packed, bits, shape)
        assert torch.equal(pack_to_int32(codes, bits), packed), name
        args = QuantizationArgs(
            num_bits=bits, symmetric=True, strategy="group", group_size=shape[1] // scale.shape[1]
        )
        found[f"{name}.codes"] = codes
        found[f"{name}.weight"] = dequantize(codes, scale, args=args, dtype=torch.float32)
    save_file(found, output)
    print(len(found) // 2)


main()
