"""What `quantize` asks of its own output before it gets its name.

The numbers were compared with what was packed; here the whole is looked at as `qtool verify` does,
as far as it costs nothing: headers, configs, and what was measured while matrices were read back.
Left out is what would blame the source (its tokenizer, its head, its weights) or an engine, and
what only someone who did not see the weights has to guess.
"""

from collections.abc import Sequence
from pathlib import Path

from qtool.artifacts.artifact import Artifact
from qtool.verification import config, numbers
from qtool.verification.dense_list import check_dense_list
from qtool.verification.finding import raise_first
from qtool.verification.matrix import Measured
from qtool.verification.subject import subject_of
from qtool.verification.tensors import check_packed
from qtool.verification.zero_convention import check_convention


def check_written(path: Path, artifact: Artifact, matrices: Sequence[Measured]) -> None:
    """FormatError with the first sentence of `qtool verify` that is an error."""
    subject = subject_of(path, artifact, None)
    for check in (
        check_packed,
        check_dense_list,
        config.check_scheme,
        config.check_side_files,
        config.check_provenance,
    ):
        raise_first(path, check(subject))
    for numeric in (numbers.check_scales, check_convention, numbers.check_order):
        raise_first(path, numeric(artifact, matrices))
