"""What one quantized matrix is like, as far as it decides which formats hold it exactly.

Read before anything is written, so that a refusal costs no disk and names every obstacle.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from qtool.converting.blocks import BLOCK, Q4_1, BlockMatrix
from qtool.converting.model import Quantized, Tensor
from qtool.converting.obstacles import ANEW, ZEROS
from qtool.errors import FormatError
from qtool.native import floats
from qtool.scheme import GroupQuant, Scheme

# Group sizes that equal neighbouring groups are merged to; engines load no larger ones.
_MERGED = (64, 128)


@dataclass(frozen=True)
class Survey:
    """One matrix. Where `obstacle` says that it is not codes in groups of columns, `lossy` is what
    makes it that, if anything does."""

    tensor: Tensor
    obstacle: str | None = None
    lossy: str | None = None
    scheme: Scheme | None = None  # symmetric as its zeros are, whatever the config says
    reordered: bool = False  # columns are out of group order
    scale_dtypes: frozenset[str] = frozenset()  # the ones that hold every scale
    offset_dtypes: frozenset[str] = frozenset()  # the ones that hold every zero times its scale
    sizes: frozenset[int] = frozenset()  # larger group sizes that say the same; -1 is the row
    floats: Scheme | None = None  # of small floats


def survey(tensor: Tensor, *, merge: bool = False, recorded: int | None = None) -> Survey:
    """Read one matrix and look at it. merge: look for larger groups, `recorded` among them.

    FormatError where a scale is not finite.
    """
    assert tensor.read is not None
    value = tensor.read()
    quant = grouped(value)
    obstacle = None
    if quant is None and isinstance(value, BlockMatrix) and value.type is Q4_1:
        obstacle = "has minimums (Q4_1) that are no whole zero point times a scale"
        quant = value.nearest
        if quant is None:
            scheme = Scheme(4, BLOCK, False)
            return Survey(tensor, obstacle, ANEW, scheme, scale_dtypes=frozenset(_KEPT))
    if quant is None and has_offsets(value):
        obstacle = "has biases (mlx) that are no whole zero points times scales"
        quant = value.with_nearest_zeros()
        if far_from_zeros(value):
            scheme = replace(quant.scheme, scale_dtype="float16")
            return Survey(tensor, obstacle, ANEW, scheme, scale_dtypes=frozenset(_KEPT))
    if quant is None:
        floats = value.scheme if isinstance(value, GroupQuant) and value.scheme.is_float else None
        obstacle = f"is stored as {tensor.stored}, not as integers and scales"
        if isinstance(value, GroupQuant) and floats is None:
            obstacle = f"is stored as {tensor.stored} with scales of two factors, not of one"
        return Survey(tensor, obstacle, floats=floats)
    if not np.isfinite(quant.scale).all():
        raise FormatError(f"{tensor.name}: a scale is not finite; the artifact is damaged")
    middle = 1 << (quant.scheme.bits - 1)
    scheme = replace(quant.scheme, symmetric=bool((quant.zero == middle).all()))
    reordered = quant.g_idx is not None
    wanted = {*_MERGED, recorded} - {None, -1} if merge and not reordered else set()
    sizes = {size for size in wanted if size is not None and merges(quant, size)}
    if merge and not reordered and merges(quant, quant.shape[1]):
        sizes.add(-1)
    return Survey(
        tensor,
        obstacle,
        None if obstacle is None else ZEROS,
        scheme=scheme,
        reordered=reordered,
        scale_dtypes=frozenset(d for d in _KEPT if _KEPT[d](quant.scale)),
        offset_dtypes=frozenset(d for d in _KEPT if _KEPT[d](quant.scaled_zeros())),
        sizes=frozenset(sizes),
    )


def has_offsets(value: Quantized) -> TypeGuard[GroupQuant]:
    """Whether it is MLX's codes."""
    return isinstance(value, GroupQuant) and value.scheme.outer == "offset"


def with_whole_scale(scheme: Scheme) -> Scheme:
    """NVFP4 as compressed-tensors has it; others as they are."""
    plain = scheme.book == "e2m1" and scheme.scale_dtype == "float8_e4m3" and not scheme.outer
    return replace(scheme, outer="divides") if plain else scheme


def far_from_zeros(quant: GroupQuant) -> bool:
    """Whether an offset is more than a step away from any zero that its bits hold."""
    off = quant.row_offset() + quant.scaled_zeros()
    return bool((np.abs(off) > np.abs(quant.scale.astype(np.float32))).any())


def grouped(value: Quantized) -> GroupQuant | None:
    """Integer codes with a scale per row and group of columns, or None where it is not that."""
    if isinstance(value, BlockMatrix):
        return value.grouped
    if not isinstance(value, GroupQuant) or value.scheme.is_float:
        return None
    if value.scheme.outer == "offset" and value.has_whole_zeros():
        return value.with_nearest_zeros()
    if value.scheme.outer:
        return None
    return value if value.scheme.rows == 1 else value.rows(slice(None))


def merges(quant: GroupQuant, size: int) -> bool:
    """Whether runs of groups that cover `size` columns have one scale and one zero each."""
    old = quant.scheme.group_size if quant.scheme.group_size > 0 else quant.shape[1]
    if size <= old or size % old or quant.shape[1] % size:
        return size == old
    runs = size // old
    for part in (quant.scale, quant.zero):
        stacked = part.reshape(part.shape[0], -1, runs)
        if (stacked != stacked[..., :1]).any():
            return False
    return True


def merged(quant: GroupQuant, size: int) -> GroupQuant:
    """The same numbers in groups of `size` columns; -1 is one group for a row."""
    columns = quant.shape[1]
    old = quant.scheme.group_size if quant.scheme.group_size > 0 else columns
    step = (size if size > 0 else columns) // old
    return replace(
        quant,
        scheme=replace(quant.scheme, group_size=size),
        scale=np.ascontiguousarray(quant.scale[:, ::step]),
        zero=np.ascontiguousarray(quant.zero[:, ::step]),
    )


def _in_float16(scale: NDArray[np.floating]) -> bool:
    if scale.dtype == np.float16:
        return True
    return bool((in_dtype(scale, "float16").astype(np.float32) == scale).all())


def _in_bfloat16(scale: NDArray[np.floating]) -> bool:
    return bool((in_dtype(scale, "bfloat16") == scale.astype(np.float32)).all())


def in_dtype(scale: NDArray[np.floating], dtype: str) -> NDArray[np.floating]:
    """Scales rounded to a dtype; bfloat16 comes as float32, numpy having none."""
    if dtype == "float16":
        with np.errstate(over="ignore", under="ignore"):
            return scale.astype(np.float16)
    wide = np.ascontiguousarray(scale, np.float32)
    if dtype == "bfloat16":
        rounded: NDArray[np.floating] = floats.from_bfloat16(floats.to_bfloat16(wide))
        return rounded
    return wide


_KEPT: dict[str, Callable[[NDArray[np.floating]], bool]] = {
    "float16": _in_float16,
    "bfloat16": _in_bfloat16,
    "float32": lambda _: True,
}
