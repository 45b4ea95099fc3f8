"""Every layer against the source: what its scheme explains, and what is too much."""

import math
from collections.abc import Iterator, Mapping, Sequence

from qtool.artifacts.stored_config import quantization_config
from qtool.messages.sentences import AGAIN, some
from qtool.messages.sentences import count as counted
from qtool.scheme import Scheme
from qtool.verification.against import compensated, pruned, single_scales, to_nearest
from qtool.verification.against.compared import LOST, Compared
from qtool.verification.against.made_of import made_of_it, rotated
from qtool.verification.finding import Finding, LayerError
from qtool.verification.subject import Subject

CHECK = "layer-error"
_COARSE = 3  # bits
_MANY_OFF = 0.5  # of the groups: the convention is wrong, not single zeros
_FEW_OFF = 0.001
_MOST = 0.5  # of the matrices: fewer are damaged, and the model is this one
_FROM_ZEROS = 3.0  # times what zeros explain that are off


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
    rotation = rotated(subject)
    off = {} if rotation else single_scales.by_matrix(compared)
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
    torn = [] if rotation else [c for c in quantized if _has_lost_codes(c)]
    yield from _lost_codes(torn)
    other = {c.name for c in (*shifted, *single, *torn)}
    blank = [c for c in quantized if c.blanks and not c.wrong and c.name not in other]
    blank = [] if rotation else blank
    yield from _blank(blank)
    known = {*off, *(c.name for c in (*shifted, *torn, *blank))}
    wrong = [c for c in quantized if not c.explained and c.name not in known]
    if wrong and rotation:
        yield Finding(
            "note", CHECK, wrong[0].name,
            f"{rotation}, so the model was rotated: the errors of {counted(len(wrong), 'matrix')} "
            "against the source mean nothing",
        )  # fmt: skip
        wrong = []
    if compensated.compensates((subject.artifact.provenance or {}).get("recipe")):
        moved = [c for c in wrong if c.error <= compensated.FARTHEST]
        yield from compensated.told(CHECK, [(c.name, c.error) for c in moved])
        wrong = [c for c in wrong if c not in moved]
    nearest = to_nearest.to_nearest((subject.artifact.provenance or {}).get("recipe"))
    other = {*known, *(c.name for c in (*wrong, *single))}
    rest = [c for c in quantized if c.name not in other and not (c.like and c.like.unlike)]
    strange = [] if rotation else to_nearest.unusual(rest, nearest)
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
    if not rotation:
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
