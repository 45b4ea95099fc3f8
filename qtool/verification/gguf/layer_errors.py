"""Every tensor of a GGUF file against the source: what its type explains, and what is too much."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from qtool.gguf.source import GgufSource
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some
from qtool.verification.against import compensated, swapped, to_nearest
from qtool.verification.against.compared import UNEXPLAINED, WRONG
from qtool.verification.finding import Finding, LayerError
from qtool.verification.gguf import blanks, others, single_blocks
from qtool.verification.gguf.blanks import Blank
from qtool.verification.gguf.single_blocks import OffBlock
from qtool.verification.gguf.sums import LOST, PART, SCALED, Sums
from qtool.verification.gguf.typical import COARSE, TYPICAL

CHECK = "layer-error"
# Times the typical error; other numbers than normal ones make up to 2 of it.
_FAR, _WRONG = 2.5, 4.0
# Of coarse types GPTQ leaves single parts that are as far off as damage (3 of SmolLM2 in IQ1_S, 1
# in IQ3_XXS); a page of a file that is damaged has a dozen.
_FEWEST = 6  # parts
_SHARES = 0.002, 0.01  # of all parts: GPTQ leaves more of a larger matrix; fine types, coarse ones
_OTHER = "; was it made of another model, or of one that was quantized before?"
_NORMS = (
    ", and norms among them: it was made of another model, or of an artifact into which AWQ or "
    "smoothing had folded scales; verify that one instead"
)
_ROUNDING = 2.0**-8  # the least that counts as an error: bfloat16 on the way makes half of it


@dataclass(frozen=True)
class Made:
    """What a file says of how it was made."""

    moved: bool  # matrices compensate for what was lost before them
    nearest: bool  # nothing tells that weights were not rounded to the nearest


def layer_errors(sums: Sums) -> list[LayerError]:
    """One line for every tensor that is stored in another type than the source's."""
    found = []
    for number, tensor in enumerate(sums.tensors):
        other = sums.sources.get(tensor.name)
        if other is None or other.type_in_file == tensor.type_in_file:
            continue
        found.append(
            LayerError(
                tensor.name,
                tensor.type_in_file.name,
                sums.relative(number),
                sums.expected(number) or None,
            )
        )
    return found


def check_errors(sums: Sums, source: GgufSource, made: Made) -> Iterator[Finding]:
    """layer-error: no tensor is farther from its source than its type explains."""
    multiples, exchanged = others.multiples(sums), others.exchanged(sums, source)
    yield from others.check_multiples(CHECK, multiples)
    yield from swapped.check_swapped(exchanged)
    named = {**multiples, **exchanged}
    far: dict[str, tuple[float, float, bool]] = {}
    for number, tensor in enumerate(sums.tensors):
        if tensor.name not in sums.sources or tensor.name in named:
            continue
        # Blocks whose scale is off, or with lost bytes, are told by themselves.
        error = sums.relative(number, sum(one.lost for one in sums.single_of(number)))
        same = sums.sources[tensor.name].type_in_file == tensor.type_in_file
        typical = 0.0 if same else sums.expected(number)
        known = tensor.type.name in SCALED
        if not error > max((UNEXPLAINED if known else _FAR) * typical, _ROUNDING):
            continue
        times = WRONG if known else _WRONG
        wrong = error > max(times * typical, _ROUNDING) or error > max(LOST, 1.5 * typical)
        far[tensor.name] = (error, typical, wrong)
    if made.moved:
        near = {name: one[0] for name, one in far.items() if one[0] <= compensated.FARTHEST}
        yield from compensated.told(CHECK, list(near.items()))
        far = {name: one for name, one in far.items() if name not in near}
    wrong = any(one[2] for one in far.values())
    yield from _unlike(sums, {*named, *(far if wrong else ())})
    if made.nearest:
        yield from to_nearest.told(CHECK, others.unusual(sums, {**named, **far}), None)
    if far:
        name = max(far, key=lambda n: far[n][0])
        error, typical, _ = far[name]
        norms = any(one.endswith("norm.weight") for one in far)
        yield Finding(
            "error" if wrong else "warning", CHECK, name,
            f"{counted(len(far), 'tensor')} farther from the source than their types explain: "
            f"{name} is off by {error:.1%}, {typical:.1%} is explained"
            + (f"; also {some([n for n in far if n != name])}" if len(far) > 1 else "")
            + (_NORMS if norms else _OTHER),
        )  # fmt: skip


def _unlike(sums: Sums, told: Collection[str]) -> Iterator[Finding]:
    """Tensors near enough as a whole, of which parts are not the source's."""
    torn: dict[str, str] = {}
    off: dict[str, list[OffBlock]] = {}
    blank: dict[str, list[Blank]] = {}
    for number, tensor in enumerate(sums.tensors):
        if tensor.name not in sums.sources or tensor.name in told:
            continue
        pieces = sums.pieces.of(number)
        blocks, lost = sums.off_of(number), sums.blanks_of(number)
        parts, other = int(sums.torn[pieces].sum()), int(sums.others[pieces].sum())
        size = tensor.rows * tensor.in_features
        coarse = TYPICAL.get(tensor.type_in_file.name, 0.0) > COARSE
        every = tensor.rows * -(-tensor.in_features // PART)
        if blocks:
            off[tensor.name] = blocks
        if lost:
            blank[tensor.name] = lost
        parts -= len({(one.row, one.columns.start // PART) for one in sums.single_of(number)})
        if parts >= max(_FEWEST if coarse else 1, _SHARES[coarse] * every):
            torn[tensor.name] = f"{counted(parts, 'part')} of its rows"
        elif 0 < other < size / 2:
            torn[tensor.name] = f"{other:,} of {size:,} numbers"
    yield from single_blocks.told(CHECK, off)
    yield from blanks.told(CHECK, blank)
    if torn:
        name, what = next(iter(torn.items()))
        yield Finding(
            "error", CHECK, name,
            f"{counted(len(torn), 'tensor')} with parts that are not the source's: {name} ({what})"
            + (f"; also {some([*torn][1:])}" if len(torn) > 1 else "")
            + "; it is damaged: fetch or make the file again",
        )  # fmt: skip
