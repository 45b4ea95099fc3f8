"""Every layer against the source, and scales that were moved between layers accounted for.

A fold (AWQ, SmoothQuant) multiplies the columns of all readers of an input, and divides what makes
that input: a norm, or the rows of a projection. Each half that is found must have its other half.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from qtool import structure
from qtool.checkpoint import Checkpoint
from qtool.formats.safetensors_file import FLOAT_DTYPES
from qtool.verification import config
from qtool.verification.finding import Finding, LayerError
from qtool.verification.scaling import SURE, Compared, Floats, fit, norm, spread, uneven
from qtool.verification.sentences import count as counted
from qtool.verification.sentences import some
from qtool.verification.subject import Subject

CHECK = "layer-error"
_PLUS_ONE = " (1 + weight)"
_ROUNDING = 0.01  # relative: what another dtype may change
_MATCH = 0.1  # of the logarithm: how well two halves of a fold must fit
_CHANCE = 0.25  # of the logarithm: rows that differ less may do so by rounding
_MANY_OFF = 0.5  # of the groups: the convention is wrong, not single zeros
_FEW_OFF = 0.001


def changed_norms(subject: Subject) -> dict[str, dict[str, Floats]]:
    """By block ("" outside): of vectors that differ from the source, old / new weight."""
    found: dict[str, dict[str, Floats]] = defaultdict(dict)
    if subject.source is None:
        return found
    for name, entry in subject.entries.items():
        if entry.scheme is not None or len(entry.shape) != 1 or not name.endswith(".weight"):
            continue
        if name not in subject.source.tensors or entry.dtype not in FLOAT_DTYPES:
            continue
        old = subject.source.float32(name)
        new = subject.artifact.checkpoint.float32(entry.stored[0])
        if old.shape != new.shape or norm(old - new) <= 1e-3 * norm(old):
            continue
        for one, key in ((0, name), (1, name + _PLUS_ONE)):
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = (old + one) / (new + one)
            good = np.isfinite(ratio) & (ratio > 0)
            found[block_of(subject, name)][key] = np.where(good, ratio, 1).astype(np.float32)
    return found


def block_of(subject: Subject, name: str) -> str:
    """`model.layers.3`, or "" for what is in no block."""
    blocks = subject.blocks
    if blocks is None or not name.startswith(blocks.prefix + "."):
        return ""
    number = name[len(blocks.prefix) + 1 :].split(".", 1)[0]
    return f"{blocks.prefix}.{number}" if number.isdecimal() else ""


def dense_compared(
    subject: Subject, norms: Mapping[str, Mapping[str, Floats]]
) -> tuple[list[Compared], list[Finding]]:
    """The unquantized tensors that differ from the source, scales taken out where there are any."""
    source = subject.source
    compared: list[Compared] = []
    lost: list[str] = []
    changed = {key for block in norms.values() for key in block}
    for name, entry in subject.entries.items():
        if source is None or name not in source.tensors or entry.scheme is not None:
            continue
        info = source.tensors[name]
        if tuple(info.shape) != entry.shape or name in changed:
            continue
        if entry.dtype not in FLOAT_DTYPES or info.dtype not in FLOAT_DTYPES:
            continue
        if _same(subject, name):
            continue
        old = source.float32(name)
        new = subject.artifact.checkpoint.float32(entry.stored[0])
        plain = norm(old - new)
        if not plain > _ROUNDING * norm(old):
            continue
        if old.ndim == 2:
            found = fit(new, old, norms.get(block_of(subject, name), {}))
            left = norm(found.target - new)
            if left <= _ROUNDING * norm(found.target):
                compared.append(
                    Compared(
                        name, left / norm(found.target), plain / norm(old), None, None,
                        found.columns, found.rows, found.norm, 0, 0, 0,
                    )
                )  # fmt: skip
                continue
        elif name.endswith(".bias"):  # divided along with its rows
            continue
        lost.append(f"{name} (by {plain / norm(old) if norm(old) else float('inf'):.0%})")
    findings = []
    was = [one for one in config.conversions(subject) if config.side(one, "to") == "hf"]
    if lost and was:
        before = config.side(was[-1], "from")
        findings.append(
            Finding(
                "note", CHECK, "",
                f"{counted(len(lost), 'matrix')} differ from the source, since they were "
                f"dequantized from {before}: {some(lost)}",
            )
        )  # fmt: skip
    elif lost:
        findings.append(
            Finding(
                "error", CHECK, lost[0].split(" ")[0],
                f"{counted(len(lost), 'unquantized tensor')} differ from the source: "
                f"{some(lost)}; is it the model that this artifact was made of?",
            )
        )  # fmt: skip
    return compared, findings


def _same(subject: Subject, name: str) -> bool:
    """Whether a dense tensor has the source's bytes; a part in memory at a time."""
    entry, source = subject.entries[name], subject.source
    assert source is not None
    if entry.dtype != source.tensors[name].dtype or not entry.shape:
        return False
    rows = entry.shape[0]
    step = max(1, (rows << 24) // max(1, entry.nbytes))
    return all(
        np.array_equal(
            subject.artifact.checkpoint.part(entry.stored[0], at, min(rows, at + step)),
            source.part(name, at, min(rows, at + step)),
        )
        for at in range(0, rows, step)
    )


def layer_errors(subject: Subject, compared: Sequence[Compared]) -> list[LayerError]:
    """One line a matrix."""
    schemes = {name: str(entry.scheme) for name, entry in subject.entries.items()}
    return [LayerError(c.name, schemes[c.name], c.error, c.expected) for c in compared]


def check_errors(subject: Subject, compared: Sequence[Compared]) -> Iterator[Finding]:
    """layer-error: no matrix is farther from its source than its scheme explains."""
    quantized = [c for c in compared if c.groups]
    shifted = [c for c in quantized if c.off > _MANY_OFF * c.groups]
    if shifted:
        yield Finding(
            "error", "zero-convention", shifted[0].name,
            f"against the source, the zeros of {counted(len(shifted), 'matrix')} "
            f"({some([c.name for c in shifted])}) are off by {shifted[0].step:+d}; they are "
            "labelled with, or were written by, another convention (v1 stores zeros less one)",
        )  # fmt: skip
    single = [c for c in quantized if c not in shifted and c.off > _FEW_OFF * c.groups + 1]
    if single:
        groups = sum(c.off for c in single)
        yield Finding(
            "error", "zeros", single[0].name,
            f"against the source, the zeros of {counted(groups, 'group')} of "
            f"{counted(len(single), 'matrix')} ({some([c.name for c in single])}) are off, most by "
            f"{single[0].step:+d}; they ran over an end of their range: make the artifact again",
        )  # fmt: skip
    wrong = [c for c in quantized if not c.explained and c not in shifted]
    if wrong and _rotated(subject):
        yield Finding(
            "note", CHECK, wrong[0].name,
            f"the embedding has the source's norms and other directions, so the model was rotated: "
            f"the errors of {counted(len(wrong), 'matrix')} against the source mean nothing",
        )  # fmt: skip
        wrong = []
    if wrong:
        worst = sorted(wrong, key=lambda c: -c.error / (c.expected or 1))
        c = worst[0]
        yield Finding(
            "error" if any(w.wrong for w in wrong) else "warning", CHECK, c.name,
            f"{counted(len(wrong), 'matrix')} farther from the source than quantizing explains: "
            f"{c.name} is off by {c.error:.1%}, its scales explain {c.expected or 0:.1%}"
            + (f"; also {some([w.name for w in worst[1:]])}" if len(worst) > 1 else "")
            + _other_model(subject),
        )  # fmt: skip
    scaled = [c for c in compared if c.columns is not None or c.rows is not None]
    if scaled:
        yield Finding(
            "note", CHECK, scaled[0].name,
            f"{counted(len(scaled), 'matrix')} with scales folded in (AWQ, smoothing): errors are "
            "counted with these taken out",
        )  # fmt: skip


def _rotated(subject: Subject) -> bool:
    """Whether the embedding's rows have the source's lengths and not its directions."""
    source = subject.source
    names = [n for n, role in subject.roles.items() if role.reason == "embedding"]
    if source is None or not names or names[0] not in source.tensors:
        return False
    entry = subject.entries[names[0]]
    if entry.scheme is not None or source.tensors[names[0]].shape != entry.shape:
        return False
    old = source.float32(names[0])[:4096]
    new = subject.artifact.checkpoint.float32(entry.stored[0])[:4096]
    before, after = np.linalg.norm(old, axis=1), np.linalg.norm(new, axis=1)
    return norm(old - new) > 0.5 * norm(old) and norm(before - after) < 0.02 * norm(before)


def _other_model(subject: Subject) -> str:
    """Whether the provenance names another source: only worth its reading where errors are odd."""
    record = (subject.artifact.provenance or {}).get("source")
    said = record.get("digest") if isinstance(record, Mapping) else None
    if isinstance(said, str) and isinstance(subject.source, Checkpoint):
        if said != f"sha256:{subject.source.digest()}":
            return "; by qtool.json the artifact was made of another model than this one"
        return "; by qtool.json the artifact was made of this model"
    return "; was it made of another model?"


def check_folds(
    subject: Subject,
    compared: Sequence[Compared],
    norms: Mapping[str, Mapping[str, Floats]],
) -> Iterator[Finding]:
    """folds: what one layer was multiplied by, another was divided by."""
    readers: dict[str, list[Compared]] = defaultdict(list)
    sites: dict[str, list[Compared]] = defaultdict(list)
    for c in compared:
        if c.norm is not None:
            readers[c.norm.removesuffix(_PLUS_ONE)].append(c)
        sites[structure.input_site(c.name.removesuffix(".weight"))].append(c)
    idle = {
        key.removesuffix(_PLUS_ONE)
        for block in norms.values()
        for key, ratio in block.items()
        if uneven(ratio) > _MATCH
    } - readers.keys()
    if idle:
        names = sorted(idle)
        yield Finding(
            "error", "folds", names[0],
            f"{counted(len(idle), 'norm')} differ from the source ({some(names)}), and no layer "
            "was scaled to make up for it; is it the model that this artifact was made of?",
        )  # fmt: skip
    left = [
        c.name
        for members in sites.values()
        if len({m.norm for m in members}) > 1
        for c in members
        if c.norm is None
    ]
    if left:
        yield Finding(
            "error", "folds", left[0],
            f"{counted(len(left), 'matrix')} ({some(left)}) read a norm that was divided by "
            "scales, and were not multiplied by them as their neighbours were; make the artifact "
            "again",
        )  # fmt: skip
    halves = [
        c.name
        for group in _by_block(subject, compared).values()
        for c in group
        if _half(subject, c, group)
    ]
    if halves:
        yield Finding(
            "error", "folds", halves[0],
            f"{counted(len(halves), 'matrix')} ({some(halves)}) have scales folded in, and no "
            "layer before or after has the inverse; make the artifact again",
        )  # fmt: skip


def settled(subject: Subject, compared: Sequence[Compared]) -> list[Compared]:
    """Scales without a counterpart are chance where the scheme explains the error without them:
    rounding errors that depend on the column, as GPTQ's do, look like scales."""
    found = {c.name: c for c in compared}
    for group in _by_block(subject, compared).values():
        names = [c.name for c in group]
        changed = True
        while changed:
            changed = False
            for name in names:
                c, near = found[name], [found[n] for n in names]
                if not _half(subject, c, near):
                    continue
                if c.norm is None and c.plainly_explained:
                    found[name], changed = c.as_it_is(), True
                elif c.norm is not None and uneven(c.rows) < _CHANCE:
                    found[name], changed = replace(c, rows=None), True
    return [found[c.name] for c in compared]


def _by_block(subject: Subject, compared: Sequence[Compared]) -> dict[str, list[Compared]]:
    """The matrices with scales, by block."""
    groups: dict[str, list[Compared]] = defaultdict(list)
    for c in compared:
        if c.columns is not None or c.rows is not None:
            groups[block_of(subject, c.name)].append(c)
    return groups


def _half(subject: Subject, c: Compared, near: Sequence[Compared]) -> bool:
    """Whether the scales of a matrix have no counterpart in its block; its neighbours first."""
    parent = c.name.removesuffix(".weight").rpartition(".")[0] + "."
    others = sorted((o for o in near if o is not c), key=lambda o: not o.name.startswith(parent))
    if c.columns is not None and c.norm is None:
        made = (o.rows for o in others if o.rows is not None)
        return not any(_inverse(subject, rows, c.columns) for rows in made)
    if c.rows is not None:
        read = (o.columns for o in others if o.columns is not None and o.norm is None)
        return not any(_inverse(subject, c.rows, columns) for columns in read)
    return False


def _inverse(subject: Subject, rows: Floats, columns: Floats) -> bool:
    """Whether rows [out] of a producer and columns [in] of a reader cancel."""
    inverse = (1 / rows).astype(np.float32)
    if rows.size >= columns.size:  # larger: q, k and v, or gate and up, in one
        ends = (inverse[rows.size - columns.size :], inverse[: columns.size])
        return any(_fits(end, columns) for end in ends)
    if columns.size % rows.size:
        return False
    width = _head_width(subject)
    if width is None or rows.size % width:
        return False
    repeats = columns.size // rows.size
    heads = np.repeat(inverse.reshape(-1, width), repeats, axis=0).reshape(-1)
    return _fits(heads, columns)


def _fits(one: Floats, other: Floats) -> bool:
    """Whether two sets of scales are the same, and differ enough among themselves to tell."""
    return spread(one, other) < min(_MATCH, SURE * uneven(other))


def _head_width(subject: Subject) -> int | None:
    text = structure.text_config(subject.config)
    width = text.get("head_dim")
    if isinstance(width, int) and width > 0:
        return width
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        return hidden // heads
    return None
