"""calibration.precision: how exactly passes over the calibration text multiply matrices.

    float32     as all else
    bfloat16    both factors rounded to 8 bits of mantissa, their products summed in float32

Forward and backward passes go through blocks and head; Gram matrices are of what they meet. All
that decides what a weight becomes stays as it is: searches, proofs, factors and sweeps, tuning, and
rotations that are learned. Only CPUs that multiply tiles of bfloat16 (AMX, Xeons since 2023) gain
by it; on others, and on a GPU, matmuls are float32.

The switch is of the process: whatever else multiplies in it meanwhile does so, too.

Source: oneDNN's floating-point math mode, as torch.backends.mkldnn.matmul sets it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from qtool.cuda.device import Device
from qtool.messages.progress import Progress
from qtool.recipe.file import Precision
from qtool.workspaces.differences import PRECISION
from qtool.workspaces.workspace import Workspace

_THEIRS: dict[Precision, str] = {"float32": "ieee", "bfloat16": "bf16"}
_WIDTH = 64  # of a product large enough for oneDNN
_FINER = 1 + 2.0**-12  # 1 in bfloat16
_ALONE = threading.RLock()


@contextmanager
def matmuls_in(precision: Precision) -> Iterator[None]:
    """Within, matmuls on the CPU, of all threads; or within another of the same
    thread. Those of other threads wait."""
    setting = getattr(torch.backends.mkldnn, "matmul", None)
    if setting is None:  # torch before 2.9 has float32 alone
        yield
        return
    with _ALONE:
        before = setting.fp32_precision
        setting.fp32_precision = _THEIRS[precision]
        try:
            yield
        finally:
            setting.fp32_precision = before


@cache
def has_bfloat16() -> bool:
    """Whether matmuls are any other for it on this CPU."""
    with matmuls_in("bfloat16"):
        made = torch.full((_WIDTH, _WIDTH), _FINER) @ torch.eye(_WIDTH)
    return bool((made == 1).all())


def made_in(asked: Precision, device: Device | None) -> Precision:
    """What there is here of what a recipe asks for."""
    return asked if device is None and has_bfloat16() else "float32"


def settled(
    asked: Precision, device: Device | None, progress: Progress, space: Workspace | None = None
) -> Precision:
    """The same of a run, with a word where that is less.

    space: of the run, which goes on with what it had, ResumeError where it cannot.
    """
    if asked == "float32":
        return asked
    found = made_in(asked, device)
    if space is not None:
        space.agree({PRECISION: found})
    if found != asked:
        where = "this CPU" if device is None else "a GPU"
        progress.say(f"note: calibration.precision has no effect: {where} multiplies in float32")
    return found
