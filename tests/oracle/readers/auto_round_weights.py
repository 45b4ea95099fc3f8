"""Runs where AutoRound is installed: quantize a model without iterations, and dequantize it.

Argument: {"model": folder, "out": folder, "cases": {name: [arguments of AutoRound, format]}} as
JSON. Each artifact is made in out/name; out/name.safetensors gets, of every quantized module, by
AutoRound's own torch layers: `weight`, float16 [in, out]; `steps`, code - zero, and `zero`, [in,
out], the same layer with scales of 1, and with codes of 0 too. Prints where the artifacts are.
"""

import json
import sys
from pathlib import Path

import torch
from auto_round import AutoRound
from auto_round.export.export_to_awq.utils import dequantize_gemm
from auto_round_extension.torch.qlinear_torch import QuantLinear
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as LessOne
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

NAMES = ("qweight", "qzeros", "scales")


def config_of(config: dict, module: str) -> dict:
    return {**config, **config.get("extra_config", {}).get(module, {})}


def dense(packing: str, config: dict, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """[in, out] in float32, as the layer multiplies it."""
    bits, size = config["bits"], config["group_size"]
    if "awq" in packing:
        columns = tensors["qweight"].shape[0]
        return dequantize_gemm(*tensors.values(), bits, size if size > 0 else columns).float()
    columns, rows = tensors["qweight"].shape[0] * 32 // bits, tensors["scales"].shape[1]
    kind = LessOne if packing == "auto_round:auto_gptq" else QuantLinear
    layer = kind(bits, size, columns, rows, False)
    layer.load_state_dict(tensors)
    return layer(torch.eye(columns))


def seen(artifact: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in artifact.glob("*.safetensors"):
        tensors |= load_file(file)
    config = json.loads((artifact / "config.json").read_text())["quantization_config"]
    packing, found = config["packing_format"], {}
    for name in tensors:
        if not name.endswith(".qweight"):
            continue
        module = name.removesuffix(".qweight")
        own = config_of(config, module)
        stored = {last: tensors[f"{module}.{last}"] for last in NAMES}
        ones = {**stored, "scales": torch.ones_like(stored["scales"])}
        empty = {**ones, "qweight": torch.zeros_like(stored["qweight"])}
        found[f"{module}.weight"] = dense(packing, own, stored).half().contiguous()
        found[f"{module}.steps"] = dense(packing, own, ones).half().contiguous()
        found[f"{module}.zero"] = -dense(packing, own, empty).half().contiguous()
    return found


def main() -> None:
    request = json.loads(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    text = [torch.arange(16 * n, 16 * n + 64)[None] for n in range(2)]
    places = {}
    for name, (arguments, packing) in request["cases"].items():
        model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.bfloat16)
        run = AutoRound(
            model, tokenizer, iters=0, nsamples=2, seqlen=64, dataset=text, device_map="cpu",
            **arguments,
        )  # fmt: skip
        out = Path(request["out"]) / name
        run.quantize_and_save(str(out), format=packing)
        (config,) = out.rglob("config.json")
        places[name] = str(config.parent)
        save_file(seen(config.parent), Path(request["out"]) / f"{name}.safetensors")
    print()
    print(json.dumps(places))


main()
