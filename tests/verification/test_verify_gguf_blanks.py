"""Bytes of a GGUF file that were lost, fewer than a page; and bytes of 0 that are no damage."""

from pathlib import Path

import gguf
import numpy as np
import pytest

import qtool
from qtool import native_gguf
from qtool.gguf_types import BY_NAME
from qtool.verification.gguf.blanks import Blank, blanks
from qtool.verification.gguf.typical import TYPICAL
from support.verification.verifying import beside_tiny

WEIGHT = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
IMPORTANCE = np.ones(512, np.float32)


def stored(weight: np.ndarray, kind: str) -> np.ndarray:
    block = BY_NAME[kind]
    return native_gguf.encode(weight, block, IMPORTANCE if block.needs_importance else None)


def found(raw: np.ndarray, kind: str, weight: np.ndarray = WEIGHT) -> list[Blank]:
    new = native_gguf.dequantize(raw, BY_NAME[kind], weight.shape[1])
    return blanks(raw, new, weight, kind, TYPICAL[kind])


@pytest.mark.parametrize("kind", sorted(TYPICAL.keys() & BY_NAME.keys()))
def test_a_line_of_bytes(kind: str) -> None:
    """64 of them, of every type, wherever they lie."""
    raw = stored(WEIGHT, kind)
    assert found(raw, kind) == []
    for at in (640, 1001, 2050):
        torn = raw.copy()
        torn.reshape(-1)[at : at + 64] = 0
        hit = found(torn, kind)
        first = at // BY_NAME[kind].nbytes
        assert hit and {(one.row, one.columns.start) for one in hit} <= {
            divmod(number * BY_NAME[kind].weights, 512) for number in range(first, first + 5)
        }
        assert hit[0].below(7).row == hit[0].row + 7 and hit[0].lost > 0


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4"])
def test_what_is_no_damage(kind: str) -> None:
    """Rows of 0, weights about 0, and those beside one that is far larger."""
    weight = WEIGHT.copy()
    weight[:4], weight[4:8, :256] = 0, 1e-9
    weight[20:, ::32] *= 500
    assert found(stored(weight, kind), kind, weight) == []


def test_what_the_type_has_nothing_for() -> None:
    """Scales of NVFP4 end at 2^-10; bytes that are lost beside such blocks are found."""
    weight = WEIGHT * np.float32(0.008)
    weight[5, 64:128] *= 0.25
    raw = stored(weight, "NVFP4")
    assert not raw.reshape(64, -1, 36)[5, 1].any()
    assert found(raw, "NVFP4", weight) == []
    raw.reshape(64, -1, 36)[7, 2] = 0
    assert [(one.row, one.columns.start) for one in found(raw, "NVFP4", weight)] == [(7, 128)]


@pytest.mark.parametrize("recipe", ["q4_k_m", "q8_0", "q2_k"])
def test_one_sentence_of_a_file(recipe: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    qtool.quantize("tiny", recipe, path, threads=1, changes=["importance=false"])
    assert not beside_tiny(path)
    reader = gguf.GGUFReader(path, "r+")
    name = "blk.1.ffn_up.weight"
    data = next(t for t in reader.tensors if t.name == name).data.reshape(-1).view(np.uint8)
    data[5000:5064] = 0
    reader.data.flush()
    (one,) = beside_tiny(path)
    assert (one.severity, one.check, one.name) == ("error", "layer-error", name)
    assert one.message.startswith("1 tensor has blocks with bytes of 0 where the source has other")
    assert f"{name} (" in one.message and "the first: row " in one.message
