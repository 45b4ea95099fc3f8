"""Which inputs an engine rounds that runs an artifact, and how: by matrix.

    GGUF, in the protocol llama.cpp    by the block type of the weights, as llama.cpp does on a CPU;
                                       keys and values are float16
    compressed-tensors                 input_activations of the matrix's group, kv_cache_scheme
    fp8                                activation_scheme: per tensor as stored, or as inputs come,
                                       per token or per 128 columns where weights have blocks
    qserve                             int8 per token; keys and values dynamic
    bitsandbytes                       int8 but for columns with outliers, llm_int8_threshold
    modelopt                           FP8 and NVFP4 on both sides, by what each matrix is stored
                                       as; kv_cache_quant_algo

What an artifact declares and is not done here is said, in `not_simulated`.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from qtool.artifacts.artifact import Artifact
from qtool.artifacts.stored_config import quantization_config
from qtool.errors import FormatError
from qtool.formats.bitsandbytes import threshold_of
from qtool.gguf.to_hf.weights import GgufWeights
from qtool.gguf_types import BlockType
from qtool.methods import activations as known
from qtool.methods.activations import Rounding
from qtool.quality.input_arguments import input_arguments, input_scale
from qtool.quality.rounded_inputs import Activations, Kept
from qtool.quality.weights import ArtifactWeights
from qtool.scheme import Scheme
from qtool.streaming.weights import Weights

_KEYS = re.compile(r"\.(\d+)\.(?:.*\.)?k_proj\.")
_SCALES = re.compile(r"\.(\d+)\.(?:.*\.)?(?:([kv])_scale|([kv])_proj\.output_scale)$")


def activations(weights: Weights, protocol: str) -> Activations:
    """What is rounded by an engine that runs these weights."""
    if isinstance(weights, GgufWeights) and protocol == "llama.cpp":
        found = {name: of_block_type(type_) for name, type_ in weights.types().items()}
        half = Kept("f16", lambda _: (known.F16, known.F16))
        return Activations({name: r for name, r in found.items() if r is not None}, half)
    if isinstance(weights, ArtifactWeights):
        return declared(weights.artifact)
    return Activations()


def of_block_type(type_: BlockType) -> Rounding | None:
    """llama.cpp's on a CPU; None where it multiplies float32."""
    if type_.name in ("F32", "F16", "BF16"):
        return {"F32": None, "F16": known.F16, "BF16": known.BF16}[type_.name]
    return known.Q8_OF_256 if type_.weights == 256 else known.Q8_OF_32


def declared(artifact: Artifact) -> Activations:
    """What the config of a quantized checkpoint says; FormatError where a stored scale lacks."""
    found: dict[str, Rounding] = {}
    left: dict[str, None] = {}  # a set in the order of finding
    for name, entry in artifact.entries.items():
        arguments = input_arguments(artifact, entry.module, entry.scheme)
        if arguments is None:
            continue
        rounding = _rounding(artifact, entry.module, arguments)
        if rounding is None:
            left[_said(arguments)] = None
        else:
            found[name] = rounding
    if artifact.found.format == "bitsandbytes":
        parted = known.llm_int8(threshold_of(quantization_config(artifact.checkpoint)))
        found = {n: parted for n, e in artifact.entries.items() if isinstance(e.scheme, Scheme)}
    kept = None
    scheme = _cache_scheme(quantization_config(artifact.checkpoint))
    if scheme is not None:
        kept = _kept(artifact, scheme)
        if kept is None:
            left[f"the KV cache: {_said(scheme)}"] = None
        elif scheme.get("dynamic") is not True:
            left |= dict.fromkeys(_without_scale(artifact))
    return Activations(found, kept, tuple(left))


def _cache_scheme(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """QuantizationArgs of keys and values; ModelOpt has a word for them."""
    scheme, word = config.get("kv_cache_scheme"), str(config.get("kv_cache_quant_algo") or "")
    if isinstance(scheme, Mapping) or not word:
        return scheme if isinstance(scheme, Mapping) else None
    if word.upper() == "FP8":
        return {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    return {"num_bits": 4 if "4" in word else 8, "type": word, "dynamic": False}


def _rounding(artifact: Artifact, module: str, arguments: Mapping[str, Any]) -> Rounding | None:
    """The function that QuantizationArgs stand for, None where it is not here."""
    bits, kind = arguments.get("num_bits", 8), str(arguments.get("type") or "int")
    strategy, dynamic = str(arguments.get("strategy") or ""), arguments.get("dynamic")
    size = arguments.get("group_size")
    runs = size if strategy in ("group", "tensor_group") and isinstance(size, int) else -1
    shape = artifact.entry(module).shape
    if strategy not in ("token", "group", "tensor", "tensor_group") or bits not in (4, 8):
        return None
    if runs == 0 or (runs > 0 and shape[-1] % runs):
        return None
    if strategy == "tensor_group":
        if (kind, bits, runs, dynamic) != ("float", 4, 16, "local"):
            return None
        if artifact.found.format == "modelopt":  # which stores what to multiply by
            return known.nvfp4(1.0 / _stored(artifact, input_scale(module)))
        return known.nvfp4(_stored(artifact, f"{module}.input_global_scale"))
    if strategy == "tensor":
        if dynamic:  # one scale for whatever tokens come together: here, those of a window
            if dynamic is not True or bits != 8 or arguments.get("symmetric", True) is False:
                return None
            return known.fp8_together() if kind == "float" else known.whole_together(bits)
        scale = _stored(artifact, input_scale(module))
        if kind == "float":
            return known.stored_fp8(scale) if bits == 8 else None
        zeros = arguments.get("symmetric", True) is False
        zero = _stored(artifact, f"{module}.input_zero_point") if zeros else 0.0
        return known.stored_integers(bits, scale, zero)
    if dynamic is not True:
        return None
    if kind == "int":
        return known.integers(bits, runs, arguments.get("symmetric", True) is not False)
    if str(arguments.get("scale_dtype")) == "torch.uint8":
        return known.microscaling(bits) if runs == 32 else None
    return known.fp8(runs) if bits == 8 else None


def _kept(artifact: Artifact, scheme: Mapping[str, Any]) -> Kept | None:
    """Keys and values with stored scales for each block, or each of its heads; 1 where there is
    none, as engines have it."""
    bits, kind = scheme.get("num_bits"), str(scheme.get("type") or "int")
    strategy = scheme.get("strategy", "tensor")
    if not isinstance(bits, int):
        return None
    if artifact.found.format == "qserve" and scheme.get("dynamic") is True:
        if kind != "int" or bits not in (4, 8):
            return None
        comes = known.kept_as_it_comes(bits)
        return Kept(f"{comes.name} per token and head", lambda _: (comes, comes))
    if (kind, bits) not in (("float", 8), ("int", 8), ("int", 4)) or scheme.get("dynamic"):
        return None
    if strategy not in ("tensor", "attn_head") or scheme.get("symmetric", True) is False:
        return None
    each = strategy == "attn_head"
    scales: dict[tuple[int, str], list[float]] = {}
    for name in artifact.checkpoint.tensors:
        match = _SCALES.search(name)
        if match is not None:
            found = _stored_scales(artifact, name) if each else [_stored(artifact, name)]
            scales[int(match[1]), match[2] or match[3]] = found

    def of_block(index: int) -> tuple[Rounding, Rounding]:
        key, value = (scales.get((index, which), [1.0]) for which in "kv")
        return known.kept_of_heads(bits, kind, key), known.kept_of_heads(bits, kind, value)

    name = "fp8" if kind == "float" else f"int{bits}"
    return Kept(f"{name} per head" if each else name, of_block)


def _without_scale(artifact: Artifact) -> list[str]:
    """Sentences on the blocks that lack a scale: those with the other one, or with a k_proj."""
    having: dict[str, set[int]] = {"k": set(), "v": set()}
    for name in artifact.checkpoint.tensors:
        if (match := _SCALES.search(name)) is not None:
            having[match[2] or match[3]].add(int(match[1]))
    keys = {int(found[1]) for n in artifact.checkpoint.tensors if (found := _KEYS.search(n))}
    blocks = having["k"] | having["v"] | keys
    return [
        f"the KV cache: no {which}_scale in block {', '.join(map(str, sorted(lacking)))}: 1.0 "
        "taken, as engines do"
        for which, found in having.items()
        if (lacking := blocks - found)
    ]


def _stored_scales(artifact: Artifact, name: str) -> list[float]:
    """Positive numbers that are stored, one for each head."""
    values = artifact.checkpoint.float32(name).reshape(-1)
    if not values.size or not (np.isfinite(values) & (values > 0)).all():
        raise FormatError(f"{name}: it holds {values.tolist()!r:.60}; expected positive numbers")
    return [float(value) for value in values]


def _stored(artifact: Artifact, name: str) -> float:
    """A single number that is stored."""
    checkpoint = artifact.checkpoint
    if name not in checkpoint.tensors:
        raise FormatError(
            f"{checkpoint.path}: no {name}, though its config says that inputs are rounded with a "
            "stored scale; the artifact is incomplete"
        )
    whole = checkpoint.tensors[name].dtype in ("I8", "I32", "I64")
    values = np.asarray(checkpoint.array(name) if whole else checkpoint.float32(name))
    number = float(values.reshape(-1)[0]) if values.size == 1 else float("nan")
    if not np.isfinite(number) or (not whole and number <= 0):
        raise FormatError(
            f"{name}: it holds {values.tolist()!r:.60}; expected a single "
            f"{'number' if whole else 'positive number'}"
        )
    return number


def _said(arguments: Mapping[str, Any]) -> str:
    """QuantizationArgs in a few words."""
    when = arguments.get("dynamic")
    words = (
        "dynamic" if when else "static",
        f"{arguments.get('num_bits', 8)}-bit",
        arguments.get("type") or "int",
        "per",
        arguments.get("strategy") or "tensor",
    )
    return " ".join(str(word) for word in words)
