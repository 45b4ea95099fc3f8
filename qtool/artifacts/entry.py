"""A matrix or tensor of an artifact with all that stores it; those of formats that are named here,
and not read."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from qtool.artifacts.stored_config import quantization_config
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.formats import ArtifactScheme, mxfp4_experts
from qtool.formats import safetensors_file as st
from qtool.formats.safetensors_header import TensorInfo
from qtool.scheme import Scheme

# Tensors that belong to a packed matrix in formats that are not decoded here.
AUXILIARY = (
    "scales",
    "biases",
    "global_scale",
    "qzeros",
    "scaled_zeros",
    "g_idx",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_zero_point",
    "weight_global_scale",
    "weight_shape",
    "weight_g_idx",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
    "scale",
    "SCB",
    "weight_format",
    "s1_scales",
    "s1_szeros",
    "s2_scales",
    "s2_zeros",
    "k_scale",
    "v_scale",
)
STACK = " stack"  # as the scheme of mxfp4_experts ends
_BITSANDBYTES = ("weight.absmax", "weight.quant_map", "weight.nested_", "weight.quant_state")


@dataclass(frozen=True)
class Entry:
    """One matrix or tensor of the model, with the tensors that store it."""

    name: str  # as in the unquantized checkpoint
    shape: tuple[int, ...]  # likewise
    dtype: str  # of the largest stored tensor
    scheme: Scheme | str | None  # None is dense; a word where the format is not decoded
    stored: tuple[str, ...]
    nbytes: int
    parameters: int

    @property
    def module(self) -> str:
        """The name without `.weight`."""
        return self.name.removesuffix(".weight")

    @property
    def stacked(self) -> bool:
        """Whether it is experts in one tensor, which is read as numbers, not as codes."""
        return isinstance(self.scheme, str) and self.scheme.endswith(STACK)

    @property
    def bits_per_weight(self) -> float:
        """Bits stored for each number."""
        return 8 * self.nbytes / self.parameters if self.parameters else 0.0


def undecoded(checkpoint: Checkpoint, found: ArtifactScheme, name: str) -> Entry:
    """A tensor of a format that is named here, not read; its aids are counted with it."""
    tensors = checkpoint.tensors
    info = tensors[name]
    if stack := mxfp4_experts.stack_of(name, tensors):
        return _stack(checkpoint, name, *stack)
    module, _, last = name.rpartition(".")
    if last not in ("weight", "weight_packed") or info.dtype in st.FLOAT_DTYPES:
        return Entry(name, info.shape, info.dtype, None, (name,), info.nbytes, info.size)
    aids = tuple(f"{module}.{aid}" for aid in AUXILIARY if f"{module}.{aid}" in tensors)
    if found.format == "bitsandbytes":
        marks = tuple(f"{module}.{mark}" for mark in _BITSANDBYTES)
        aids += tuple(n for n in tensors if n.startswith(marks))
    stored = (name, *aids)
    nbytes = sum(tensors[n].nbytes for n in stored)
    parameters = info.size * _codes_per_element(info.dtype, last, _config_bits(checkpoint))
    shape = info.shape
    if found.format == "mlx" and info.dtype == "U32" and len(shape) == 2:
        shape = (shape[0], shape[1] * 32 // _mlx_bits(checkpoint, module))
        parameters = prod(shape)
    if last == "weight_packed" and len(shape) == 2:
        shape = (shape[0], parameters // shape[0] if shape[0] else 0)
    return Entry(f"{module}.weight", shape, info.dtype, found.format, stored, nbytes, parameters)


def _stack(checkpoint: Checkpoint, blocks: str, name: str, shape: tuple[int, ...]) -> Entry:
    """Experts in MXFP4, under the name that they have where they are plain."""
    stored = (blocks, name + mxfp4_experts.SCALES)
    nbytes = sum(checkpoint.tensors[one].nbytes for one in stored)
    return Entry(name, shape, "U8", mxfp4_experts.SCHEME, stored, nbytes, prod(shape))


def small_floats(checkpoint: Checkpoint, found: ArtifactScheme, name: str) -> Entry:
    """Small floats under another name than a linear layer's, such as experts in one tensor with
    a scale_inv beside it: named here, not read."""
    tensors = checkpoint.tensors
    info = tensors[name]
    ends = ("_scale_inv", "_scales_inv", "_scale")
    stored = (name, *(name + end for end in ends if name + end in tensors))
    nbytes = sum(tensors[n].nbytes for n in stored)
    return Entry(name, info.shape, info.dtype, found.format, stored, nbytes, info.size)


def _config_bits(checkpoint: Checkpoint) -> int:
    """The width that a compressed-tensors config gives its first group."""
    config = quantization_config(checkpoint)
    groups = config.get("config_groups")
    if isinstance(groups, dict):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, dict) else None
            if isinstance(weights, dict) and isinstance(weights.get("num_bits"), int):
                return max(1, min(32, int(weights["num_bits"])))
    return 4


def _mlx_bits(checkpoint: Checkpoint, module: str) -> int:
    """The width of a module's codes in mlx-lm's table."""
    config = quantization_config(checkpoint)
    own = config.get(module)
    bits = own.get("bits") if isinstance(own, Mapping) else config.get("bits")
    return bits if type(bits) is int and 1 <= bits <= 32 else 32


def unpacked(stored: TensorInfo, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a matrix that is packed as GPTQ or AWQ does and not decoded: AutoRound's own
    config says which. As stored, where nothing does."""
    bits, packing = config.get("bits"), str(config.get("packing_format") or "")
    if type(bits) is not int or not 2 <= bits <= 8 or len(stored.shape) != 2:
        return stored.shape
    first, last = stored.shape
    if packing.endswith("gptq"):
        return last, first * 32 // bits
    return (last * 32 // bits, first) if packing.endswith("awq") else stored.shape


def _codes_per_element(dtype: str, last: str, width: int) -> int:
    """Weights in one stored element of a format that is not decoded."""
    bits = st.DTYPE_BITS[dtype]
    if last == "weight_packed" or (dtype == "U8" and last == "weight"):
        return max(1, bits // (width if last == "weight_packed" else 4))
    return 1
