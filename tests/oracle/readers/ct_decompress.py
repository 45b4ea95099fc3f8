"""Runs where compressed-tensors is installed: read whole artifacts as the library does.

Argument: [[folder, output], ...] as JSON. The config goes through the library's own parser and that
of transformers, with every warning an error. Each matrix is matched to its group by the library,
which must infer the format that the group names, and decompressed by it. output gets `weight` of
each quantized module in the dtype that the library gives it.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization
from compressed_tensors.utils.match import is_match, match_targets
from safetensors.torch import load_file, save_file
from transformers.utils.quantization_config import CompressedTensorsConfig

PACKED = ("weight_packed", "weight")


def one(folder: Path, output: str) -> dict[str, int]:
    given = json.loads((folder / "config.json").read_text())["quantization_config"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = QuantizationConfig.model_validate(given)
        CompressedTensorsConfig(**given)
    kept = config.model_dump(exclude_none=True)
    for key in ("quant_method", "format", "ignore"):
        assert kept[key] == given[key], key
    by_target = {t: s for s in config.config_groups.values() for t in s.targets}
    stored = load_file(folder / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    formats: dict[str, int] = {}
    seen: set[str] = set()
    for key in stored:
        name, _, last = key.rpartition(".")
        if last not in PACKED or f"{name}.weight_scale" not in stored:
            continue
        module = torch.nn.Linear(1, 1)
        assert not is_match(name, module, config.ignore), name
        scheme = by_target[match_targets(name, module, by_target)[0]]
        assert infer_module_format(torch.nn.Linear, scheme) == scheme.format, name
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        names = compressor.compression_param_names(scheme)
        there = {k.removeprefix(f"{name}.") for k in stored if k.startswith(f"{name}.")}
        inputs = scheme.input_activations
        kind = None if inputs is None else inputs.dynamic
        static = {False: {"input_scale"}, "local": {"input_global_scale"}}.get(kind, set())
        assert there - {"bias"} == {*names, *static}, (name, there, names)
        for last in static:
            group = inputs.group_size or 1
            module = torch.nn.Linear(group, group)
            initialize_module_for_quantization(module, scheme, force_zero_point=False)
            theirs, ours = getattr(module, last), stored[f"{name}.{last}"]
            assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype), (name, last)
        state = {last: stored[f"{name}.{last}"] for last in names}
        found[name] = compressor.decompress(state, scheme)["weight"].contiguous()
        formats[scheme.format] = formats.get(scheme.format, 0) + 1
        seen.add(name)
    for name in config.ignore:
        assert name not in seen
    save_file(found, output)
    return formats


print(json.dumps([one(Path(folder), output) for folder, output in json.loads(sys.argv[1])]))
