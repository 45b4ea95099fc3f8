"""Reading compressed-tensors; what its tensors are, `compressed_tensors` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError
from qtool.formats import bits, stored_codes
from qtool.formats.compressed_tensors_config import group_of
from qtool.formats.facts import ArtifactScheme, Look, check_shape, find_words, read_all
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np


_STORED = (
    "weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_global_scale",
    "weight_shape", "weight_g_idx",
)  # fmt: skip


def scheme_in(module: str, look: Look, found: ArtifactScheme) -> tuple[Scheme, tuple[int, int]]:
    """The scheme and shape [out, in] of a stored matrix; FormatError where shapes disagree."""
    wanted = group_of(module, found).scheme
    scales = f"{module}.weight_scale"
    packed = look(f"{module}.weight_packed")
    if packed is None:
        zeros = None if wanted.symmetric else f"{module}.weight_zero_point"
        if wanted.book == "e2m1":
            raise FormatError(
                f"{module}.weight: stored whole; its config says FP4, which is packed"
            )
        return stored_codes.scheme_of_bytes(module, look, wanted, scales, zeros)
    if wanted.book == "e2m1":
        if wanted.outer:
            stored_codes.look_up(look, f"{module}.weight_global_scale")
        return stored_codes.scheme_of_nibbles(
            module, look, wanted, f"{module}.weight_packed", scales
        )
    if wanted.is_float or wanted.rows > 1:
        raise FormatError(f"{module}.weight_packed: packed, which its config's {wanted} is not")
    return _packed(module, look, wanted)


def _packed(module: str, look: Look, wanted: Scheme) -> tuple[Scheme, tuple[int, int]]:
    """The same for pack-quantized."""
    rows, words = find_words(look, f"{module}.weight_packed").shape
    scale = stored_codes.look_up(look, f"{module}.weight_scale")
    if not (rows and words):
        raise FormatError(f"{module}.weight_packed: it is empty")
    columns = _columns(module, look, wanted, words, scale.shape)
    shape = (rows, columns)
    layout = _layout(module, words, columns, wanted.bits)
    scheme = stored_codes.with_grid(look, wanted, shape, f"{module}.weight_scale")
    index = look(f"{module}.weight_g_idx")
    if index is not None:
        find_words(look, f"{module}.weight_g_idx", dimensions=1)
        check_shape(f"{module}.weight_g_idx", index.shape, (columns,))
    if not wanted.symmetric:
        name = f"{module}.weight_zero_point"
        count = _words(rows, wanted.bits, layout)
        check_shape(name, find_words(look, name).shape, (count, scheme.groups(columns)))
    return scheme, shape


def _words(count: int, width: int, layout: str) -> int:
    each = bits.WORD // width
    return -(-count // each) if layout == "padded" else bits.word_count(count, width)


def _columns(
    module: str, look: Look, wanted: Scheme, words: int, scale_shape: tuple[int, ...]
) -> int:
    """in_features. The scales tell them; where there is one a row, weight_shape's numbers do."""
    if wanted.group_size > 0 and len(scale_shape) == 2 and scale_shape[1] > 1:
        return scale_shape[1] * wanted.group_size
    stored = look(f"{module}.weight_shape")
    if isinstance(stored, np.ndarray):
        return shape_in(f"{module}.weight_shape", stored)[1]
    if wanted.group_size > 0:  # one group: as wide as the words are
        return min(wanted.group_size, words * bits.WORD // wanted.bits)
    return words * bits.WORD // wanted.bits


def shape_in(name: str, stored: NDArray[Any]) -> tuple[int, int]:
    """The numbers in weight_shape."""
    if stored.shape != (2,) or stored.dtype.kind not in "iu" or not (stored > 0).all():
        raise FormatError(f"{name}: it holds {stored.tolist()!r:.80}; expected out and in")
    return int(stored[0]), int(stored[1])


def _layout(module: str, words: int, columns: int, width: int) -> str:
    """dense or padded."""
    for layout in ("dense", "padded"):
        if words == _words(columns, width, layout):
            return layout
    raise FormatError(
        f"{module}.weight_packed: {words} words a row for {columns} codes of {width} bits; "
        f"expected {_words(columns, width, 'dense')}"
    )


def unpack(module: str, get: Callable[[str], NDArray[Any]], found: ArtifactScheme) -> GroupQuant:
    """Read one matrix; `get` gives a stored tensor by name, KeyError where there is none."""
    tensors = read_all(module, get, _STORED)
    scheme, shape = scheme_in(module, tensors.get, found)
    scales = f"{module}.weight_scale"
    zeros = None if scheme.symmetric else f"{module}.weight_zero_point"
    packed = tensors.get(f"{module}.weight_packed")
    if packed is None:
        return stored_codes.read_bytes(module, tensors.__getitem__, scheme, shape, scales, zeros)
    if scheme.book == "e2m1":
        outer = f"{module}.weight_global_scale" if scheme.outer else None
        return stored_codes.read_nibbles(
            tensors.__getitem__, scheme, shape, f"{module}.weight_packed", scales, outer
        )
    rows, columns = shape
    written = tensors.get(f"{module}.weight_shape")
    if written is not None and shape_in(f"{module}.weight_shape", written) != shape:
        raise FormatError(
            f"{module}.weight_shape: it says {written.tolist()}; the packed words and the scales "
            f"hold {list(shape)}"
        )
    layout = _layout(module, packed.shape[1], columns, scheme.bits)
    codes = _unpack(packed, scheme.bits, columns, layout)
    scale = stored_codes.scale_grid(tensors[scales], scheme, shape)
    zero = stored_codes.middle_zeros(scheme, shape)
    if zeros is not None:
        zero = bits.transpose(_unpack(bits.transpose(tensors[zeros]), scheme.bits, rows, layout))
    return GroupQuant(scheme, codes, scale, zero, order_of(module, tensors, scheme, shape))


def _unpack(words: NDArray[Any], width: int, count: int, layout: str) -> NDArray[np.uint8]:
    """Codes along the last axis: [..., w] -> uint8 [..., count]."""
    if layout == "dense":
        return bits.unpack(words, width, count)
    each = bits.WORD // width
    raw = np.ascontiguousarray(words, dtype="<i4").view("<u4")
    codes = np.empty((*words.shape, each), np.uint8)
    for place in range(each):
        shifted = raw >> np.uint32(place * width)
        codes[..., place] = shifted & np.uint32((1 << width) - 1)
    return codes.reshape(*words.shape[:-1], -1)[..., :count]


def order_of(
    module: str, tensors: dict[str, NDArray[Any]], scheme: Scheme, shape: tuple[int, int]
) -> NDArray[np.int32] | None:
    """weight_g_idx, unless it says what holds without it; -1 throughout is "not used"."""
    index = tensors.get(f"{module}.weight_g_idx")
    if index is None or (index == -1).all():
        return None
    size, groups = scheme.group_size, scheme.groups(shape[1])
    if size < 0 or np.array_equal(index, np.arange(shape[1]) // size):
        return None
    if int(index.min()) < 0 or int(index.max()) >= groups:
        raise FormatError(f"{module}.weight_g_idx names a group outside of 0 .. {groups - 1}")
    return index.astype(np.int32)
