"""Blocks of a GGUF file whose scale is not the one that their codes were made with."""

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

import qtool
import qtool.tiny
from qtool import native_gguf
from qtool.gguf_types import BY_NAME
from qtool.verification.finding import Finding
from qtool.verification.gguf.single_blocks import COARSEST, OffBlock, off_blocks
from qtool.verification.gguf.typical import TYPICAL
from qtool.verification.run import verify_artifact
from support.verification.made_gguf import made

__all__ = ["made"]

TINY = Path(qtool.tiny.__file__).parent
TYPES = [name for name, error in TYPICAL.items() if error < COARSEST and name in BY_NAME]
SCALE_AT = {"Q6_K": 208, "Q3_K": 108}  # bytes into a block; of others it begins with a float16


def damaged(path: Path, out: Path, name: str, blocks: dict[int, float]) -> Path:
    """A copy in which the scales of some blocks of a tensor are so many times as large."""
    shutil.copy(path, out)
    reader = gguf.GGUFReader(out, "r+")
    tensor = next(t for t in reader.tensors if t.name == name)
    _, nbytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    at = SCALE_AT.get(tensor.tensor_type.name, 0)
    rows = tensor.data.reshape(-1, nbytes)
    for block, times in blocks.items():
        scale = rows[block, at : at + 2].view(np.float16)
        scale *= np.float16(times)
    reader.data.flush()
    return out


def serious(path: Path) -> list[Finding]:
    found = verify_artifact(path, against=TINY, threads=1).findings
    return [one for one in found if one.severity != "note"]


UP = "blk.1.ffn_up.weight"


@pytest.mark.parametrize(
    ("recipe", "place"),
    [
        ("q4_0", "row 0, columns 224 to 255"), ("q5_1", "row 0, columns 224 to 255"),
        ("q8_0", "row 0, columns 224 to 255"), ("q3_k_m", "row 7, columns 0 to 255"),
        ("q4_k_m", "row 7, columns 0 to 255"), ("iq4_xs", "row 7, columns 0 to 255"),
        ("q6_k", "row 7, columns 0 to 255"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("times", [2, 0.5, 16, -1])
def test_one_scale(
    recipe: str, place: str, times: float, made: Callable[[str], Path], tmp_path: Path
) -> None:
    assert not serious(made(recipe))
    (found,) = serious(damaged(made(recipe), tmp_path / "x.gguf", UP, {7: times}))
    assert (found.severity, found.check, found.name) == ("error", "layer-error", UP)
    assert found.message.startswith(
        f"1 block of 1 tensor has a scale unlike the source's: {UP}, {place}: about "
    )
    said = float(found.message.partition("about ")[2].split(" ")[0])
    assert said == pytest.approx(times, rel=0.1)


def test_the_worst_first(made: Callable[[str], Path], tmp_path: Path) -> None:
    (found,) = serious(
        damaged(made("q4_k_m"), tmp_path / "x.gguf", UP, {1: 2, 2: 8, 3: 0.5, 4: 2, 9: 4})
    )
    assert found.message.startswith(
        f"5 blocks of 1 tensor have scales unlike the source's: {UP}, row 2, columns "
    )
    assert found.message.endswith(" and 2 more; fetch or make the artifact again")


def weights(rows: int, columns: int) -> np.ndarray:
    """Heavy tails, rows that are about 0, and outliers in single columns."""
    random = np.random.default_rng(columns)
    found = random.standard_t(4, (rows, columns)).astype(np.float32)
    found[:, ::97] *= 12
    found[0] *= np.float32(1e-12)
    found[1, 8:] *= np.float32(1e-3)
    return found


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("weighed", [False, True])
def test_sound_blocks_are_not_told(kind: str, weighed: bool) -> None:
    """Nor where importance gives up outliers that hardly count."""
    block, weight, importance = BY_NAME[kind], weights(256, 1024), None
    if block.needs_importance and not weighed:
        return
    if weighed:
        importance = np.random.default_rng(3).lognormal(0, 2, 1024).astype(np.float32)
        importance[::97] = 1e-6
    stored = native_gguf.encode(weight, block, importance)
    back = native_gguf.dequantize(stored, block, 1024)
    assert off_blocks(back, weight, kind, TYPICAL[kind], weighed) == []


def found_in(new: np.ndarray, kind: str = "Q4_0", by_importance: bool = False) -> list[OffBlock]:
    return off_blocks(new, WEIGHT, kind, TYPICAL[kind], by_importance)


WEIGHT = np.random.default_rng(0).standard_normal((16, 512)).astype(np.float32)
NOISE = 0.05 * np.random.default_rng(1).standard_normal(WEIGHT.shape).astype(np.float32)


def test_what_is_told() -> None:
    new = WEIGHT + NOISE
    assert found_in(new) == []
    new[3, 64:128] *= 2
    first, second = found_in(new)
    assert (first.place, second.place) == ("row 3, columns 64 to 95", "row 3, columns 96 to 127")
    assert first.times == pytest.approx(2, rel=0.1) and first.below(32).row == 35
    assert first.lost == pytest.approx(np.square((new - WEIGHT)[3, 64:96]).sum(), rel=1e-5)
    assert found_in(new, by_importance=True) == [first, second]
    (one,) = found_in(new + 0.3, "Q4_K")  # but for its mean, whose parts of 32 are one block
    assert one.place == "row 3, columns 0 to 255"
    assert found_in(new, "Q2_K") == []


def test_what_has_another_reason() -> None:
    """Zeros, another matrix, a factor of all, and what importance may do."""
    new = WEIGHT + NOISE
    assert found_in(2 * new) == found_in(new[::-1].copy()) == []
    new[3, 64:128] *= 0.5
    assert len(found_in(new)) == 2 and found_in(new, by_importance=True) == []
    new[3, 64:128] = 0
    assert found_in(new) == []
