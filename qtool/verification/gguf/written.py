"""What `quantize` asks of a GGUF file of its own before it gets its name: as written.py, of the
header. It loads nothing that only folders of safetensors need."""

from contextlib import closing
from pathlib import Path

from qtool.gguf.open import open_source
from qtool.gguf.source import GgufSource
from qtool.verification.finding import raise_first
from qtool.verification.gguf.header import CHECKS


def check_written_gguf(path: Path, source: GgufSource) -> None:
    """FormatError with the first sentence of `qtool verify` that is an error, and that the source
    had not already."""
    with closing(open_source(path)) as file:
        for _, check in CHECKS:
            found = [finding for finding in check(file) if finding.severity == "error"]
            if found:
                known = {(one.check, one.name) for one in check(source)}
                raise_first(path, (one for one in found if (one.check, one.name) not in known))
