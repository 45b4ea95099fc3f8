"""What the JSON of a folder says of how its tensors are quantized; what they tell without."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import FormatError
from qtool.formats import ArtifactScheme, detect, gptq
from qtool.formats import safetensors_file as st
from qtool.formats.mlx import is_mlx
from qtool.scheme import Scheme

CONFIG = "config.json"
# Keys of config.json that say how tensors are quantized; the last two are of mlx-lm and of DeepSeek
# V4's experts.
_QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization", "expert_dtype")
# Where a quantization_config may lie beside config.json, and the key it has there.
_CONFIG_FILES = (
    ("quantize_config.json", None),
    ("quant_config.json", None),
    ("hf_quant_config.json", "quantization"),
)


def quantization_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The quantization_config from config.json or, without one, from the files beside it."""
    return _config_in(checkpoint)[1]


def detected(checkpoint: Checkpoint) -> ArtifactScheme:
    """What that says; FormatError with its file where it makes no sense."""
    file, config = _config_in(checkpoint)
    try:
        return detect(config)
    except FormatError as error:
        said = str(error).removeprefix("" if file == CONFIG else "quantization_config: ")
        raise FormatError(
            f"{checkpoint.folder / file}: {said}; put back what the artifact was made with"
        ) from None


def _config_in(checkpoint: Checkpoint) -> tuple[str, Mapping[str, Any]]:
    """The same with the name of the file."""
    # mlx-lm's own key, which it asks first, and newer files repeat as quantization_config.
    own = checkpoint.config.get("quantization")
    if isinstance(own, dict) and is_mlx(own):
        return CONFIG, own
    inner = checkpoint.config.get("text_config")
    for config in (checkpoint.config, inner if isinstance(inner, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            found = config.get(key)
            if isinstance(found, dict) and found:
                return CONFIG, found
    for file, inside in _CONFIG_FILES:
        path = checkpoint.folder / file
        if checkpoint.config.get("quantization_config") is None and path.is_file():
            content = st.read_json(path)
            if inside is not None:
                nested = content.get(inside)
                own = nested if isinstance(nested, dict) else {}
                return file, {"quant_method": "modelopt", **own}
            return file, content
    return CONFIG, {}


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the unquantized model."""
    plain = {key: value for key, value in config.items() if key not in _QUANTIZATION_KEYS}
    inner = plain.get("text_config")
    if isinstance(inner, dict):
        plain["text_config"] = plain_config(inner)
    return plain


def guessed(checkpoint: Checkpoint, module: str) -> ArtifactScheme:
    """AWQ or GPTQ without a config: the shapes of one module tell them apart."""
    tensors = checkpoint.tensors
    weight, scales = tensors[f"{module}.qweight"], tensors.get(f"{module}.scales")
    zeros = tensors.get(f"{module}.qzeros")
    where = f"{checkpoint.path}: quantized ({module}.qweight), but no config says how"
    if scales is None or zeros is None or not len(weight.shape) == len(scales.shape) == 2:
        raise FormatError(f"{where}; expected config.json beside it")
    groups, rows = scales.shape
    if weight.shape[1] * 8 == rows and groups and weight.shape[0] % groups == 0:
        size = weight.shape[0] // groups
        return ArtifactScheme("awq", "awq", Scheme(4, -1 if groups == 1 else size, False), "gemm")
    if weight.shape[1] == rows and groups:
        # Without a config nothing tells v1 from v2; v1 is what most files are.
        rough = ArtifactScheme("gptq", "gptq", Scheme(4, -1, False), "v1")
        scheme, _ = gptq.scheme_in(module, tensors.get, rough)
        return replace(rough, scheme=scheme)
    raise FormatError(f"{where}, and its shapes are neither AWQ's nor GPTQ's")
