"""Matrices of small floats in which nothing is left but zeros, of either sign."""

from pathlib import Path

import numpy as np
import pytest

from qtool.verification.finding import Finding
from qtool.verification.run import verify_artifact
from support.gallery import raw
from support.verification.labelled_folders import copy_of

UP = "model.layers.1.mlp.up_proj"
CODES = {"nvfp4": "weight_packed", "mxfp4": "weight_packed", "fp8": "weight"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


def serious(folder: Path) -> list[Finding]:
    return [f for f in verify_artifact(folder, threads=1).findings if f.severity != "note"]


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("byte", ["minus", "one of two"])
def test_minus_zeros_hold_nothing(kind: str, byte: str, made: Path, tmp_path: Path) -> None:
    folder = copy_of(kind, made, tmp_path / "x")
    name = f"{UP}.{CODES[kind]}"
    with raw.edited(folder) as tensors:
        codes = tensors[name].array.view(np.uint8).copy()
        codes[...] = 0x80 if kind == "fp8" else 0x88
        if byte != "minus":  # of FP4 two lie in a byte
            codes[:, ::2] = 0 if kind == "fp8" else 0x08
        tensors[name] = tensors[name].changed(codes.view(tensors[name].array.dtype))
    (one,) = serious(folder)
    assert (one.severity, one.check, one.name) == ("error", "codes", f"{UP}.weight")
    assert "every code is 0, so all that the model knew here is gone" in one.message


@pytest.mark.parametrize("kind", CODES)
def test_one_weight_is_enough(kind: str, made: Path, tmp_path: Path) -> None:
    folder = copy_of(kind, made, tmp_path / "x")
    name = f"{UP}.{CODES[kind]}"
    with raw.edited(folder) as tensors:
        codes = tensors[name].array.view(np.uint8).copy()
        codes[...] = 0x80 if kind == "fp8" else 0x88
        codes[0, 0] |= 1
        tensors[name] = tensors[name].changed(codes.view(tensors[name].array.dtype))
    (one,) = serious(folder)
    assert one.severity == "warning" and "in 767 of 768 rows every code is the same" in one.message
