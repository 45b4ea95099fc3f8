"""An override that matches nothing stops a plan and a run with one sentence, before any work."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from qtool import api
from qtool.cli.main import app
from qtool.errors import RecipeError
from qtool.plan.unmatched import near


@pytest.mark.parametrize(
    ("recipe", "entry", "pattern", "name"),
    [
        ("w8-rtn", "{match: '*.down_prj', dense: true}", "*.down_prj", "0.mlp.down_proj"),
        ("w8-rtn", "{match: model.layers.1.mlp.up_prj, weights: {bits: 4}}", "up_prj",
         "model.layers.1.mlp.up_proj"),
        ("q8_0", "{match: atn_v, type: q5_0}", "atn_v", "blk.0.attn_v.weight"),
        ("q8_0", "{match: zzzzzz, dense: true}", "zzzzzz", "no name is like it"),
    ],
)  # fmt: skip
def test_a_run_is_refused(recipe: str, entry: str, pattern: str, name: str, tmp_path: Path) -> None:
    plain = "'*o_proj*'" if recipe == "w8-rtn" else "'attn_output'"
    first = f"{{match: {plain}, dense: true}}"
    with pytest.raises(RecipeError) as caught:
        api.quantize("tiny", recipe, tmp_path / "x", changes=[f"overrides=[{first}, {entry}]"])
    said = str(caught.value)
    assert f"recipe {recipe}: overrides.1: match " in said and pattern in said and name in said
    assert not any(tmp_path.iterdir())
    words = ["plan", "tiny", "--recipe", recipe, "--set", f"overrides=[{first}, {entry}]"]
    planned = CliRunner().invoke(app, words).exception
    assert isinstance(planned, RecipeError) and str(planned) == said


def test_what_matches_is_made(tmp_path: Path) -> None:
    made = api.quantize(
        "tiny", "w8-rtn", tmp_path / "x",
        # A norm is never quantized: of no effect, and no misspelling.
        changes=["overrides=[{match: '*.input_layernorm', dense: true}]"],
    )  # fmt: skip
    assert made.tensors["quantized"] > 0


def test_the_nearest_names_are_of_one_kind_each() -> None:
    names = [f"model.layers.{n}.mlp.{m}.weight" for n in range(3) for m in ("gate_proj", "up_proj")]
    assert near("*.gate_prj", names)[0] == "model.layers.0.mlp.gate_proj.weight"
    assert near("*.2.mlp.up_prj", names)[0] == "model.layers.2.mlp.up_proj.weight"
    assert near("?", names) == []
