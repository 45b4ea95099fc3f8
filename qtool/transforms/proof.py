"""The proof of a rotation: a block, run as it was and as its view has it, must say the same.

In units of what float32 loses: a share of the largest number that the block adds to the stream, and
of the largest in the stream.
"""

import numpy as np
import torch

from qtool.calibrating.skeleton import Skeleton
from qtool.calibrating.stream import LoadedBlock, Stream
from qtool.transforms.residual import NotRotatableError
from qtool.transforms.rotation import Rotation

_TOLERANCE = 1e-3  # of the largest number that a block adds to the stream
_NOISE = 4e-6  # of the largest number in the stream: what float32 sums lose


def prove(block: LoadedBlock, stream: Stream, turned: Rotation | None, skeleton: Skeleton) -> None:
    """The block of the view, given x R, must give R times what the block itself gives.

    skeleton: of the view in float32. The stream is then at the next block.
    """
    changed = skeleton.block(block.index)
    for number, hidden in enumerate(stream.hidden):
        call = stream.calls[block.index][number]
        expected = block.run(hidden, call)
        output = changed.run(turn(hidden, turned), call)
        far = off(output, turn(expected, turned), expected - hidden)
        if not far <= 1:
            raise NotRotatableError(
                f"{block.prefix[:-1]} gives other outputs once rotated (off by {far:.0f} times "
                "what rounding allows); something in it, such as a norm after a projection, does "
                "not commute with a rotation"
            )
        stream.hidden[number] = expected


def turn(hidden: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """x R of hidden states [..., width] in float32."""
    if rotation is None:
        return hidden
    flat = hidden.reshape(-1, hidden.shape[-1]).double().numpy()
    turned = rotation.turn(np.ascontiguousarray(flat.T)).T
    return torch.from_numpy(np.ascontiguousarray(turned)).float().reshape(hidden.shape)


def off(output: torch.Tensor, expected: torch.Tensor, change: torch.Tensor) -> float:
    """How far off, in units of what rounding allows."""
    allowed = _TOLERANCE * float(change.abs().max()) + _NOISE * float(expected.abs().max())
    difference = float((output - expected).abs().max())
    return difference / allowed if allowed > 0 else (0.0 if difference == 0 else float("inf"))
