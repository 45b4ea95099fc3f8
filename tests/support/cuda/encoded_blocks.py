"""Blocks as the kernels encode them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import native_gguf
from qtool.cuda import encode_tasks
from qtool.gguf_types import BlockType
from support.cuda.cuda_emulation import Emulator, placed, room

Floats = NDArray[np.float32]


def encoded(
    emulator: Emulator,
    weight: NDArray[Any],
    block: BlockType,
    importance: Floats | None = None,
    order: int = 0,
    **more: int,
) -> NDArray[np.uint8]:
    """By the kernels; every byte of the result written once, nothing else touched."""
    rows, columns = weight.shape
    here, out = placed(weight), room((rows, block.row_bytes(columns)), np.uint8)
    given: dict[str, Any] = {**more}
    if encode_tasks.needs_lattice(block):
        given["lattice"] = [placed(array) for array in native_gguf.lattice(block)]
    if importance is not None:
        given["importance"] = placed(np.atleast_2d(importance))
        if encode_tasks.needs_means(block, importance):
            given["means"] = room((rows,), np.float32)
    *before, last = encode_tasks.encode(here, block, out=out, **given)
    for task in before:
        emulator.run(task, given["means"], order)
    return emulator.run(last, out, order)
