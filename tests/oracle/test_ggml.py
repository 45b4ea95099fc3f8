"""The GGUF kernels against libggml-base itself, block by block.

QTOOL_ORACLE_GGML names the library (see ggml_blocks.py).
"""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from oracle import ggml_blocks

import qtool
from qtool import native, native_gguf
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.gguf_types import BY_NAME, BlockType
from support.kernels import gguf_data
from support.kernels.isas import isa_restored

__all__ = ["isa_restored"]

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        ggml_blocks.path() is None, reason="QTOOL_ORACLE_GGML does not name libggml-base"
    ),
]

TYPES = list(BY_NAME.values())


def compare(block: BlockType, weight: NDArray[np.float32], factors: NDArray[np.float32] | None,
            what: str) -> None:  # fmt: skip
    theirs = ggml_blocks.encode(weight, block, factors)
    if theirs is None:  # ggml aborts; the ordinary kinds of weights never end there
        assert what.split()[0] not in {"bell", "heavy", "sparse"}
        return
    theirs = theirs.reshape(-1, block.nbytes)
    for isa in native.available():
        native.select(isa)
        ours = native_gguf.encode(weight, block, factors).reshape(-1, block.nbytes)
        differ = np.nonzero((ours != theirs).any(axis=1))[0]
        assert differ.size == 0, f"{block.name} {what} {isa}: {differ.size} of {len(ours)} blocks"


@pytest.mark.parametrize("block", TYPES, ids=lambda block: block.name)
def test_types_are_what_ggml_says(block: BlockType) -> None:
    traits = ggml_blocks.traits(block)
    assert traits.type_name.decode().upper() == block.name
    assert (traits.block_size, traits.type_size) == (block.weights, block.nbytes)


@pytest.mark.parametrize("block", TYPES, ids=lambda block: block.name)
def test_dequantizing_a_million_random_weights(block: BlockType) -> None:
    count = (1 << 20) // block.weights
    raw = np.random.default_rng(block.number).integers(0, 256, (count, block.nbytes), np.uint8)
    theirs = ggml_blocks.dequantize(raw, block, count * block.weights)
    ours = native_gguf.dequantize(raw, block, block.weights).reshape(-1)
    same = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    assert same.all()


@pytest.mark.parametrize("block", TYPES, ids=lambda block: block.name)
def test_encoding_four_million_weights(block: BlockType) -> None:
    rows = {"bell": 400, "heavy": 400}
    for kind in gguf_data.KINDS:
        weight = gguf_data.weights(kind, rows.get(kind, 2), 1280, seed=9)
        for importance in gguf_data.IMPORTANCE:
            if importance == "none" and block.needs_importance:
                continue
            factors = gguf_data.importance(importance, 1280, seed=9)
            compare(block, weight, factors, f"{kind} {importance}")


@pytest.mark.parametrize("block", TYPES, ids=lambda block: block.name)
def test_encoding_real_rows(block: BlockType) -> None:
    checkpoint = Checkpoint.open(Path(qtool.__path__[0]) / "tiny")
    seen = 0
    for name, info in checkpoint.tensors.items():
        if len(info.shape) != 2 or info.shape[1] % block.weights:
            continue
        weight = np.ascontiguousarray(checkpoint.float32(name)[:64])
        seen += weight.size
        factors = gguf_data.importance("spread", info.shape[1])
        for chosen in (None, factors):
            if chosen is not None or not block.needs_importance:
                compare(block, weight, chosen, name)
    assert seen or block.weights > 64
