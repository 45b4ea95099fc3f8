"""The proof of a rotation: a block, run as it was and as its view has it, must say the same.

Its tensors must also fit the dtype that they are stored in: the proof runs in float32.

In units of what float32 loses: a share of the largest number that the block adds to the stream, and
of the largest in the stream.
"""

import numpy as np
import torch

from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import LoadedBlock, Stream
from qtool.transforms.residual import NotRotatableError
from qtool.transforms.rotated import Rotated
from qtool.transforms.rotation import Rotation

_TOLERANCE = 1e-3  # of the largest number that a block adds to the stream
_F16 = 65520.0  # what is as large becomes infinite in float16
_ROWS = 1024  # of a table, looked at together
_NOISE = 4e-6  # of the largest number in the stream: what float32 sums lose


def prove(
    block: LoadedBlock, stream: Stream, rotation: Rotation | None, skeleton: Skeleton
) -> None:
    """The block of the view, given x R, must give R times what the block itself gives.

    skeleton: of the view in float32. The stream is then at the next block.
    """
    changed = skeleton.block(block.index)
    view = skeleton.checkpoint
    if isinstance(view, Rotated):
        for name in view.changes.keys() & changed.weights.keys():
            check_range(view, name, float(changed.weights[name].abs().max()))
    for number, hidden in enumerate(stream.hidden):
        call = stream.calls[block.index][number]
        expected = block.run(hidden, call)
        output = changed.run(rotate_states(hidden, rotation), call)
        far = off(output, rotate_states(expected, rotation), expected - hidden)
        if not far <= 1:
            raise NotRotatableError(
                f"{block.prefix[:-1]} gives other outputs once rotated (off by {far:.0f} times "
                "what rounding allows); something in it, such as a norm after a projection, does "
                "not commute with a rotation"
            )
        stream.hidden[number] = expected


def check_range(view: Rotated, name: str, largest: float) -> None:
    """NotRotatableError where the source's dtype, which the tensor keeps, cannot hold it."""
    if view.stored_dtype(name) == "F16" and largest >= _F16:
        raise NotRotatableError(
            f"{name} would hold {largest:.6g}, which is too large for the float16 of this "
            "checkpoint; the gain of the norm before it is that large"
        )


def check_rows(exact: Rotated, name: str) -> None:
    """check_range() of a table whose columns are rotated, some rows at a time.

    exact: the view in float32. No number is larger than its row is long, which no rotation
    changes: rows are made where that is not enough.
    """
    if exact.stored_dtype(name) != "F16":
        return
    rows = exact.tensors[name].shape[0]
    norm = exact.changes[name].gain
    gain = 1.0 if norm is None else exact.gain(norm)
    for at in range(0, rows, _ROWS):
        end = min(at + _ROWS, rows)
        values = exact.unchanged_rows(name, at, end).astype(np.float64) * gain
        if float(np.square(values).sum(1).max()) >= _F16**2:
            made = exact.part(name, at, end).view(np.float32)
            check_range(exact, name, float(np.abs(made).max()))


def rotate_states(hidden: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """x R of hidden states [..., width] in float32."""
    if rotation is None:
        return hidden
    flat = hidden.reshape(-1, hidden.shape[-1]).double().numpy()
    rotated = rotation.apply(np.ascontiguousarray(flat.T)).T
    return torch.from_numpy(np.ascontiguousarray(rotated)).float().reshape(hidden.shape)


def off(output: torch.Tensor, expected: torch.Tensor, change: torch.Tensor) -> float:
    """How far off, in units of what rounding allows."""
    allowed = _TOLERANCE * float(change.abs().max()) + _NOISE * float(expected.abs().max())
    difference = float((output - expected).abs().max())
    return difference / allowed if allowed > 0 else (0.0 if difference == 0 else float("inf"))
