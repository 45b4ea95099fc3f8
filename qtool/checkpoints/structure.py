"""The decoder blocks of a checkpoint, told from the names of its tensors and config.json alone.

The decoder is the numbered list of modules (`model.layers.0.`, `transformer.h.0.`, ...) that
holds the most parameters. No table of architectures: an unknown one is read the same way.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from qtool.errors import SourceError, UnsupportedError
from qtool.formats.layer_names import FUSED, experts_of
from qtool.formats.safetensors_file import FLOAT_DTYPES, TensorInfo

_INDEXED = re.compile(r"(.+?)\.(\d{1,6})\.(.+)")
# Towers that see, hear, paint or speak, and what leads from them to the decoder; they can be larger
# than a small decoder beside them.
OTHER_TOWERS = re.compile(
    r"vision|visual|image|audio|speech|\bvit\b|\bvq|projector|aligner|talker|2wav"
    r"|encoder(?!.*decoder)",
    re.IGNORECASE,
)
# Blocks of multi-token prediction, where they have a list of their own.
AHEAD = re.compile(r"(^|\.)(mtp|nextn|draft)")
# The first counts blocks, where the second counts how often blocks run.
_COUNT_KEYS = ("num_layers_per_stack", "num_hidden_layers", "n_layer", "num_layers", "n_layers")
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
NAMELESS = (
    "config.json has neither model_type nor architectures, so no engine knows which model it is"
)
_TIED = "tie_word_embeddings"
# Of GPTQ and AWQ, compressed-tensors, HQQ, Quanto.
_CODES = ("qweight", "weight_packed", "W_q", "_data")

_FUSED_AS = {part: "+".join(parts) for _, parts in FUSED for part in parts}


@dataclass(frozen=True)
class BlockStack:
    """The decoder blocks `prefix.0` to `prefix.(count - 1)`."""

    prefix: str
    count: int

    def __str__(self) -> str:
        return f"{self.prefix}.0-{self.count - 1}"


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the language model; one that is empty does not."""
    for key in _TEXT_CONFIGS:
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            return text_config(inner)
    return config


def names_model(config: Mapping[str, Any]) -> bool:
    """Whether config.json says of which kind the model is, as engines look for."""
    return any(config.get(key) for key in ("model_type", "architectures"))


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json that says that the output head is a matrix of its own."""
    made: dict[str, Any] = copy.deepcopy(dict(config))
    made[_TIED] = False
    inner = text_config(made)
    if isinstance(inner, dict) and _TIED in inner:
        inner[_TIED] = False
    return made


def without_float64(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of what has F32 in the place of F64: engines take its dtype for the model's."""
    keys, names = ("dtype", "torch_dtype"), ("float64", "double", "torch.float64")
    found: dict[str, Any] = {
        k: "float32" if k in keys and v in names else v for k, v in config.items()
    }
    for key in _TEXT_CONFIGS:
        inner = found.get(key)
        if isinstance(inner, Mapping):
            found[key] = without_float64(inner)
    return found


def past_positions(config: Mapping[str, Any], length: int, what: str) -> str | None:
    """A warning where text is longer than the model was made for, in tokens; else None."""
    most = text_config(config).get("max_position_embeddings")
    if type(most) is not int or not 0 < most < length:
        return None
    return (
        f"{what} of {length} tokens, and config.json says that the model has {most} positions "
        "(max_position_embeddings): what it computes beyond them may mean little; give a smaller "
        "--length"
    )


def layer_count(config: Mapping[str, Any]) -> int | None:
    """How many decoder blocks the model class runs, where config.json says it."""
    text = text_config(config)
    for key in _COUNT_KEYS:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def empty_blocks(config: Mapping[str, Any]) -> set[int]:
    """Blocks without a tensor: DeciLM's that have neither attention nor an MLP, which hand on what
    they are given."""
    blocks = text_config(config).get("block_configs")
    return {
        number
        for number, one in enumerate(blocks if isinstance(blocks, list) else [])
        if isinstance(one, Mapping)
        and all(
            isinstance(part := one.get(name), Mapping) and part.get("no_op") is True
            for name in ("attention", "ffn")
        )
    }


def active_share(config: Mapping[str, Any]) -> float:
    """The share of a block's experts that one token visits; 1 where config.json does not say."""
    text = text_config(config)

    def number(*keys: str) -> int:
        return next((text[key] for key in keys if isinstance(text.get(key), int)), 0)

    total = number("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    visited = number("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts")
    return min(1.0, visited / total) if visited > 0 and total > 0 else 1.0


def find_blocks(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> BlockStack:
    """The decoder stack. SourceError where nothing is numbered."""
    sizes: dict[str, int] = defaultdict(int)
    last: dict[str, int] = defaultdict(int)
    for name, info in tensors.items():
        if found := _INDEXED.match(name):
            sizes[found[1]] += prod(info.shape)
            last[found[1]] = max(last[found[1]], int(found[2]))
    text = {prefix: size for prefix, size in sizes.items() if not OTHER_TOWERS.search(prefix)}
    candidates = text or sizes
    if not candidates:
        raise SourceError(
            "no numbered decoder blocks among the tensors (such as model.layers.0.*); "
            "is this a decoder language model?"
        )
    prefix = max(candidates, key=lambda key: candidates[key])
    found_count = last[prefix] + 1
    return BlockStack(prefix, min(found_count, layer_count(config) or found_count))


def packed(tensors: Mapping[str, TensorInfo]) -> str | None:
    """The first tensor of codes, by its name or its type, and where its scales are; None where
    there is none. A config.json need not say so."""
    for name, info in tensors.items():
        if _holds_codes(name, info):
            module = name.rpartition(".")[0]
            beside = (f"{name}_scale_inv", f"{name}_scale", f"{name}.absmax")
            named = (*beside, *(f"{module}.{last}" for last in ("weight_scale", "scales", "SCB")))
            scales = next((f", with scales in {s}" for s in named if s in tensors), "")
            return f"{name}, {info.dtype} {list(info.shape)}, holds codes{scales}"
    return None


def _holds_codes(name: str, info: TensorInfo) -> bool:
    last = name.rpartition(".")[2]
    if last in _CODES:
        return True
    if len(info.shape) < 2 or info.dtype in FLOAT_DTYPES:
        return False
    return last == "weight" or (info.dtype.startswith(("F8", "F6", "F4")) and "scale" not in last)


def _mxfp4(tensors: Mapping[str, TensorInfo]) -> str | None:
    """The first blocks of MXFP4, as gpt-oss was trained; None where there are none."""
    for name, info in tensors.items():
        scales = name.removesuffix("_blocks") + "_scales"
        if name.endswith("_blocks") and info.dtype == "U8" and scales in tensors:
            return f"{name}, {info.dtype} {list(info.shape)}, is in MXFP4, with scales in {scales}"
    return None


def check_source(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> None:
    """Refuse what is no float checkpoint of linear layers: quantized already, or Conv1D."""
    quantization = config.get("quantization_config") or text_config(config).get(
        "quantization_config"
    )
    found = packed(tensors) or _mxfp4(tensors)
    way = "from what `qtool convert MODEL --to hf` makes of it"
    if isinstance(quantization, Mapping):
        mlx = "bits" in quantization and "quant_method" not in quantization
        method = "mlx" if mlx else quantization.get("quant_method", "unknown method")
        found = f"config.json: quant_method {method}"
        if method != "mxfp4":
            way = f"from this one (`qtool quantize` with --requantize), or {way}"
    elif found is not None:
        way += ", which needs its quantization_config"
    if found is not None:
        raise UnsupportedError(
            f"the model is already quantized ({found}); start from the original in float16, "
            f"bfloat16 or float32 or, where there is none, {way}"
        )
    for name, info in tensors.items():
        if name.endswith(".weight") and len(info.shape) == 2 and info.shape[0] != info.shape[1]:
            bias = tensors.get(name.removesuffix("weight") + "bias")
            if bias is not None and bias.shape == info.shape[1:]:
                raise UnsupportedError(
                    f"{name} {list(info.shape)} is a Conv1D, stored [in, out] as GPT-2 does; "
                    "recipes of safetensors quantize linear layers stored [out, in]; GGUF recipes "
                    "that round to nearest, such as q4_k_m, take it"
                )


def expert_of(name: str) -> int | None:
    """The number of the expert that a tensor belongs to."""
    found = experts_of(name)
    return None if found is None else found[1]


def fused_layer(name: str) -> str:
    """The layer of experts that a 3-D tensor belongs to: `...experts`, or else the module."""
    parts = name.removesuffix(".weight").split(".")
    return ".".join(parts[: parts.index("experts") + 1] if "experts" in parts else parts)


def fused_key(module: str) -> str:
    """Modules with one key are fused by engines: q/k/v, gate/up, and the experts of a block."""
    if found := experts_of(module):
        return found[0]
    parent, dot, last = module.rpartition(".")
    return f"{parent}{dot}{_FUSED_AS.get(last, last)}"


# Linear layers that read one input, told from common names.
_INPUT = {
    "q_proj": "attention", "k_proj": "attention", "v_proj": "attention",
    "gate_proj": "mlp", "up_proj": "mlp", "w1": "mlp", "w3": "mlp",
}  # fmt: skip


def input_site(module: str) -> str:
    """Modules with one site read the same input, as far as names tell; for estimates only."""
    parent, _, last = module.rpartition(".")
    return f"{parent}.{_INPUT.get(last, last)}"
