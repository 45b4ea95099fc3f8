"""calibration.precision: how exactly passes over the calibration text multiply.

    float32     as all else
    bfloat16    both factors rounded to 8 bits of mantissa, their products summed in float32

Passes are forwards and back through blocks and head, and Gram matrices of what they meet. All that
decides what a weight becomes is done in float32 or float64 after them: searches, proofs, factors,
sweeps. Only CPUs that multiply tiles of bfloat16 (AMX, Xeons since 2023) gain by it, and others go
on in float32; a GPU, too.

Source: oneDNN's floating-point math mode, as torch.backends.mkldnn.matmul sets it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from qtool.calibrating.device import Device
from qtool.recipe.file import Precision
from qtool.runs.progress import Progress

_THEIRS: dict[Precision, str] = {"float32": "ieee", "bfloat16": "bf16"}
_WIDTH = 64  # of a product large enough for oneDNN
_FINER = 1 + 2.0**-12  # 1 in bfloat16


@contextmanager
def products_in(precision: Precision) -> Iterator[None]:
    """Within, products of matrices on the CPU, of all threads; one of these at a time, or within
    another."""
    products = getattr(torch.backends.mkldnn, "matmul", None)
    if products is None:  # torch before 2.9 has float32 alone
        yield
        return
    before = products.fp32_precision
    products.fp32_precision = _THEIRS[precision]
    try:
        yield
    finally:
        products.fp32_precision = before


@cache
def has_bfloat16() -> bool:
    """Whether products are any other for it on this CPU."""
    with products_in("bfloat16"):
        made = torch.full((_WIDTH, _WIDTH), _FINER) @ torch.eye(_WIDTH)
    return bool((made == 1).all())


def settled(asked: Precision, device: Device | None, progress: Progress) -> Precision:
    """What a run has of what its recipe asks for, with a word where that is less."""
    if asked == "float32" or (device is None and has_bfloat16()):
        return asked
    where = "this CPU has no such products" if device is None else "a GPU multiplies as ever"
    progress.say(f"note: calibration.precision: {asked} has no effect: {where}")
    return "float32"
