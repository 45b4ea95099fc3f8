"""Runs where SGLang is installed: what its own classes make of quantization configs.

Argument: [configs, groups of compressed-tensors for experts with their layouts, cache schemes].
Prints for each config [refused, skipped]: whether reading it fails or no class multiplies such
inputs with such weights, and whether the gate and up projection of an MLP would be left
unquantized or refused; for each group whether experts of it are refused; and for each scheme
whether scales of keys and values are loaded.

As on a GPU of compute capability 8.0, which need not be there; nor need SGLang's own kernels.
"""

import copy
import importlib.abc
import importlib.machinery
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

LAYER, DOWN = "model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj"
PARTS = {"gate_up_proj": ["gate_proj", "up_proj"]}
ABSENT = ("torchvision", "sgl_kernel", "flashinfer", "decord", "av", "librosa")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages that are imported beside these classes, and not used by them."""

    def find_spec(self, name: str, path: object, target: object = None) -> object:
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> object:
        made = MagicMock(name=spec.name)
        made.__path__, made.__spec__, made.__name__ = [], spec, spec.name
        return made

    def exec_module(self, module: object) -> None:
        pass


def main() -> None:
    from transformers import AutoImageProcessor, AutoProcessor  # noqa: F401  before Absent
    from transformers.image_processing_utils import BaseImageProcessor  # noqa: F401

    sys.meta_path.insert(0, Absent())
    import torch
    from sglang.srt.layers import quantization
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization import auto_round, marlin_utils
    from sglang.srt.layers.quantization.awq import awq
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors as ct
    from sglang.srt.layers.quantization.compressed_tensors.utils import should_ignore_layer
    from sglang.srt.layers.quantization.gptq import gptq
    from sglang.srt.layers.quantization.utils import get_dynamic_override

    for module in (marlin_utils, auto_round):
        for name in ("_is_cpu", "_is_npu", "_is_hip"):
            if hasattr(module, name):
                setattr(module, name, False)
    marlin_utils.get_device_capability = lambda *_: (8, 0)
    awq._is_cuda, awq._is_npu = True, False
    # Which integers the kernel of compressed-tensors' linear layers is made for.
    package = Path(quantization.__file__).parents[3]
    source = (package / "kernels/jit/csrc/gemm/marlin/gptq_marlin.cuh").read_text()
    made_for = {name.lower() for name in re.findall(r"COMMON_GET_IF\(host::k(\w+)\)", source)}
    # "gptq" is for CPUs and other GPUs than NVIDIA's where it is there.
    plain_gptq = "gptq" in quantization.BASE_QUANTIZATION_METHODS and not quantization.is_cpu()

    for name in vars(ct):  # which is chosen is asked, not what it needs of a running engine
        if name.startswith("CompressedTensorsW") and name != "CompressedTensorsWNA16":
            chosen = MagicMock(get_min_capability=lambda: 0, return_value=name)
            setattr(ct, name, chosen)
    ct.CompressedTensorsConfig._check_scheme_supported = lambda *_, **__: True
    ct.get_fp4_gemm_runner_backend = lambda: SimpleNamespace(is_marlin=lambda: False)
    no = SimpleNamespace(
        is_auto=lambda: False, is_triton=lambda: False, is_flashinfer_trtllm=lambda: False
    )
    ct.get_moe_runner_backend = lambda: no

    def linear(read: object) -> None:
        for group in read.target_scheme_map.values():
            found = read._get_scheme_from_parts(
                group["weights"], group["input_activations"], format=group.get("format")
            )
            layout = group.get("format") or read.quant_format
            if isinstance(found, ct.CompressedTensorsWNA16):
                bits = group["weights"].num_bits
                kind = f"u{bits}b{1 << bits - 1}" if found.symmetric else f"u{bits}"
                assert kind in made_for and found.group_size in (-1, 32, 64, 128)
            else:  # whose parameters are not those of packed weights
                assert layout != "pack-quantized"

    class FusedMoE(torch.nn.Module):
        pass

    def experts(group: dict, layout: str) -> None:
        config = {"format": layout, "config_groups": {"group_0": group | {"targets": ["Linear"]}}}
        read = ct.CompressedTensorsConfig.from_config(config)
        scheme = read.get_moe_scheme(FusedMoE(), "model.layers.0.mlp.experts")
        if scheme == "CompressedTensorsWNA16MoE":  # its own check, and zeros in AWQ's order
            weights = read.target_scheme_map["Linear"]["weights"]
            assert layout == "pack-quantized" and weights.symmetric and weights.num_bits in (4, 8)

    layer = MagicMock(spec=LinearBase)

    def read_as(method: str, config: dict) -> object:
        if method == "awq":
            return awq.AWQConfig.from_config(config)
        if method == "gptq":
            marlin = gptq.GPTQMarlinConfig
            assert plain_gptq or marlin.is_gptq_marlin_compatible(config)
            return marlin.from_config(config)
        if method == "auto-round":
            read = auto_round.AutoRoundConfig.from_config(config)
            read.packed_modules_mapping = PARTS
            found = read.get_quant_method(layer, DOWN)
            if isinstance(found, gptq.GPTQLinearMethod):
                found.quant_config.get_linear_scheme(layer)
            return read
        read = ct.CompressedTensorsConfig.from_config(config)
        linear(read)
        return read

    def skipped(method: str, read: object, config: dict) -> bool:
        try:
            if method == "gptq":
                return get_dynamic_override(read, LAYER) is False
            if method == "awq":
                return awq.is_layer_skipped_awq(LAYER, read.modules_to_not_convert)
            if method == "auto-round":
                return read.get_layer_config(layer, LAYER)[0] >= 16
            # Most classes, Llama's too, have no list of what they fuse.
            return should_ignore_layer(LAYER, config.get("ignore", []), {})
        except ValueError:  # some parts, but not all
            return True

    refusals = (
        ValueError, NotImplementedError, AssertionError, AttributeError, RuntimeError, ImportError,
    )  # fmt: skip

    def tried(ask: object, *given: object) -> bool:
        try:
            ask(*given)
        except refusals:
            return True
        return False

    configs, groups, schemes = json.loads(sys.argv[1])
    answers = []
    for config in configs:
        method = config["quant_method"]
        try:
            read = read_as(method, copy.deepcopy(config))
        except refusals:
            answers.append([True, False])
            continue
        answers.append([False, skipped(method, read, config)])
    refused = [tried(experts, group, layout) for group, layout in groups]
    loaded = [ct.CompressedTensorsKVCacheMethod.is_supported_scheme(one) for one in schemes]
    print()
    print(json.dumps([answers, refused, loaded]))


main()
