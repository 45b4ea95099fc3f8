"""What `quantize` asks of its own output before it gets its name.

The numbers were compared with what was packed; here the whole is looked at as `qtool verify` does,
as far as it costs nothing: headers, configs, and what was measured while matrices were read back.
Left out is what would blame the source (its tokenizer, its head, its weights) or an engine, and
what only someone who did not see the weights has to guess.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from qtool.artifact import Artifact
from qtool.errors import FormatError
from qtool.gguf.source import GgufSource
from qtool.verification import config, numbers
from qtool.verification.finding import Finding
from qtool.verification.matrix import Measured
from qtool.verification.subject import subject_of
from qtool.verification.tensors import check_packed


def check_written(path: Path, artifact: Artifact, matrices: Sequence[Measured]) -> None:
    """FormatError with the first sentence of `qtool verify` that is an error."""
    subject = subject_of(path, artifact, None)
    for check in (
        check_packed,
        config.check_dense_list,
        config.check_scheme,
        config.check_side_files,
        config.check_provenance,
    ):
        _raise(path, check(subject))
    for numeric in (numbers.check_scales, numbers.check_convention, numbers.check_order):
        _raise(path, numeric(artifact, matrices))


def check_written_gguf(path: Path, source: GgufSource) -> None:
    """The same of a GGUF file: its header has no error that the source had not already."""
    from contextlib import closing

    from qtool.gguf.open import open_source
    from qtool.verification.gguf import HEADER

    with closing(open_source(path)) as file:
        for _, check in HEADER:
            known = {(f.check, f.name) for f in check(source)}
            _raise(path, (f for f in check(file) if (f.check, f.name) not in known))


def _raise(path: Path, findings: Iterable[Finding]) -> None:
    for finding in findings:
        if finding.severity == "error":
            raise FormatError(
                f"{path}: what was written does not pass `qtool verify` ({finding.check}): "
                f"{finding.message}"
            )
