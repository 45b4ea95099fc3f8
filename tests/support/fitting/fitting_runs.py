"""`qtool fit` of the first blocks of the shipped model."""

from pathlib import Path
from typing import Any

import pytest

from qtool.artifacts.artifact import Artifact
from qtool.fitting.fit import fit
from qtool.fitting.request import FitRequest, Fitted
from qtool.messages.progress import Progress
from qtool.recipe.recipe import load
from qtool.scheme import GroupQuant
from support.runs.quantizing import first_blocks_of_tiny

SMALL = ("--samples", 4, "--length", 64)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return first_blocks_of_tiny(tmp_path_factory.mktemp("tiny") / "model", 2)


def request(model: Path, out: Path, **given: Any) -> FitRequest:
    recipe = load(given.pop("recipe", "q4_k_m"), given.pop("sets", ["importance=true"]))
    settings = recipe.calibration.model_copy(update={"samples": 4, "length": 64})
    usual: dict[str, Any] = {"size_bytes": None, "bits": None, "costs": None, "threads": 2}
    usual |= {"types": "q2_k,q3_k,q4_k,q5_k,q6_k", **given}
    return FitRequest(model, recipe, settings, out, **usual)


def fitted(model: Path, out: Path, **given: Any) -> Fitted:
    return fit(request(model, out, **given), Progress(quiet=True))


def widths(artifact: Path) -> dict[str, int]:
    """Bits of every quantized matrix, as they are stored."""
    opened = Artifact.open(artifact)
    found = {}
    for name, entry in opened.entries.items():
        if entry.scheme is not None:
            quant = opened.read(name)
            assert isinstance(quant, GroupQuant)
            found[name.removesuffix(".weight")] = quant.scheme.bits
    return found
