"""Whether GPTQ's zeros are what their label says, before they are converted as such."""

from pathlib import Path

import numpy as np

from qtool.artifacts.artifact import Artifact
from qtool.errors import FormatError
from qtool.scheme import GroupQuant, Scheme
from qtool.verification.matrix import measure
from qtool.verification.zero_convention import other_zeros

_ENOUGH = 16  # matrices: a label is of all of them


def check_label(path: Path, artifact: Artifact) -> list[str]:
    """FormatError where zeros are of the other version of GPTQ than the config says. Warnings where
    a few seem so, and of symmetric ones, which are read as what they are whatever the label."""
    label = artifact.found.layout
    if artifact.found.format != "gptq":
        return []
    packed = [e for e in artifact.entries.values() if isinstance(e.scheme, Scheme)]
    looked_at = []
    with np.errstate(all="ignore"):  # what is not finite is told where it is converted
        for entry in packed[:: -(-len(packed) // _ENOUGH) or 1]:
            quant = artifact.read(entry.name)
            assert isinstance(quant, GroupQuant)
            looked_at.append(measure(artifact, entry, quant))
    warnings = []
    for found, truth, few in other_zeros(looked_at):
        if truth == label:
            continue
        said = (
            f"{path}: by its config zeros are stored as GPTQ {label} does it, and those of "
            f"{len(found)} of {len(looked_at)} matrices that were looked at (as "
            f"{found[0].entry.name}) are stored as {truth} does"
        )
        if all(m.zeros and m.zeros.v1_stores_middle for m in found):
            warnings.append(f"{said}; they are read as that")
        elif few:
            warnings.append(f"{said}; `qtool verify` looks at all of them")
        else:
            raise FormatError(f"{said}: give --assume {truth}, or correct the config")
    return warnings
