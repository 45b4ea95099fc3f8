"""The tensors of a GGUF file against those of its source, and the source against its checksum."""

from collections.abc import Iterator

import numpy as np

from qtool.gguf.source import GgufSource
from qtool.gguf_mixtures.kinds import stored_shape
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some, verb
from qtool.native.sums import checksum
from qtool.verification.finding import Finding
from qtool.verification.gguf.sums import Sums


def check_against(file: GgufSource, source: GgufSource) -> Iterator[Finding]:
    """against: the tensors of the source, no less, no more, of the same shapes."""
    there = {tensor.name: tensor for tensor in file.tensors}
    wanted = {tensor.name: tensor for tensor in source.tensors}
    lost = [n for n in wanted if n not in there and n != "output.weight"]
    if lost:
        yield Finding(
            "error", "against", lost[0],
            f"{counted(len(lost), 'tensor')} of the source "
            f"{verb(len(lost), 'are', 'is')} not in the file: {some(lost)}",
        )  # fmt: skip
    extra = [n for n in there if n not in wanted and not n.startswith(("output.", "rope_f"))]
    if extra:
        yield Finding(
            "warning", "against", extra[0],
            f"{counted(len(extra), 'tensor')} not in the source: {some(extra)}",
        )  # fmt: skip
    for name, tensor in there.items():
        if name in wanted and stored_shape(wanted[name].shape) != stored_shape(tensor.shape):
            yield Finding(
                "error", "against", name,
                f"{name} is {list(tensor.shape)}, in the source {list(wanted[name].shape)}; they "
                "are different models",
            )  # fmt: skip
    if source.architecture != file.architecture:
        yield Finding(
            "error", "against", "general.architecture",
            f"the architecture is {file.architecture}, the source's {source.architecture}",
        )  # fmt: skip


def source_digest(sums: Sums) -> str | None:
    """The checksum of the source as `quantize` stores it; None where not all of it was read."""
    if any(tensor.name not in sums.sources for tensor in sums.tensors):
        return None
    parts: list[bytes] = []
    for number, tensor in enumerate(sums.tensors):
        shape = ",".join(map(str, stored_shape(tensor.shape)))
        kind = sums.sources[tensor.name].type.name
        parts.append(f"{tensor.name}\0{kind}\0{shape}\0".encode())
        parts.append(sums.digests[sums.pieces.of(number)].astype("<u8").tobytes())
    return f"{checksum(np.frombuffer(b''.join(parts), np.uint8)):016x}"
