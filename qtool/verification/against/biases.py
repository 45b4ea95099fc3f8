"""Biases against the source's: they are divided along with the rows before them, or not at all."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from qtool.dequantize import dequantize
from qtool.formats.safetensors_file import FLOAT_DTYPES
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some
from qtool.scheme import GroupQuant
from qtool.verification import config
from qtool.verification.against.compared import Compared
from qtool.verification.against.fit import WORTH, spread, uneven
from qtool.verification.against.folds import BEFORE, PLUS_ONE
from qtool.verification.against.side_by_side import Floats, norm
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

CHECK = "layer-error"
ROUNDING = 0.01  # relative: what another dtype may change


def check_biases(
    subject: Subject, compared: Sequence[Compared], norms: Mapping[str, Mapping[str, Floats]]
) -> Iterator[Finding]:
    """layer-error: a bias is the source's where the rows before it are."""
    found = {c.name: c for c in compared}
    source = subject.source
    scaled = {c.name for c in compared if c.rows is not None}
    scaled |= {key.removesuffix(PLUS_ONE) for block in norms.values() for key in block}
    told = {c.name for c in compared if c.untold}
    scales = config.dequantized(subject) and norms  # which folds leave in norms, too
    wrong: list[str] = []
    folded: list[str] = []
    for name, entry in subject.entries.items():
        weight = name.removesuffix(".bias") + ".weight"
        if source is None or not name.endswith(".bias") or name not in source.tensors:
            continue
        if weight in scaled | told or entry.dtype not in FLOAT_DTYPES:
            continue
        if tuple(source.tensors[name].shape) != entry.shape:
            continue
        old = source.float32(name)
        new = subject.artifact.checkpoint.float32(entry.stored[0])
        if norm(old - new) <= ROUNDING * norm(old):
            continue
        c = found.get(weight)
        if c is None or not as_its_rows(subject, c, old, new):
            (folded if scales and _positive(old, new) else wrong).append(name)
    if folded:
        yield Finding(
            "note", CHECK, folded[0],
            f"{counted(len(folded), 'vector')} unlike the source's ({some(folded)}): {BEFORE}",
        )  # fmt: skip
    if wrong:
        yield Finding(
            "error", CHECK, wrong[0],
            f"{counted(len(wrong), 'vector')} unlike the source's ({some(wrong)}), of layers that "
            "were not scaled; fetch or make the artifact again",
        )  # fmt: skip


def _positive(old: Floats, new: Floats) -> bool:
    """Whether one may be the other divided by scales."""
    return bool((np.sign(old) == np.sign(new)).all())


def as_its_rows(subject: Subject, c: Compared, old: Floats, new: Floats) -> bool:
    """Whether the rows of the matrix have the bias's factors, too slight beside what rounding
    changes to be found in the matrix alone."""
    assert subject.source is not None
    stored, weight = subject.artifact.read(c.name), subject.source.float32(c.name)
    values = dequantize(stored) if isinstance(stored, GroupQuant) else stored
    if weight.ndim != 2 or values.shape != weight.shape or len(old) != len(weight):
        return False
    target = weight if c.columns is None else weight * c.columns
    size = np.square(target, dtype=np.float64).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        rows = (values * target).sum(axis=1, dtype=np.float64) / size
        factors = new / old
    good = np.isfinite(rows) & np.isfinite(factors)
    mine, its = rows[good].astype(np.float32), factors[good]
    return spread(mine, its) < WORTH * uneven(mine)
