"""NVFP4 of a checkpoint as llama.cpp has it: what stands against it, and its second scales.

The codes and the scales of 16 weights go into blocks as they are. The second scale, one for each
matrix, becomes a tensor of its own, as convert_hf_to_gguf.py has it: a float32, of a divisor
(compressed-tensors) the reciprocal, which is what vLLM computes of it, too.
"""

from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

from qtool.converting.blocks import NVFP4, second_scale
from qtool.errors import FormatError
from qtool.gguf.second_scales import ends_it, is_forgotten, is_loaded, is_own, name_of
from qtool.gguf.source import SourceTensor
from qtool.gguf_types import F32
from qtool.scheme import GroupQuant

Factors = NDArray[np.float32]
_ONE = np.float32(1)


def is_nvfp4(quant: GroupQuant) -> bool:
    """Whether blocks of NVFP4 hold its codes and scales."""
    scheme = quant.scheme
    known = scheme.book == "e2m1" and scheme.scale_dtype == "float8_e4m3"
    return known and scheme.group_size == 16 and scheme.rows == 1


def against_matrix(quant: GroupQuant) -> str | None:
    """What stands against one matrix, whatever it becomes a part of."""
    columns = quant.shape[1]
    if columns % NVFP4.weights:
        return f"has {columns} in_features, which blocks of {NVFP4.weights} do not divide"
    if np.signbit(quant.scale).any():
        return "has scales below zero, which blocks of NVFP4 do not hold"
    return None


def checked_second(name: str, quant: GroupQuant) -> np.float32 | None:
    """second_scale(); FormatError where it is no number to multiply by."""
    found = second_scale(quant)
    if found is not None and not (np.isfinite(found) and np.isfinite(np.float32(quant.outer))):
        raise FormatError(f"{name}: its second scale is {quant.outer}; the artifact is damaged")
    return found


def factors_of(tensor: SourceTensor, seconds: Sequence[np.float32 | None]) -> Factors | str | None:
    """The second scales of a tensor that is made of matrices with these: one for all, or one for
    each expert. None where there are none; as text why it has no place for them."""
    found = np.array([_ONE if one is None else one for one in seconds], np.float32)
    if all(one is None for one in seconds):
        return None
    if len(tensor.shape) > 2:
        return found if len(found) == tensor.shape[0] else "is not one of its experts"
    if (found != found[0]).any():
        return f"is one of {len(found)} matrices that become {tensor.name}, with one second scale"
    return found[:1]


def against_tensor(tensor: SourceTensor, architecture: str, names: Container[str]) -> str | None:
    """Why llama.cpp makes nothing good of a tensor with second scales; names: of all tensors."""
    if is_own(architecture, name_of(tensor.name)):
        return f"has a second scale, and {name_of(tensor.name)} is something else to {architecture}"
    if not is_loaded(tensor.name) or is_forgotten(architecture, tensor.name):
        return (
            f"has a second scale, which llama.cpp does not multiply by in {tensor.name} of "
            f"{architecture}, so that it would write nonsense"
        )
    if ends_it(names, tensor.name):
        return "has a second scale and a bias, at which llama.cpp ends"
    return None


def scale_tensor(tensor: SourceTensor, factors: Factors) -> SourceTensor:
    """The tensor of a file that holds them."""

    def read(first: int, last: int) -> NDArray[np.uint8]:
        return factors.view(np.uint8).reshape(1, -1)[first:last]

    return SourceTensor(name_of(tensor.name), factors.shape, F32, read)
