"""Matrices a few times as far from the source as rounding to the nearest leaves them, among others
that are near: an error where that is how they were made, a warning where nobody says how."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.hub import tiny_folder
from qtool.verification.against import to_nearest
from qtool.verification.against.compared import Compared
from support.runs.quantizing import quantize
from support.verification.verifying import beside_tiny, forget_digests

FEW = ("calibration.samples=4", "calibration.length=32")
OF_ONE_BLOCK = [f"model.layers.2.mlp.{which}_proj" for which in ("down", "up", "gate")]


def far(*ratios: float, expected: float = 0.1, folded: bool = False) -> list[Compared]:
    """Matrices so many times as far off as is expected of them."""
    columns = np.exp(np.linspace(-1, 1, 64)).astype(np.float32) if folded else None
    return [
        Compared(str(n), r * expected, r * expected, expected, expected, columns, None, None, 0, 0,
                 64)
        for n, r in enumerate(ratios)
    ]  # fmt: skip


def names(compared: Sequence[Compared], nearest: bool | None) -> list[str]:
    return [c.name for c in to_nearest.unusual(compared, nearest)]


def test_few_that_are_far_among_many_that_are_near() -> None:
    some = far(*[1.0] * 20, 2.1, 3.9)
    assert names(some, True) == names(some, None) == ["21", "20"]
    assert not names(some, False)


@pytest.mark.parametrize(
    ("ratios", "told"),
    [
        ([*[1.0] * 20, 1.3], (0, 0)),  # clipped
        ([*[0.75] * 20, 1.6], (1, 0)),  # NVFP4 with searched scales; GPTQ leaves as little of it
        ([*[1.15] * 20, 1.3, 2.6], (1, 0)),  # as AWQ and GPTQ do of SmolLM2
        ([*[1.03] * 20, 1.3, 2.2], (1, 0)),  # AWQ alone
        ([*[1.9] * 20, 3.9], (0, 0)),  # GPTQ
        ([1.0] * 8 + [3.0] * 4, (0, 0)),  # too many
        ([1.0, 1.0, 3.0], (0, 0)),  # among too few
        ([*[0.03] * 9, 0.9], (0, 0)),  # of a source on the grid, but for some
    ],
)
def test_what_methods_leave(ratios: list[float], told: tuple[int, int]) -> None:
    assert (len(names(far(*ratios), True)), len(names(far(*ratios), None))) == told


def test_folds_tell_of_awq() -> None:
    some = far(*[1.0] * 20, 2.5, folded=True)
    assert not names(some, None) and len(names(some, True)) == 1


@pytest.mark.parametrize(
    ("recipe", "nearest"),
    [
        (None, None), ({}, None), ({"method": ["rtn"]}, True), ({"method": ["gptq"]}, False),
        ({"method": ["awq"]}, False), ({"method": ["rtn", "tune"]}, False), ({"method": 3}, False),
        ({"method": "rtn", "rtn": {"clip": True}}, False),
        ({"method": ["rtn"], "rtn": {"clip": True}, "weights": {"type": "nvfp4"}}, True),
        ({"method": ["rtn"], "rtn": 3, "weights": []}, True),
    ],
)  # fmt: skip
def test_what_a_recipe_says(recipe: object, nearest: bool | None) -> None:
    assert to_nearest.to_nearest(recipe) is nearest


# Whole artifacts


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    where = tmp_path_factory.mktemp("made")

    def get(recipe: str, source: Path | None = None) -> Path:
        out = where / (recipe if source is None else f"{recipe}-tuned")
        if not out.exists():
            sets = FEW if "gptq" in recipe else ()
            quantize(source or tiny_folder(), recipe, out, *sets)
        return out

    return get


def tuned(folder: Path, share: float) -> Path:
    """`tiny` with a part of each weight of a block others."""
    shutil.copytree(tiny_folder(), folder)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for module in OF_ONE_BLOCK:
        weight = tensors[f"{module}.weight"].float()
        moved = weight + share * weight.std() * torch.randn(weight.shape)
        tensors[f"{module}.weight"] = moved.to(tensors[f"{module}.weight"].dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_others(folder: Path, out: Path, other: Path) -> Path:
    """A copy without digests, with a block's matrices of another artifact."""
    shutil.copytree(folder, out)
    forget_digests(out)
    tensors, others = (load_file(one / "model.safetensors") for one in (out, other))
    tensors |= {n: t for n, t in others.items() if n.startswith(tuple(OF_ONE_BLOCK))}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.mark.parametrize(
    ("recipe", "share"), [("w4g128-rtn", 0.25), ("fp8-dynamic", 0.06), ("nvfp4", 0.2)]
)
def test_matrices_of_a_fine_tune(
    recipe: str, share: float, made: Callable[..., Path], tmp_path: Path
) -> None:
    assert not beside_tiny(made(recipe))
    other = made(recipe, tuned(tmp_path / "tuned", share))
    out = with_others(made(recipe), tmp_path / "out", other)
    (found,) = beside_tiny(out)
    assert (found.severity, found.check) == ("error", "layer-error")
    assert found.message.startswith("3 matrices farther from the source than the scales explain")
    assert all(f"{module}.weight (" in found.message for module in OF_ONE_BLOCK)
    assert "by qtool.json they were rounded to the nearest" in found.message
    if recipe != "nvfp4":
        (out / "qtool.json").unlink()
        (found,) = beside_tiny(out)
        assert (found.severity, found.check) == ("warning", "layer-error")
        assert "GPTQ would leave more of the others, too" in found.message


def test_gptq_leaves_as_much(made: Callable[..., Path], tmp_path: Path) -> None:
    """With and without a word of how it was made."""
    out = tmp_path / "out"
    shutil.copytree(made("w4g128-gptq"), out)
    assert not beside_tiny(out)
    (out / "qtool.json").unlink()
    assert not beside_tiny(out)
