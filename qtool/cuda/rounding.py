"""Integer grids on a device: what `qtool.native.quantize_groups` makes, bit for bit.

Tensors here lie column after column, [in, out], as the kernels read them; grids are pairs of scale
and zero, float32 [groups, out, 2].
"""

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.cuda import quantize_tasks as tasks
from qtool.cuda.arrays import ALIGNED
from qtool.cuda.device import Device, host
from qtool.cuda.quantize_tasks import Grid
from qtool.native import Groups, RangeSearch

Floats = NDArray[np.float32]
_STORED = {"float16": np.float16, "float32": np.float32, "bfloat16": np.float32}


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in one piece that begins where a kernel can read sixteen bytes."""
    whole = tensor.contiguous()
    return whole.clone() if whole.data_ptr() % ALIGNED else whole


def by_columns(device: Device, weight: Floats) -> torch.Tensor:
    """A matrix [out, in] there, as [in, out]."""
    return device.put(np.ascontiguousarray(weight)).T.contiguous()


def grids(
    device: Device,
    weight: torch.Tensor,
    grid: Grid,
    group_size: int,
    ratios: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
    gram: torch.Tensor | None = None,
) -> torch.Tensor:
    """The grid of every group of weight; see quantize_tasks.find_groups, and `folded` of gram."""
    groups = -(-weight.shape[0] // group_size)
    out = torch.empty(groups, weight.shape[1], 2, device=device.place)
    weight = aligned(weight)
    importance = None if importance is None else aligned(importance)
    device.launch(
        tasks.find_groups(
            weight, grid, group_size, out=out, ratios=ratios, importance=importance, gram=gram
        )
    )
    return out


def rounded(
    device: Device,
    weight: torch.Tensor,
    pairs: torch.Tensor,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Codes of weight (uint8), or what they stand for (float32), [in, out]."""
    weight, out = aligned(weight), torch.empty(weight.shape, dtype=dtype, device=device.place)
    device.launch(tasks.round_weights(weight, pairs, bits, group_size, out=out))
    return out


def searched(device: Device, search: RangeSearch | None) -> torch.Tensor | None:
    """The ratios of a search, there."""
    if search is None or not search.ratios:
        return None
    if search.norm != 2:
        raise ValueError(f"norm is {search.norm}, expected 2 on a GPU")
    return device.put(np.array(search.ratios, np.float32))


def folded(gram: torch.Tensor) -> torch.Tensor:
    """Blocks [groups, size, size] with twice what is above the diagonal and zeros below it, filled
    with zeros to a multiple of four rows and columns."""
    size = gram.shape[-1]
    out = gram.new_zeros(gram.shape[0], tasks.padded(size), tasks.padded(size))
    out[:, :size, :size] = gram.triu(1) + gram.tril(-1).mT
    out.diagonal(0, -2, -1)[:, :size] = gram.diagonal(0, -2, -1)
    return out


def quantize_groups(
    device: Device,
    weight: Floats,
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    reach: float,
    scale_dtype: str = "float16",
    search: RangeSearch | None = None,
    importance: Floats | None = None,
    gram: Floats | None = None,
    dequantize: bool = False,
    threads: int | None = None,
) -> Groups:
    """As native.quantize_groups, in turn with other users of the device. threads: none are used."""
    columns = weight.shape[1]
    size = columns if group_size == -1 else min(group_size, columns)
    options = Grid(bits, symmetric, reach, scale_dtype)
    with device.alone, device.explained():
        there = by_columns(device, weight)
        weighed = None if importance is None else device.put(importance)
        blocks = None if gram is None else folded(device.put(gram))
        ratios = searched(device, search)
        pairs = grids(device, there, options, size, ratios, weighed, blocks)
        del blocks
        codes = rounded(device, there, pairs, bits, size, torch.uint8)
        values = None
        if dequantize:
            values = rounded(device, there, pairs, bits, size, torch.float32)
        scale, zero = stored(pairs, scale_dtype)
        return Groups(
            host(codes.T.contiguous()),
            scale,
            zero,
            None if values is None else host(values.T.contiguous()),
        )


def stored(
    pairs: torch.Tensor, scale_dtype: str = "float16"
) -> tuple[NDArray[np.floating], NDArray[np.uint8]]:
    """Scales and zeros [out, groups] of pairs; exact, since they were rounded to the dtype."""
    scale, zero = (host(pairs[..., which].T.contiguous()) for which in (0, 1))
    return scale.astype(_STORED[scale_dtype]), zero.astype(np.uint8)
