"""Every layer against the source: what its scheme explains, and what is too much."""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from qtool.artifacts.stored_config import quantization_config
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.formats.compressed_tensors_transforms import KEY
from qtool.formats.safetensors_file import FLOAT_DTYPES
from qtool.scheme import Scheme
from qtool.streaming.weights import rows_of
from qtool.verification import config
from qtool.verification.against import casts, made_up, pruned, single_scales, to_nearest
from qtool.verification.against.biases import as_its_rows
from qtool.verification.against.casts import ROUNDING, only_cast, same
from qtool.verification.against.exact import only_scaled
from qtool.verification.against.factors import multiple_of
from qtool.verification.against.fit import fit
from qtool.verification.against.folds import PLUS_ONE, block_of
from qtool.verification.against.likeness import numbers_changed
from qtool.verification.against.pruned import is_pruned
from qtool.verification.against.scaling import LOST, Compared
from qtool.verification.against.side_by_side import (
    Floats,
    SideBySide,
    norm,
    rows_of_array,
    scaled,
)
from qtool.verification.finding import Finding, LayerError
from qtool.verification.sentences import AGAIN, some
from qtool.verification.sentences import count as counted
from qtool.verification.subject import Subject

CHECK, MADE_OF = "layer-error", "made-of"
_COARSE = 3  # bits
_MANY_OFF = 0.5  # of the groups: the convention is wrong, not single zeros
_FEW_OFF = 0.001
_MOST = 0.5  # of the matrices: fewer are damaged, and the model is this one
_FROM_ZEROS = 3.0  # times what zeros explain that are off


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
    findings = [*pruned.told(CHECK, thinned), *casts.told(CHECK, cast)]
    if broken:
        findings.append(
            Finding(
                "error", CHECK, next(iter(broken)),
                f"{counted(len(broken), 'unquantized tensor')} with the source's numbers, but for "
                f"some: {some(list(broken.values()))}; it is damaged: fetch or make the "
                "artifact again",
            )
        )  # fmt: skip
    was = config.dequantized(subject)
    if was and other:
        findings.append(
            Finding(
                "error", CHECK, other[0].split(" ")[0],
                f"{counted(len(other), 'matrix')} with nothing in common with the source: "
                f"{some(other)}; is it the model that this artifact was made of?",
            )
        )  # fmt: skip
    elif lost and was:
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
                f"{counted(len(lost), 'unquantized tensor')} "
                f"differ{'s' * (len(lost) == 1)} from the source: {some(lost)}; is it the model "
                "that this artifact was made of?",
            )
        )  # fmt: skip
    return compared, findings


def layer_errors(subject: Subject, compared: Sequence[Compared]) -> list[LayerError]:
    """One line a matrix."""
    schemes = {name: str(entry.scheme) for name, entry in subject.entries.items()}
    return [
        LayerError(
            c.name, schemes[c.name], c.error if c.as_stored is None else c.as_stored, c.expected
        )
        for c in compared
    ]


def check_errors(subject: Subject, compared: Sequence[Compared]) -> Iterator[Finding]:
    """layer-error: no matrix is farther from its source than its scheme explains."""
    # What is not finite is told of by the check of scales.
    quantized = [c for c in compared if c.groups and math.isfinite(c.error)]
    thinned = [c.name for c in quantized if c.pruned and c.error <= LOST]
    yield from pruned.told(CHECK, thinned)
    quantized = [c for c in quantized if c.name not in thinned]
    turned = rotated(subject)
    off = {} if turned else single_scales.by_matrix(compared)
    off = {name: scales for name, scales in off.items() if not _learned(subject, name)}
    yield from single_scales.told(CHECK, off)
    zeros_off = [c for c in quantized if _by_zeros(c)]
    shifted = [c for c in zeros_off if c.off > _MANY_OFF * c.groups]
    if shifted:
        yield Finding(
            "error", "zero-convention", shifted[0].name,
            f"against the source, the zeros of {counted(len(shifted), 'matrix')} "
            f"({some([c.name for c in shifted])}) are off by {shifted[0].step:+d}; they are "
            "labelled with, or were written by, another convention (v1 stores zeros less one)",
        )  # fmt: skip
    single = [c for c in zeros_off if c not in shifted and c.off > _FEW_OFF * c.groups + 1]
    if single:
        groups = sum(c.off for c in single)
        yield Finding(
            "error", "zeros", single[0].name,
            f"against the source, the zeros of {counted(groups, 'group')} of "
            f"{counted(len(single), 'matrix')} ({some([c.name for c in single])}) are off, most by "
            f"{single[0].step:+d}: {AGAIN}",
        )  # fmt: skip
    torn = [] if turned else [c for c in quantized if _has_lost_codes(c)]
    yield from _lost_codes(torn)
    other = {c.name for c in (*shifted, *single, *torn)}
    blank = [c for c in quantized if c.blanks and not c.wrong and c.name not in other]
    blank = [] if turned else blank
    yield from _blank(blank)
    known = {*off, *(c.name for c in (*shifted, *torn, *blank))}
    wrong = [c for c in quantized if not c.explained and c.name not in known]
    if wrong and turned:
        yield Finding(
            "note", CHECK, wrong[0].name,
            f"{turned}, so the model was rotated: the errors of {counted(len(wrong), 'matrix')} "
            "against the source mean nothing",
        )  # fmt: skip
        wrong = []
    if made_up.makes_up((subject.artifact.provenance or {}).get("recipe")):
        moved = [c for c in wrong if c.error <= made_up.FARTHEST]
        yield from made_up.told(CHECK, [(c.name, c.error) for c in moved])
        wrong = [c for c in wrong if c not in moved]
    nearest = to_nearest.to_nearest((subject.artifact.provenance or {}).get("recipe"))
    other = {*known, *(c.name for c in (*wrong, *single))}
    rest = [c for c in quantized if c.name not in other and not (c.like and c.like.unlike)]
    strange = [] if turned else to_nearest.unusual(rest, nearest)
    yield from to_nearest.told(CHECK, strange, nearest)
    if wrong:
        worst = sorted(wrong, key=lambda c: -c.error / (c.expected or 1))
        c = worst[0]
        yield Finding(
            "error" if any(w.wrong for w in wrong) else "warning", CHECK, c.name,
            f"{counted(len(wrong), 'matrix')} farther from the source than quantizing explains: "
            f"{c.name} is off by {c.error:.1%}, its scales explain {c.expected or 0:.1%}"
            + (f"; also {some([w.name for w in worst[1:]])}" if len(worst) > 1 else "")
            + _other_model(subject, len(wrong) > _MOST * len(quantized)),
        )  # fmt: skip
    far = wrong if any(w.wrong for w in wrong) else ()
    known = {c.name for c in (*shifted, *single, *torn, *blank, *far)}
    if not turned:
        yield from _unlike([c for c in quantized if c.name not in known])
    folded_in = [c for c in compared if single_scales.is_folded(c)]
    if folded_in:
        yield Finding(
            "note", CHECK, folded_in[0].name,
            f"{counted(len(folded_in), 'matrix')} with scales folded in (AWQ, smoothing): "
            "errors are counted with these taken out",
        )  # fmt: skip


def _learned(subject: Subject, name: str) -> bool:
    """Whether tuning may have made a scale that is far from others: in so few bits most codes lie
    at the ends, and what is left beside them tells no scale for sure."""
    scheme = subject.entries[name].scheme
    if not isinstance(scheme, Scheme) or scheme.bits > _COARSE:
        return False
    recipe = (subject.artifact.provenance or {}).get("recipe")
    method = recipe.get("method") if isinstance(recipe, Mapping) else None
    by_auto_round = "autoround_version" in quantization_config(subject.artifact.checkpoint)
    return by_auto_round or (isinstance(method, list) and "tune" in method)


def _has_lost_codes(c: Compared) -> bool:
    """Whether groups have lost codes of a matrix that is the source's otherwise."""
    return not c.wrong and c.lost_codes > _FEW_OFF * c.groups + 1


def _lost_codes(compared: Sequence[Compared]) -> Iterator[Finding]:
    """Groups whose weights are elsewhere on average, though not all of them by the same."""
    if compared:
        groups = sum(c.lost_codes for c in compared)
        yield Finding(
            "error", CHECK, compared[0].name,
            f"against the source, {counted(groups, 'group')} of {counted(len(compared), 'matrix')} "
            f"({some([c.name for c in compared])}) have codes that are others by whole steps: "
            f"{AGAIN}",
        )  # fmt: skip


def _blank(compared: Sequence[Compared]) -> Iterator[Finding]:
    """Weights whose codes are 0, which the source does not have there."""
    found = sorted(compared, key=lambda c: -c.blanks.weights if c.blanks else 0)
    told = [f"{c.name} ({counted(c.blanks.weights, 'weight')}, {c.blanks.where})"
            for c in found if c.blanks]  # fmt: skip
    if told:
        yield Finding(
            "error", CHECK, found[0].name,
            f"{counted(len(told), 'matrix')} with codes of 0 where the source's weights are far "
            f"from what these stand for: {some(told)}; they were lost, or never written: {AGAIN}",
        )  # fmt: skip


def _unlike(compared: Sequence[Compared]) -> Iterator[Finding]:
    """Matrices near enough as a whole, and wrong in their scales or in some of their parts."""
    told = [(c, c.like) for c in compared if c.like is not None]
    # Where layers moved scales between them, one factor of a whole matrix may be among these.
    folded = any(c.columns is not None or c.rows is not None for c in compared)
    scaled = [(c, like) for c, like in told if like.scaled and not folded]
    for kind, wrong, why in (
        ("scales", [(c.name, f"{like.gain:.2f} times as large") for c, like in scaled],
         "their scales are not those that their codes were made with"),
        ("groups", [(c.name, f"groups from {1 - like.spread:.2f} to {1 + like.spread:.2f} times as "
                     "large") for c, like in told if like.mixed and not like.torn],
         "their scales are in another order, or another matrix's"),
        ("parts", [(c.name, f"{counted(like.torn, 'part')} with nothing in common with it")
                   for c, like in told if like.torn],
         "they are damaged"),
    ):  # fmt: skip
        if wrong:
            yield Finding(
                "error", CHECK, wrong[0][0],
                f"{counted(len(wrong), 'matrix')} unlike the source in {kind}: {wrong[0][0]} "
                f"({wrong[0][1]})"
                + (f"; also {some([name for name, _ in wrong[1:]])}" if len(wrong) > 1 else "")
                + f"; {why}: fetch or make the artifact again",
            )  # fmt: skip


def _by_zeros(c: Compared) -> bool:
    """Whether zeros that are off can be the reason of the error: a step is the square root of 12
    times what rounding within it makes. A matrix that is another one altogether is farther off."""
    if not c.expected:
        return True
    steps = 12 * c.step**2 * c.off / c.groups
    return c.error < _FROM_ZEROS * c.expected * math.sqrt(1 + steps)


def rotated(subject: Subject) -> str:
    """What tells that the weights are in other directions than the source's; "" where nothing does.

    The embedding's rows have the source's lengths, or another tool's config says so.
    """
    source = subject.source
    table = quantization_config(subject.artifact.checkpoint).get(KEY)
    if table and subject.artifact.provenance is None:
        return f"the config has a {KEY}"
    # Of tokens: the largest table, where towers have some of patches and places, too.
    tables = [
        entry
        for name, role in subject.roles.items()
        if role.reason == "embedding" and len((entry := subject.entries[name]).shape) == 2
    ]
    if source is None or not tables:
        return ""
    entry = max(tables, key=lambda table: table.parameters)
    if entry.name not in source.tensors:
        return ""
    if entry.scheme is not None or entry.dtype not in FLOAT_DTYPES:
        return ""
    if source.tensors[entry.name].shape != entry.shape:
        return ""
    some = min(entry.shape[0], 4096)
    old = rows_of(source, entry.name)(0, some)
    new = rows_of(subject.artifact.checkpoint, entry.stored[0])(0, some)
    before, after = np.linalg.norm(old, axis=1), np.linalg.norm(new, axis=1)
    turned = norm(old - new) > 0.5 * norm(old) and norm(before - after) < 0.02 * norm(before)
    return "the embedding has the source's norms and other directions" if turned else ""


def _other_model(subject: Subject, most: bool) -> str:
    """Whether the provenance names another source. most: of the matrices are far from it."""
    match made_of_it(subject):
        case None if most:
            return "; was it made of another model?"
        case None:
            return f"; the others are near it: {AGAIN}"
        case True:
            return "; by qtool.json the artifact was made of this model"
        case False:
            return "; by qtool.json the artifact was made of another model than this one"


def made_of_it(subject: Subject) -> bool | None:
    """Whether the source has the digest that the provenance names; None where it names none."""
    record = (subject.artifact.provenance or {}).get("source")
    said = record.get("digest") if isinstance(record, Mapping) else None
    if not isinstance(said, str) or not isinstance(subject.source, Checkpoint):
        return None
    return said == f"sha256:{subject.source.digest()}"


def check_made_of(subject: Subject) -> Iterator[Finding]:
    """made-of: the files that the artifact was made of, by its own record."""
    if made_of_it(subject) is False:
        yield Finding(
            "note", MADE_OF, "",
            "by qtool.json the artifact was made of other files than those given: a copy that was "
            "saved anew, another revision, or another model, whose errors may look like these",
        )  # fmt: skip
