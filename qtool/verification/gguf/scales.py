"""Second scales of a GGUF file: that llama.cpp has a place for each, and multiplies by it."""

from collections.abc import Iterator

from qtool.gguf.second_scales import (
    INPUT_SCALE,
    NVFP4,
    SCALE,
    WEIGHT,
    ends_it,
    is_forgotten,
    is_loaded,
    is_own,
    scales_in,
    with_scales,
)
from qtool.gguf.source import GgufSource
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some
from qtool.verification.finding import Finding
from qtool.verification.gguf.tensors import row_of

_MEND = "make the file again, or encode these matrices anew (qtool quantize FILE --requantize)"


def check_scales(source: GgufSource) -> Iterator[Finding]:
    """scales: of architectures of the table."""
    if row_of(source) is None:
        return
    names = {tensor.name for tensor in source.tensors}
    pairs = list(scales_in(source))
    lost = [s.name for t, s in pairs if is_forgotten(source.architecture, t.name)]
    if lost:
        yield Finding(
            "error", "scales", lost[0],
            f"{counted(len(lost), 'second scale')} by which llama.cpp does not multiply in "
            f"{source.architecture}, as of October 2026, so that it writes nonsense: {some(lost)}; "
            f"{_MEND}",
        )  # fmt: skip
    ends = [t.name for t, _ in pairs if t.type == NVFP4 and ends_it(names, t.name)]
    if ends:
        yield Finding(
            "error", "scales", ends[0],
            f"{counted(len(ends), 'matrix')} of NVFP4 with a second scale and a bias, at which "
            f"llama.cpp ends: {some(ends)}; {_MEND}",
        )  # fmt: skip
    alone = sorted(name for name in names if _has_no_place(source.architecture, name, names))
    if alone:
        yield Finding(
            "error", "scales", alone[0],
            f"{counted(len(alone), 'tensor')} for which llama.cpp has no place, so that it refuses "
            f"the file: {some(alone)}; make it again",
        )  # fmt: skip
    scaled = {tensor.name for tensor, _ in pairs if tensor.type == NVFP4}
    bare = [t.name for t in source.tensors if t.type == NVFP4 and t.name not in scaled]
    bare = [name for name in bare if is_loaded(name) and name.startswith("blk.")]
    if bare and scaled:
        yield Finding(
            "warning", "scales", bare[0],
            f"{counted(len(bare), 'matrix')} of NVFP4 without a second scale, which others have: "
            f"{some(bare)}; unless it is 1, the file is damaged",
        )  # fmt: skip


def _has_no_place(architecture: str, name: str, names: set[str]) -> bool:
    for end in (INPUT_SCALE, SCALE):
        weight = name.removesuffix(end) + WEIGHT
        if name.endswith(end) and weight in names:
            return not (is_loaded(weight) or is_own(architecture, name))
    return False


def multiplied(file: GgufSource, source: GgufSource | None) -> tuple[GgufSource, GgufSource | None]:
    """Matrices with their second scales, but for those that both keep apart; FormatError where
    these are no such."""
    own = {tensor.name for tensor, _ in scales_in(file)}
    both = own & {tensor.name for tensor, _ in scales_in(source)} if source is not None else ()
    return with_scales(file, both), source and with_scales(source, both)
