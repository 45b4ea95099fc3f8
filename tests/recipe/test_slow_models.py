"""Every recipe on real models: what is read back is what was in memory, bit for bit.

QTOOL_TEST_MODELS names a folder that holds smollm2 and smollm2-768; without it they are built from
the package index (tests/oracle/build_models.py) into a folder of this machine's cache.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.quantizing.verify import check_scales
from qtool.recipe import recipe as recipes
from support.places import TESTS
from support.runs import quantizing

pytestmark = pytest.mark.slow

BUILD = TESTS / "oracle" / "build_models.py"
# 576 divides by 64 and not by 128, so these recipes say what is to happen there.
WAYS = {"smollm2": "indivisible=smaller-group", "smollm2-768": "indivisible=error"}


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder that holds both models."""
    given = os.environ.get("QTOOL_TEST_MODELS")
    if given:
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "qtool" / "test-models"
    if not all((cache / name / "tokenizer_config.json").is_file() for name in WAYS):
        subprocess.run([sys.executable, str(BUILD), str(cache)], check=True, timeout=1800)
    return cache


@pytest.mark.parametrize("model", WAYS)
@pytest.mark.parametrize(
    "recipe",
    [
        name
        for name in recipes.shipped()
        if recipes.load(name).format not in ("gguf", "mxfp4")
        and recipes.load(name).rounding != "none"
    ],
)
def test_recipes_read_back_bit_for_bit(
    recipe: str, model: str, models: Path, tmp_path: Path
) -> None:
    way, expected = WAYS[model], 210
    if recipe == "fp8-block" and model == "smollm2":  # blocks have one size: 30 matrices fit
        way, expected = "indivisible=dense", 30
    sets = ["calibration.samples=4", "calibration.length=128", "awq.grid=4", way]
    run = quantizing.quantize(models / model, recipe, tmp_path / "out", *sets)
    quantizing.assert_reads_back(run)
    assert len(run.quants) == expected
    for name, quant in run.quants.items():
        check_scales(name, quant.scale)
    source = Checkpoint.open(models / model)
    counts = run.summary.tensors
    untied = recipes.load(recipe).rotates and source.config["tie_word_embeddings"]
    outside = ("mlx" in recipe) * (1 if source.config["tie_word_embeddings"] else 2)
    assert counts["quantized"] == expected + outside
    assert sum(counts.values()) == len(source.tensors) + untied
    assert max(layer.relative_error for layer in run.summary.layers) < 1


@pytest.mark.parametrize("recipe", ["w4g128-awq", "w4g128-gptq"])
def test_a_group_that_does_not_divide_is_told(recipe: str, models: Path, tmp_path: Path) -> None:
    from qtool.errors import FormatError

    with pytest.raises(FormatError, match="in_features 576 is not divisible by group_size 128"):
        quantizing.quantize(models / "smollm2", recipe, tmp_path / "out")
    assert not list(tmp_path.iterdir())
