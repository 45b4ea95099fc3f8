"""What plans say of rotations that are left to the engine."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from qtool import hub
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cli.main import app
from qtool.errors import FormatError
from qtool.formats.compressed_tensors_transforms import online_rotations
from qtool.planning.plan import make_plan
from qtool.recipe import recipe as recipes
from qtool.recipe.rotate import RotateOptions


def test_the_recipe_of_four_bits_on_both_sides(tmp_path: Path) -> None:
    path = recipes.shipped()["w4a4-rotated"]
    lines = path.read_text().splitlines()
    assert len(lines) < 25 and lines[0].startswith("# ") and lines[0].endswith(".")
    recipe = recipes.load("w4a4-rotated")
    assert recipe.activations is not None
    assert (str(recipe.scheme), recipe.activations.bits) == ("w4 channel sym", 4)
    assert recipe.rotate == RotateOptions(r4=True)
    plan = make_plan(recipe, Checkpoint.open(hub.resolve("tiny")))
    (said,) = (warning for warning in plan.warnings if not warning.startswith("note: "))
    assert said.startswith("no engine runs it: vLLM, which alone rotates inputs")
    assert "refuses 4-bit weights per channel with dynamic 4-bit inputs per token" in said
    assert "rotate.r4" in said and "rotate.r3" not in said


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_an_engine_that_is_asked_for_is_told_of_once(engine: str) -> None:
    words = ["plan", "tiny", "--recipe", "w4a4-rotated", "--engine", engine]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 1
    said = [line for line in found.output.splitlines() if line.startswith(("warning", "error"))]
    assert said and all(line.startswith("error: ") for line in said), said
    assert "with a kernel for CUDA" not in found.output


def test_who_rotates_what_is_left_to_the_engine() -> None:
    eight = ("weights.bits=8", "activations.bits=8")
    for sets, wanted in (
        (eight, ["vLLM alone rotates inputs", "on one NVIDIA GPU; `qtool eval` does it too"]),
        ((*eight, "rotate.r3=true"), ["vLLM alone rotates", "no engine rotates queries and keys"]),
        ((*eight, "rotate.r4=false", "rotate.r3=true"), ["no engine rotates queries and keys"]),
    ):
        recipe = recipes.load("w4a4-rotated", sets)
        said = make_plan(recipe, Checkpoint.open(hub.resolve("tiny"))).warnings
        (found,) = (warning for warning in said if "rotates" in warning)
        assert all(text in found for text in wanted) and not found.startswith("no engine runs")


def test_an_empty_table_is_none() -> None:
    """As llm-compressor writes one where nothing is rotated."""
    assert (
        online_rotations({"transform_config": {}})
        == online_rotations({"transform_config": None})
        == online_rotations({})
        == ()
    )
    with pytest.raises(FormatError, match="transform_config has no config_groups"):
        online_rotations({"transform_config": {"R4": {}}})
