"""The unquantized tensors against the source: its numbers, or what scales make of them."""

import math
from collections.abc import Iterator, Mapping, Sequence

from qtool.formats.safetensors_file import FLOAT_DTYPES
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some
from qtool.verification import config
from qtool.verification.against import casts, pruned
from qtool.verification.against.biases import as_its_rows
from qtool.verification.against.casts import ROUNDING, only_cast, same
from qtool.verification.against.compared import LOST, Compared
from qtool.verification.against.exact import only_scaled
from qtool.verification.against.factors import multiple_of
from qtool.verification.against.fit import fit
from qtool.verification.against.folds import PLUS_ONE, block_of
from qtool.verification.against.likeness import numbers_changed
from qtool.verification.against.pruned import is_pruned
from qtool.verification.against.side_by_side import (
    Floats,
    SideBySide,
    norm,
    rows_of_array,
    scaled,
)
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

CHECK = "layer-error"


def dense_compared(
    subject: Subject, norms: Mapping[str, Mapping[str, Floats]], matrices: Sequence[Compared] = ()
) -> tuple[list[Compared], list[Finding]]:
    """The unquantized tensors that differ from the source, scales taken out where there are any.

    matrices: the quantized ones, compared.
    """
    source = subject.source
    compared: list[Compared] = []
    lost: list[str] = []
    broken: dict[str, str] = {}
    thinned: list[str] = []
    other: list[str] = []  # of them, as far off as zeros, with scales taken out
    layers = {c.name: c for c in matrices}
    cast: dict[str, tuple[str, str]] = {}
    changed = {key for block in norms.values() for key in block}
    for name, entry in subject.entries.items():
        if source is None or name not in source.tensors or entry.scheme is not None:
            continue
        info = source.tensors[name]
        if tuple(info.shape) != entry.shape:
            continue
        if entry.dtype not in FLOAT_DTYPES or info.dtype not in FLOAT_DTYPES:
            continue
        if same(subject, name):
            continue
        if only_cast(subject, name):
            cast[name] = info.dtype, entry.dtype
            continue
        old = source.float32(name)
        new = subject.artifact.checkpoint.float32(entry.stored[0])
        if norm(old - new) <= LOST * norm(old) and is_pruned(new) and not is_pruned(old):
            thinned.append(name)
            continue
        layer = layers.get(name.removesuffix("bias") + "weight") if name.endswith(".bias") else None
        if layer is not None and as_its_rows(subject, layer, old, new):
            continue
        if (number := numbers_changed(new, old, (entry.dtype, info.dtype))) is not None:
            broken[name] = f"{name} ({number:,} of {new.size:,})"
            scales = only_scaled(new, old, norms.get(block_of(subject, name), {}))
            if scales is not None:
                compared.append(
                    Compared(
                        name, 0, norm(old - new) / norm(old), None, None,
                        scales.columns, scales.rows, scales.norm, 0, 0, 0,
                    )
                )  # fmt: skip
            continue
        plain = norm(old - new)
        if name in changed or not plain > ROUNDING * norm(old):
            continue
        left = plain / norm(old) if norm(old) else math.inf
        if old.ndim == 2:
            pair = SideBySide((len(old), old.shape[1]), rows_of_array(new), rows_of_array(old))
            found = fit(pair, norms.get(block_of(subject, name), {}))
            left = found.left / max(norm(scaled(old, found.columns, found.rows)), 1e-30)
            if left <= ROUNDING:
                compared.append(
                    Compared(
                        name, left, plain / norm(old), None, None,
                        found.columns, found.rows, found.norm, 0, 0, 0, as_columns=found.as_columns,
                        multiple=multiple_of(found),
                    )
                )  # fmt: skip
                continue
        elif name.endswith(".bias"):  # divided along with its rows, or with its norm
            continue
        lost.append(f"{name} (by {plain / norm(old) if norm(old) else math.inf:.0%})")
        if left > LOST:
            other.append(lost[-1])
    for c in compared:  # scales that are 1 for most inputs leave most numbers, of norms too
        broken.pop(c.name, None)
        broken.pop((c.norm or "").removesuffix(PLUS_ONE), None)
    told = _told(subject, broken, lost, other)
    return compared, [*pruned.told(CHECK, thinned), *casts.told(CHECK, cast), *told]


def _told(
    subject: Subject, broken: Mapping[str, str], lost: Sequence[str], other: Sequence[str]
) -> Iterator[Finding]:
    if broken:
        yield Finding(
            "error", CHECK, next(iter(broken)),
            f"{counted(len(broken), 'unquantized tensor')} with the source's numbers, but for "
            f"some: {some(list(broken.values()))}; it is damaged: fetch or make the "
            "artifact again",
        )  # fmt: skip
    was = config.dequantized(subject)
    if was and other:
        yield Finding(
            "error", CHECK, other[0].split(" ")[0],
            f"{counted(len(other), 'matrix')} with nothing in common with the source: "
            f"{some(other)}; is it the model that this artifact was made of?",
        )  # fmt: skip
    elif lost and was:
        before = config.side(was[-1], "from")
        yield Finding(
            "note", CHECK, "",
            f"{counted(len(lost), 'matrix')} differ from the source, since they were "
            f"dequantized from {before}: {some(lost)}",
        )  # fmt: skip
    elif lost:
        yield Finding(
            "error", CHECK, lost[0].split(" ")[0],
            f"{counted(len(lost), 'unquantized tensor')} "
            f"differ{'s' * (len(lost) == 1)} from the source: {some(lost)}; is it the model "
            "that this artifact was made of?",
        )  # fmt: skip
