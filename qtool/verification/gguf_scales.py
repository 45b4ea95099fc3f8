"""Second scales of a GGUF file: that llama.cpp multiplies by them."""

from collections.abc import Iterator

from qtool.gguf.second_scales import is_forgotten, scales_in
from qtool.gguf.source import GgufSource
from qtool.verification.finding import Finding
from qtool.verification.gguf_tensors import row_of
from qtool.verification.sentences import count as counted
from qtool.verification.sentences import some


def check_scales(source: GgufSource) -> Iterator[Finding]:
    """scales: no matrix of NVFP4 has a second scale that llama.cpp is known to forget."""
    if row_of(source) is None:
        return
    lost = [
        scale.name
        for tensor, scale in scales_in(source)
        if is_forgotten(source.architecture, tensor.name)
    ]
    if lost:
        yield Finding(
            "error", "scales", lost[0],
            f"{counted(len(lost), 'second scale')} of NVFP4 by which llama.cpp does not multiply "
            f"in {source.architecture}, as of October 2026, so that it writes nonsense: "
            f"{some(lost)}; encode these matrices as another type (qtool quantize FILE --recipe "
            "q8_0 --requantize)",
        )  # fmt: skip
