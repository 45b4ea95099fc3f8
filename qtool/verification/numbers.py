"""Whether the numbers in the quantized matrices can be right."""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from qtool.artifacts.artifact import Artifact
from qtool.artifacts.stored_config import quantization_config
from qtool.checkpoints.holes import said_blank
from qtool.checkpoints.padding import asked_in, may_be_padded
from qtool.messages.sentences import AGAIN, some, verb
from qtool.messages.sentences import count as counted
from qtool.scheme import Scheme
from qtool.verification.finding import Finding
from qtool.verification.matrix import Measured

_SUBNORMAL = 0.01  # of the scales
_BOTH_SIGNS = 0.1  # of the scales, where a method gives scales a sign
_LARGE, _HUGE = 100, 10_000  # times the scales of the same matrix in other blocks
_OUTLIER = 1000
_SAME = 0.5  # of the rows
_FEW_GROUPS = 8
_WITHOUT_TEXT = ("rtn", "none")


def check_scales(artifact: Artifact, matrices: Sequence[Measured]) -> Iterator[Finding]:
    """scales: finite, not zero, positive, and not so small that they are hardly numbers.

    Symmetric integers may have negative ones: of 4 bits there is a code for -8 and none for 8, and
    AutoRound gives that code to the largest weight, whatever its sign.
    """
    converted = _signed(artifact)
    for m in matrices:
        name, what = m.entry.name, None
        if m.not_finite:
            what = f"{_part(m.not_finite, m.scales)} NaN or infinite"
        elif m.zero_scales:
            what = f"{_part(m.zero_scales, m.scales)} 0"
        elif m.negative and not converted and not _by_design(m):
            what = f"{_part(m.negative, m.scales)} negative"
        elif m.outer is not None and not (math.isfinite(m.outer) and m.outer > 0):
            what = f"the scale of the whole matrix is {m.outer}"
        if what:
            yield Finding(
                "error", "scales", name,
                f"{name}: {what}{_at(m)}; scales must be finite and positive: {_mend(artifact)}",
            )  # fmt: skip
        if m.broken_biases:
            yield Finding(
                "error", "scales", name,
                f"{name}: {_part(m.broken_biases, m.scales, 'bias')} NaN or infinite"
                f"{_at(m) if not m.not_finite else ''}: {AGAIN}",
            )  # fmt: skip
    small = [m for m in matrices if m.subnormal > _SUBNORMAL * m.scales]
    if small:
        yield Finding(
            "warning", "scales", small[0].entry.name,
            f"{counted(len(small), 'matrix')} ({some([m.entry.name for m in small])}) "
            f"{verb(len(small), 'have', 'has')} many scales so small that their type keeps only a "
            "few digits of them (subnormal); the weights there are distorted",
        )  # fmt: skip


def _part(number: int, whole: int, what: str = "scale") -> str:
    """`1 of 24 scales is`, `2 of 24 scales are`."""
    return f"{number} of {counted(whole, what)} {verb(number, 'are', 'is')}"


def _at(m: Measured) -> str:
    return f" (the first: {m.first_bad})" if m.first_bad else ""


def _mend(artifact: Artifact) -> str:
    """Inputs that no text reached are a reason where there was a text."""
    recipe = (artifact.provenance or {}).get("recipe")
    steps = [*recipe.get("method", []), *recipe.get("transforms", [])] if recipe else []
    measured = any(step not in _WITHOUT_TEXT for step in steps)
    return "quantize this layer anew, with text that reaches it" if measured else AGAIN


def check_kinds(artifact: Artifact, matrices: Sequence[Measured]) -> Iterator[Finding]:
    """alike: the matrices of one kind in all blocks have scales of one size, and are not the same.

    Scales that were folded in, and layers that make huge activations, explain a factor of 30.
    """
    kinds: dict[tuple[str, Scheme], list[Measured]] = defaultdict(list)
    for m in matrices:
        # Of one code alone check_codes speaks: zeros, as added blocks have, may have any scale.
        if math.isfinite(m.scale_size) and m.scale_size > 0 and m.low_code != m.high_code:
            kinds[re.sub(r"\.\d+(?=\.)", ".#", m.entry.name), m.scheme].append(m)
    for kind in kinds.values():
        usual = statistics.median_low(m.scale_size for m in kind)
        for m in kind:
            times = m.scale_size / usual
            if times > _LARGE or m.outliers > _OUTLIER:
                what = (
                    f"its scales are {times:,.0f} times those of the same matrix in other blocks"
                    if times > _LARGE
                    else f"its largest scale is {m.outliers:,.0f} times what 99 % of them are below"
                )
                yield Finding(
                    "error" if times > _HUGE else "warning", "alike", m.entry.name,
                    f"{m.entry.name}: {what}; no training makes such weights: fetch or make the "
                    "artifact again",
                )  # fmt: skip
    yield from _copies(artifact, [kind for kind in kinds.values() if len(kind) > 1])


def _copies(artifact: Artifact, kinds: Sequence[Sequence[Measured]]) -> Iterator[Finding]:
    """Matrices that are another block's, byte for byte."""
    first: dict[tuple[int, int], Measured] = {}
    copies: list[tuple[str, str]] = []
    for number, kind in enumerate(kinds):
        for m in kind:
            other = first.setdefault((number, m.mark), m)
            if other is not m and m.low_code != m.high_code and _same(artifact, m, other):
                copies.append((m.entry.name, other.entry.name))
    if copies:
        yield Finding(
            "warning", "alike", copies[0][0],
            f"{counted(len(copies), 'matrix')} ({some([name for name, _ in copies])}) "
            f"{verb(len(copies), 'are', 'is')} stored byte for byte as another one ({copies[0][0]} "
            f"as {copies[0][1]}); unless the model was "
            "made by repeating blocks, one of them is lost: fetch or make the artifact again",
        )  # fmt: skip


def _same(artifact: Artifact, one: Measured, other: Measured) -> bool:
    """Whether all that is stored of two matrices is the same."""
    parts = [m.entry.stored for m in (one, other)]
    raw = artifact.checkpoint.raw
    pairs = zip(*map(sorted, parts), strict=False)
    return len(parts[0]) == len(parts[1]) and all(np.array_equal(raw(a), raw(b)) for a, b in pairs)


def _by_design(m: Measured) -> bool:
    """Whether so many scales are negative that it is the method's way: about half of them are."""
    whole = m.scheme.symmetric and not m.scheme.is_float
    return whole and _BOTH_SIGNS * m.scales < m.negative < (1 - _BOTH_SIGNS) * m.scales


def _signed(artifact: Artifact) -> bool:
    """Whether the scales come from a GGUF file, where they may be negative."""
    record = artifact.provenance or {}
    return any("gguf" in str(record.get(key)).lower() for key in ("made_from", "conversions"))


def _is_zero(m: Measured) -> bool:
    """Whether every weight is 0 as of a matrix that was so: of floats the scales tell it, which are
    1 where there was nothing to scale."""
    if m.low_code != m.high_code:
        return False
    if m.scheme.is_float:
        whole = 1.0 if m.outer is None else m.outer  # of NVFP4, which matrices may have in common
        whole = 1 / whole if m.scheme.outer == "divides" and whole else whole
        near = math.isclose(m.scale_size, whole, rel_tol=1e-6)
        return m.low_code == 0 and m.outliers == 1.0 and near
    return m.zeros is not None and m.zeros.is_only(m.low_code)


def check_codes(artifact: Artifact, matrices: Sequence[Measured]) -> Iterator[Finding]:
    """codes: a matrix with a single code holds nothing."""
    zeros_added = asked_in((artifact.provenance or {}).get("recipe"))
    for m in matrices:
        name = m.entry.name
        wider = bool(zeros_added) and may_be_padded(name)
        rows = m.entry.shape[0]
        if m.not_numbers:
            yield Finding(
                "error", "codes", name,
                f"{name}: {m.not_numbers:,} of its codes are NaN or infinite; quantize this layer "
                "anew",
            )  # fmt: skip
        elif _is_zero(m):
            yield Finding(
                "warning", "codes", name,
                f"{name}: every weight is 0; the layer does nothing, unless the model has it so",
            )  # fmt: skip
        elif m.low_code == m.high_code:
            yield Finding(
                "error", "codes", name,
                f"{name}: every code is {m.low_code}, so all that the model knew here is gone; "
                "quantize this layer anew",
            )  # fmt: skip
        elif m.hole and not wider:
            yield Finding(
                "error", "codes", name,
                f"{name}: {said_blank(m.hole, AGAIN)}",
            )  # fmt: skip
        elif m.even:
            yield Finding(
                "warning", "codes", name,
                f"{name}: every code is about as frequent as any other, as in random bytes; the "
                "weights of a trained model are nearly all small, so this is hardly its matrix",
            )  # fmt: skip
        elif m.same_rows > _SAME * rows and not wider:
            yield Finding(
                "warning", "codes", name,
                f"{name}: in {m.same_rows} of {rows} rows every code is the same; most of the "
                "layer is gone, unless the model has it so",
            )  # fmt: skip


def check_zeros(artifact: Artifact, matrices: Sequence[Measured]) -> Iterator[Finding]:
    """zeros: in the middle where symmetric, and none that ran over an end of its range."""
    odd, far, ignored = [], [], []
    for m in matrices:
        middle = 1 << (m.scheme.bits - 1)
        zeros = m.zeros
        if zeros is None:
            continue
        constant = zeros.least == zeros.most
        if zeros.ignored:
            ignored.append(m)
        elif m.scheme.symmetric and not (constant and zeros.least in (middle, middle - 1)):
            odd.append(m)
        elif zeros.at_ends:
            far.append(m)
    if odd:
        z = odd[0].zeros
        assert z is not None
        yield Finding(
            "error", "zeros", odd[0].entry.name,
            f"the config says symmetric, and {counted(len(odd), 'matrix')} "
            f"({some([m.entry.name for m in odd])}) {verb(len(odd), 'have', 'has')} other zeros "
            f"than {1 << (odd[0].scheme.bits - 1)} ({z.least} to {z.most}); engines that believe "
            f"the config ignore them: set {_asymmetric(artifact)}, or quantize anew",
        )  # fmt: skip
    if ignored:
        yield Finding(
            "error", "zeros", ignored[0].entry.name,
            f"the config says symmetric, and {counted(len(ignored), 'matrix')} "
            f"({some([m.entry.name for m in ignored])}) {verb(len(ignored), 'have', 'has')} zero "
            "points stored that are not in the middle; engines that believe the config ignore "
            "them: set symmetric to false",
        )  # fmt: skip
    groups = sum(m.zeros.at_ends for m in far if m.zeros)
    if far:
        top = (1 << far[0].scheme.bits) - 1
        said = (
            f"the zero 0 or {top}, though their weights would then be far from 0 and all of one "
            f"sign: zeros that ran over the end of their range (0 less one stored as {top}); make "
            "the artifact again"
        )
        if far[0].scheme.outer == "offset":
            said = f"biases that put their weights far from 0 and all on one side of it: {AGAIN}"
        yield Finding(
            "error" if groups >= _FEW_GROUPS else "warning", "zeros", far[0].entry.name,
            f"{counted(groups, 'group')} of {counted(len(far), 'matrix')} "
            f"({some([m.entry.name for m in far])}) {verb(groups, 'have', 'has')} {said}",
        )  # fmt: skip
    others = [m for m in matrices if m.zeros and m.zeros.v1_others]
    if others:
        number = sum(m.zeros.v1_others for m in others if m.zeros)
        yield Finding(
            "warning", "zeros", others[0].entry.name,
            f"{counted(number, 'zero')} of {counted(len(others), 'matrix')} "
            f"({some([m.entry.name for m in others])}) read as {artifact.found.writer} means them, "
            "which takes ones from whole words of zeros; engines that read each by itself, as vLLM "
            "does, have others there: `qtool convert --to gptq-v2` stores them for all",
        )  # fmt: skip
        return
    wraps = sum(m.zeros.v1_wraps for m in matrices if m.zeros)
    if wraps:
        first = next(m for m in matrices if m.zeros and m.zeros.v1_wraps)
        yield Finding(
            "warning", "zeros", first.entry.name,
            f"{counted(wraps, 'zero')} of 0 stored as {(1 << first.scheme.bits) - 1}, as v1 must; "
            f"engines that add 1 without wrapping read {1 << first.scheme.bits}: write gptq_v2",
        )  # fmt: skip


def _asymmetric(artifact: Artifact) -> str:
    """What a config of this format has to say of zeros that are not in the middle."""
    key, value = {"awq": ("zero_point", "true")}.get(artifact.found.quant_method, ("sym", "false"))
    return f"{key} to {value}"


def check_order(artifact: Artifact, matrices: Sequence[Measured]) -> Iterator[Finding]:
    """g-idx: there where the config says desc_act, and even."""
    if artifact.found.format != "gptq":
        return
    config = quantization_config(artifact.checkpoint)
    reordered = [m.entry.name for m in matrices if m.reordered]
    lost = [m.entry.name for m in matrices if f"{m.entry.module}.g_idx" not in m.entry.stored]
    uneven = [m for m in matrices if m.uneven]
    if config.get("desc_act") is True and lost:
        yield Finding(
            "error", "g-idx", lost[0],
            f"the config says desc_act, and {counted(len(lost), 'matrix')} "
            f"{verb(len(lost), 'have', 'has')} no g_idx: {some(lost)}; which column is of which "
            "group is lost: make the artifact again",
        )  # fmt: skip
    if config.get("desc_act") is False and reordered and not uneven:
        yield Finding(
            "error", "g-idx", reordered[0],
            f"the config says desc_act false, and {counted(len(reordered), 'matrix')} "
            f"({some(reordered)}) {verb(len(reordered), 'have', 'has')} groups out of order; "
            "engines that believe it do not look at g_idx: set desc_act to true",
        )  # fmt: skip
    if uneven:
        yield Finding(
            "error", "g-idx", uneven[0].entry.name,
            f"{counted(len(uneven), 'matrix')} ({some([m.entry.name for m in uneven])}) with a "
            f"g_idx that does not give every group {uneven[0].scheme.group_size} columns; it is "
            "damaged: make the artifact again",
        )  # fmt: skip
