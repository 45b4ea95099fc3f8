"""The numbers of a GGUF file by themselves: finite, and not lost.

A block with a scale that is NaN or infinite shows as weights that are.
"""

import math
from collections.abc import Iterator

import numpy as np

from qtool.checkpoints.holes import is_bias
from qtool.gguf.to_hf.hf_tensor import floats_of
from qtool.gguf_mixtures.kinds import stored_shape
from qtool.verification.finding import Finding
from qtool.verification.gguf import signs
from qtool.verification.gguf.sums import Sums


def check_values(sums: Sums) -> Iterator[Finding]:
    """values: every weight that comes out is finite."""
    for number, tensor in enumerate(sums.tensors):
        total = sums.of(sums.size, number)
        if not math.isfinite(total):
            first = next(
                n for n in range(*sums.pieces.of(number).indices(len(sums.pieces)))
                if not math.isfinite(sums.size[n])
            )  # fmt: skip
            piece = sums.pieces[first]
            weights = floats_of(tensor, piece.first, piece.last)
            row, column = divmod(int((~np.isfinite(weights)).argmax()), tensor.in_features)
            where = f"column {column}"
            if len(tensor.shape) > 1:
                where = f"row {piece.first + row}, {where}"
            yield Finding(
                "error", "values", tensor.name,
                f"{tensor.name} ({tensor.type_in_file.name}) has weights that are NaN or infinite, "
                f"the first in {where}; fetch or make the file again",
            )  # fmt: skip
        elif total and (hole := int(sums.holes[sums.pieces.of(number)].sum())):
            yield Finding(
                "error", "values", tensor.name,
                f"{tensor.name}: {hole:,} bytes are 0 in long stretches that begin or end within a "
                "row: it was not written or fetched to its end; fetch or make the file again",
            )  # fmt: skip
        elif total == 0 and len(stored_shape(tensor.shape)) > 1 and not is_bias(tensor.name):
            yield Finding(
                "warning", "values", tensor.name,
                f"{tensor.name}: every weight is 0; the layer does nothing, unless the model has "
                "it so",
            )  # fmt: skip
    found = {
        tensor.name: sums.negative_of(n)
        for n, tensor in enumerate(sums.tensors)
        if not sums.off_of(n)  # of which is told by how much they are off
    }
    yield from signs.told({name: blocks for name, blocks in found.items() if blocks})
