"""Tensors of a GGUF file that are other ones than the source's of their name: a multiple of it, one
that is called otherwise there, or a few of another model among many that are near."""

import math
from collections.abc import Iterator, Mapping

from qtool.gguf.source import GgufSource, SourceTensor
from qtool.gguf.to_hf.hf_tensor import floats_of
from qtool.gguf_mixtures.kinds import stored_shape
from qtool.messages.sentences import AGAIN, verb
from qtool.messages.sentences import count as counted
from qtool.verification.against import swapped, to_nearest
from qtool.verification.against.compared import Compared
from qtool.verification.against.factors import LEAST, WORTH
from qtool.verification.against.side_by_side import Floats
from qtool.verification.against.single_scales import as_words, worst
from qtool.verification.finding import Finding
from qtool.verification.gguf.sums import LOST, SCALED, Sums


def multiples(sums: Sums) -> dict[str, float]:
    """By tensor, how many times the source it is, where that is all that is between them."""
    found = {}
    for number, tensor in enumerate(sums.tensors):
        whole, lost, stored = (sums.of(s, number) for s in (sums.whole, sums.lost, sums.size))
        shared = (whole + stored - lost) / 2
        if tensor.name in sums.sources and 0 < whole < math.inf and 0 < shared < math.inf:
            times = shared / whole
            left = math.sqrt(max(stored - times * shared, 0.0)) / times
            if abs(math.log(times)) > LEAST and math.sqrt(lost) > WORTH * left:
                found[tensor.name] = times
    return found


def check_multiples(check: str, found: Mapping[str, float]) -> Iterator[Finding]:
    """layer-error: no tensor is a multiple of the source's. found: see `multiples`."""
    if found:
        words = [(times, name) for name, times in found.items()]
        yield Finding(
            "error", check, worst(words),
            f"{counted(len(found), 'tensor')} {verb(len(found), 'are', 'is')} the source's but for "
            f"a factor: {as_words(words)}; are the scales right? {AGAIN}",
        )  # fmt: skip


def exchanged(sums: Sums, source: GgufSource) -> dict[str, str]:
    """By matrix, the one of the source that it is, of those that are another one's."""
    there = {tensor.name: tensor for tensor in source.tensors}
    shapes = {t.name: stored_shape(t.shape) for t in sums.tensors if t.name in sums.sources}
    lost = {
        tensor.name: tensor for number, tensor in enumerate(sums.tensors)
        if len(shapes.get(tensor.name, ())) > 1 and LOST < sums.relative(number) < math.inf
    }  # fmt: skip
    if len(lost) > swapped.MOST * len(shapes):
        return {}
    starts = {name: _start(tensor) for name, tensor in [*lost.items()][: swapped.LOOKED_AT]}
    wanted = {shapes[name] for name in starts}
    others = (
        (name, _start(tensor)) for name, tensor in there.items()
        if stored_shape(tensor.shape) in wanted
    )  # fmt: skip
    return swapped.nearest_of(starts, others)


def _start(tensor: SourceTensor) -> Floats:
    return floats_of(tensor, 0, min(swapped.ROWS, tensor.rows))


def unusual(sums: Sums, besides: Mapping[str, object]) -> list[Compared]:
    """Matrices of one type of which the scales are known, farther off than rounding leaves all
    others of it. besides: those that are told for another reason."""
    found = []
    for kind in sorted(SCALED):
        some = [
            Compared(t.name, error, error, expected, expected, None, None, None, 0, 0, 1)
            for number, t in enumerate(sums.tensors)
            if t.type.name == kind and t.name in sums.sources and t.name not in besides
            and not sums.torn[sums.pieces.of(number)].any() and not sums.single_of(number)
            and (expected := sums.expected(number)) and (error := sums.relative(number))
        ]  # fmt: skip
        found += to_nearest.unusual(some, None)
    return found
