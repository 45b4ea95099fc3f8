"""The formats of quantized safetensors checkpoints, and which of them a config speaks of."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from qtool.formats import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    dense,
    fp8,
    gptq,
    mlx,
    modelopt,
    mxfp4,
    qserve,
)
from qtool.formats.facts import ArtifactScheme

_MODULES = (
    awq, gptq, compressed_tensors, fp8, modelopt, bitsandbytes, qserve, mlx, mxfp4, dense,
)  # fmt: skip
FORMATS: dict[str, ModuleType] = {module.NAME: module for module in _MODULES}

# Recognised by name, not decoded by this version.
_NAMED = {
    "hqq": "hqq",
    "quanto": "quanto",
    "torchao": "torchao",
    "eetq": "eetq",
    "aqlm": "aqlm",
    "quark": "quark",
    "exl3": "exl3",
}


def detect(config: Mapping[str, Any]) -> ArtifactScheme:
    """What a quantization_config says; {} is dense, an unknown method is passed on by name."""
    for module in (*FORMATS.values(), auto_round):
        found: ArtifactScheme | None = module.detect(config)
        if found is not None:
            return found
    method = str(config.get("quant_method") or "unknown").lower()
    name = _NAMED.get(method, method)
    inner = config.get("format") or config.get("quant_algo") or ""
    dense_names = next(
        (
            tuple(n for n in config[key] if isinstance(n, str))
            for key in ("ignore", "modules_to_not_convert", "ignored_layers")
            if isinstance(config.get(key), list)
        ),
        (),
    )
    return ArtifactScheme(name, name, None, str(inner), dense_names)
