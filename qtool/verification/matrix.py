"""One quantized matrix, measured once: the few numbers that every later check looks at."""

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qtool.artifacts.artifact import Artifact
from qtool.artifacts.entry import Entry
from qtool.checkpoints.holes import LEAST, torn, zero_stretches
from qtool.formats import bits, gptq_zeros
from qtool.formats.safetensors_header import TensorInfo
from qtool.scheme import GroupQuant, Scheme
from qtool.verification.against.places import weights_of

# Scales below have less than five digits: multiples of the least number of their type up to 32.
_LEAST = {"float16": 32 * 2.0**-24, "bfloat16": 32 * 2.0**-133, "float32": 2.0**-126}
# Of the range of codes: farther than this from its zero lies the mean of no healthy group, whose
# weights crowd around 0.
_FAR = 0.52
_MANY_SCALES = 1000
_ENOUGH_CODES = 1 << 15
_EVEN = 0.12  # from the mean count of a code
_MARKED = 1 << 15  # bytes of a matrix
_ROWS = 64  # at once, as float64


@dataclass(frozen=True)
class Zeros:
    """The zeros of one matrix of integers."""

    least: int
    most: int
    total: int
    offset: float  # mean of code - zero; near 0, since weights are about as often + as -
    at_ends: int  # groups whose zero is 0 or the largest code, and whose mean is far from it
    v1_stores_middle: bool  # labelled v1, and every stored field is 2^(bits-1)
    ignored: bool  # called symmetric, and zeros are stored that say otherwise
    v1_wraps: int  # labelled v1, and 0 is stored as the largest code
    v1_others: int  # labelled v1, and another zero where each field is read by itself

    def is_only(self, zero: int) -> bool:
        """Whether every zero is this."""
        return self.least == self.most == zero


@dataclass(frozen=True)
class Measured:
    """What is in one quantized matrix."""

    entry: Entry
    scheme: Scheme
    scales: int  # how many there are
    not_finite: int  # scales that are NaN or infinite
    broken_biases: int  # likewise, of what a scheme with offsets adds
    zero_scales: int  # of weights that are not all 0 by their codes
    negative: int
    first_bad: str  # where the first of these lies; "" where there is none
    subnormal: int  # so small that their type keeps few digits, of groups that are not all 0
    outer: float | None  # the second scale of the whole matrix, where there is one
    low_code: int
    high_code: int
    not_numbers: int  # codes of small floats that are NaN or infinite
    same_rows: int  # rows with a single code
    zeros: Zeros | None
    reordered: bool  # g_idx says something else than k // group_size
    uneven: int  # groups of another size than the config's, by g_idx
    scale_size: float  # root of the mean square, with `outer`
    outliers: float  # the largest scale over that which 99 % are not above
    hole: int  # bytes of codes that are 0 in long stretches, and stand for other weights than 0
    even: bool  # every code about as often as any other
    mark: int  # of some of the stored bytes: the same for matrices that are the same


def measure(artifact: Artifact, entry: Entry, quant: GroupQuant) -> Measured:
    """Count in a few passes over codes, scales and zeros."""
    scale = quant.row_scale() if quant.scheme.outer == "rows" else quant.scale.astype(np.float32)
    size = np.abs(scale)
    least = np.float32(_LEAST.get(quant.scheme.scale_dtype, 0.0))
    low, high = _ends(quant)
    codes = codes_of(artifact, entry)
    raw = artifact.checkpoint.raw(codes.name).reshape(-1)
    return Measured(
        entry=entry,
        scheme=quant.scheme,
        scales=scale.size,
        not_finite=int(scale.size - np.isfinite(scale).sum()),
        broken_biases=0 if quant.offset is None else int((~np.isfinite(quant.offset)).sum()),
        zero_scales=_zero_scales(quant, scale == 0),
        negative=int((scale < 0).sum()) if quant.scheme.outer != "offset" else 0,
        first_bad=_first_bad(quant, scale),
        subnormal=_tiny(quant, size, least),
        outer=quant.outer,
        low_code=int(low.min()),
        high_code=int(high.max()),
        not_numbers=_not_numbers(quant),
        same_rows=int((low == high).sum()),
        zeros=_zeros(artifact, entry, quant),
        reordered=quant.g_idx is not None,
        uneven=_uneven(quant),
        scale_size=_scale_size(quant),
        outliers=_outliers(size),
        hole=hole_of_codes(codes, raw, quant),
        even=_even(quant),
        mark=zlib.crc32(raw[:: max(1, raw.size // _MARKED)].tobytes()),
    )


def codes_of(artifact: Artifact, entry: Entry) -> TensorInfo:
    """What is stored of the codes."""
    stored = artifact.checkpoint.tensors
    return stored[max(entry.stored, key=lambda name: stored[name].nbytes)]


def is_packed(codes: TensorInfo, scheme: Scheme) -> bool:
    """Whether 0 stands for another weight than 0 there, as a rule."""
    return codes.dtype in ("I32", "I16", "U32") and not scheme.is_float


def _ends(quant: GroupQuant) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The least and the largest code of each row; of rows of zeros alone 0, whatever their sign."""
    low, high = quant.codes.min(axis=1), quant.codes.max(axis=1)
    if quant.scheme.is_float:
        sign = 1 << (quant.scheme.bits - 1)
        for row in np.flatnonzero((high == sign) & ((low == 0) | (low == sign))):
            if not (quant.codes[row] & (sign - 1)).any():
                low[row] = high[row] = 0
    return low, high


def _first_bad(quant: GroupQuant, scale: NDArray[np.float32]) -> str:
    """`row 5, columns 128 to 255` of the first scale, or else bias, that is not finite, or else of
    the first scale that is not positive."""
    whole = [scale] if quant.offset is None else [scale, quant.offset]
    wrong = [~np.isfinite(numbers) for numbers in whole]
    if quant.scheme.outer != "offset":
        wrong.append(scale <= 0)
    for bad in wrong:
        if bad.any():
            row, group = divmod(int(np.flatnonzero(bad)[0]), bad.shape[1])
            height = -(-quant.shape[0] // len(bad))
            rows = row * height, min((row + 1) * height, quant.shape[0])
            return weights_of(quant, rows, group if bad.shape[1] > 1 else None)
    return ""


def _scale_size(quant: GroupQuant) -> float:
    with np.errstate(all="ignore"):  # a scale of 0 that divides is told of elsewhere
        return float(np.sqrt(np.square(quant.row_scale(), dtype=np.float64).mean()))


def _outliers(size: NDArray[np.float32]) -> float:
    """The largest scale over that which 99 % are not above; 1 of few scales."""
    if size.size < _MANY_SCALES or not np.isfinite(size).all():
        return 1.0
    usual, most = float(np.percentile(size, 99)), float(size.max())
    return most / usual if usual > 0 else 1.0


def hole_of_codes(stored: TensorInfo, raw: NDArray[np.uint8], quant: GroupQuant) -> int:
    """Bytes of 0 that are no weights of 0: of packed words those whose zero is another code, of
    numbers those in torn rows."""
    stretches = zero_stretches(raw)
    if stored.shape[0] == quant.shape[1] != quant.shape[0]:
        # AWQ has all rows' codes of one column side by side: a column far below its neighbours is
        # the least of its groups, code 0, in any number of rows. A hole does not end with it.
        width = raw.size // stored.shape[0]
        stretches = [one for one in stretches if one[0] // width != (one[1] - 1) // width]
    if not stretches:
        return 0
    if not is_packed(stored, quant.scheme):
        width = max(1, raw.size // max(1, stored.size // stored.shape[-1]))
        return torn(raw, stretches, width)
    zeros = sum(last - first for first, last in stretches)
    if not quant.zero.all():
        index, zero = quant.group_index(), quant.row_zero()
        true = sum(
            int(((codes == 0) & (row[index] == 0)).sum())
            for codes, row in zip(quant.codes, zero, strict=True)
        )
        zeros -= true * quant.scheme.bits // 8
    return zeros if zeros >= LEAST else 0


def _even(quant: GroupQuant) -> bool:
    """Whether integers of 4 bits and more are as even as random ones; weights crowd around 0."""
    scheme = quant.scheme
    if scheme.is_float or scheme.bits < 4 or 0 < scheme.group_size < 32:
        return False
    some = quant.codes[:: max(1, len(quant.codes) // 256), :4096]
    if some.size < _ENOUGH_CODES:
        return False
    counts = np.bincount((some >> (scheme.bits - 4)).reshape(-1), minlength=16)
    return bool(np.abs(counts / counts.mean() - 1).max() < _EVEN)


def _tiny(quant: GroupQuant, size: NDArray[np.float32], least: np.float32) -> int:
    small = (size > 0) & (size < least)
    if not small.any() or quant.scheme.rows != 1:
        return int(small.sum())
    zero = 0 if quant.scheme.is_float else quant.zero
    codes = quant.codes & 0x7F if quant.scheme.is_float else quant.codes
    return int((small & (group_means(quant, codes) != zero)).sum())


def _zero_scales(quant: GroupQuant, zero: NDArray[np.bool_]) -> int:
    """bitsandbytes stores 0 for rows of zeros, and codes of 0."""
    if not zero.any() or quant.scheme.rows != 1 or quant.scheme.is_float:
        return int(zero.sum())
    other = quant.codes != quant.row_zero()[:, quant.group_index()]
    return int((zero & (group_means(quant, other) > 0)).sum())


def _not_numbers(quant: GroupQuant) -> int:
    if not quant.scheme.is_float:
        return 0
    from qtool.float_codes import TABLES

    odd = ~np.isfinite(TABLES[quant.scheme.book])
    return int(odd[quant.codes].sum()) if odd.any() else 0


def _zeros(artifact: Artifact, entry: Entry, quant: GroupQuant) -> Zeros | None:
    if quant.scheme.is_float:
        return None
    zero = quant.zero
    top = (1 << quant.scheme.bits) - 1
    mean = float(quant.codes.sum(dtype=np.int64)) / quant.codes.size
    return Zeros(
        least=int(zero.min()),
        most=int(zero.max()),
        total=zero.size,
        offset=mean - float(zero.mean(dtype=np.float64)),
        at_ends=_far_from_end(quant, top),
        v1_stores_middle=_stores_middle(artifact, entry, quant),
        ignored=_ignored(artifact, entry, quant),
        v1_wraps=int((zero == 0).sum()) if artifact.found.layout == "v1" else 0,
        v1_others=_others(artifact, entry, quant),
    )


def _far_from_end(quant: GroupQuant, top: int) -> int:
    """Groups with a zero at an end of the range, and weights that are mostly far from 0."""
    zero = quant.row_zero()
    ends = (zero == 0) | (zero == top)
    if quant.offset is not None:  # what is NaN or infinite is told of by itself
        ends &= np.isfinite(quant.offset) & np.isfinite(quant.scale)
    if not ends.any():
        return 0
    means = group_means(quant, quant.codes)
    return int((ends & (np.abs(means - zero) > _FAR * top)).sum())


def group_means(quant: GroupQuant, values: NDArray[np.generic]) -> NDArray[np.float64]:
    """The mean of values [out, in] over each group, [out, groups]."""
    rows, columns = values.shape
    groups = quant.scale.shape[1]
    width = quant.scheme.group_size if quant.scheme.group_size > 0 else columns
    if quant.g_idx is None and columns == groups * width:
        cut = values.reshape(rows, groups, columns // groups)
        return np.asarray(cut.mean(axis=2, dtype=np.float64))
    index = quant.group_index()
    order = np.argsort(index, kind="stable")
    counts = np.bincount(index, minlength=groups)
    starts = np.minimum(np.cumsum(counts) - counts, columns - 1)
    sums = np.empty((rows, groups))
    for first in range(0, rows, _ROWS):
        some = values[first : first + _ROWS][:, order].astype(np.float64)
        sums[first : first + _ROWS] = np.add.reduceat(some, starts, axis=1)
    return np.asarray(np.where(counts > 0, sums / np.maximum(counts, 1), 0.0))


def _stores_middle(artifact: Artifact, entry: Entry, quant: GroupQuant) -> bool:
    """Whether a file labelled v1 holds the zeros of a symmetric v2."""
    name = f"{entry.module}.qzeros"
    middle = 1 << (quant.scheme.bits - 1)
    if (
        artifact.found.format != "gptq"
        or artifact.found.layout != "v1"
        or not (quant.zero == middle).all()
    ):
        return False
    if name not in entry.stored:
        return False
    row = bits.pack(np.full((1, quant.shape[0]), middle, np.uint8), quant.scheme.bits)
    return bool((artifact.checkpoint.array(name) == row).all())


def _others(artifact: Artifact, entry: Entry, quant: GroupQuant) -> int:
    """Zeros that a reader of single fields gets otherwise than whoever wrote them."""
    name = f"{entry.module}.qzeros"
    if artifact.found.format != "gptq" or artifact.found.writer is None or name not in entry.stored:
        return 0
    words = artifact.checkpoint.array(name)
    scheme = entry.scheme if isinstance(entry.scheme, Scheme) else quant.scheme
    plain = gptq_zeros.by_fields(artifact.found, scheme, words, quant.shape[0])
    return int((quant.zero != plain.T).sum())


def _ignored(artifact: Artifact, entry: Entry, quant: GroupQuant) -> bool:
    """Whether compressed-tensors' zeros are there, and not in the middle, of a symmetric matrix."""
    name = f"{entry.module}.weight_zero_point"
    if not quant.scheme.symmetric or name not in entry.stored:
        return False
    stored = artifact.checkpoint.array(name)
    if stored.dtype != np.int32 or stored.ndim != 2:
        return bool(stored.any())  # not packed: signed, so the middle is 0
    middle = np.full((1, quant.shape[0]), 1 << (quant.scheme.bits - 1), np.uint8)
    packed = bits.pack(middle, quant.scheme.bits)[0]
    return packed.size != len(stored) or bool((stored != packed[:, None]).any())


def _uneven(quant: GroupQuant) -> int:
    if quant.g_idx is None or quant.scheme.group_size <= 0:
        return 0
    counts = np.bincount(quant.g_idx, minlength=quant.scale.shape[1])
    full, rest = divmod(quant.shape[1], quant.scheme.group_size)
    expected = np.full(full + bool(rest), quant.scheme.group_size)
    if rest:
        expected[-1] = rest
    return int((np.sort(counts) != np.sort(expected)).sum())
