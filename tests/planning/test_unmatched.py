"""An override that matches nothing stops a plan and a run with one sentence, before any work; what
it matches and is never quantized is told."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from qtool import api
from qtool.cli.main import app
from qtool.errors import RecipeError
from qtool.planning.unmatched import near
from support.gguf.gguf_plans import plan_of as gguf_plan_of
from support.gguf.gguf_shapes import dense
from support.models import header_files
from support.planning.planning import plan_of, quantized


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


@pytest.mark.parametrize(
    ("recipe", "pattern", "rule"),
    [
        (
            "q8_0",
            "*.down_proj",
            "match is a regular expression found anywhere in the name in the G",
        ),
        ("q8_0", "model.layers.0.mlp.down_proj.weight", "match is a regular expression"),
        ("q8_0", "atn_v", None),
        (
            "w8-rtn",
            r"model\\.layers\\.[0-3]\\..*down_proj",
            "match is a shell pattern of the whole",
        ),
        ("w8-rtn", "re:.*down_proj", "match is a shell pattern"),
        ("w8-rtn", "blk.0.ffn_down", "match is a shell pattern"),
        ("w8-rtn", "*.down_prj", None),
    ],
)
def test_the_rule_is_said_to_who_follows_another(
    recipe: str, pattern: str, rule: str | None
) -> None:
    entry = f'overrides=[{{match: "{pattern}", dense: true}}]'
    said = str(
        CliRunner().invoke(app, ["plan", "tiny", "--recipe", recipe, "--set", entry]).exception
    )
    assert "matches no tensor" in said
    assert rule in said if rule else "; match is a" not in said


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


def test_the_head_of_a_model_that_has_none_of_its_own(tmp_path: Path) -> None:
    """The recipe of another model leaves it dense by name."""
    override = "overrides=[{match: lm_head, dense: true}]"
    tied = {n: s for n, s in header_files.llama().items() if n != "lm_head.weight"}
    with pytest.raises(RecipeError, match="whose output head is its embedding; remove the over"):
        plan_of(tmp_path / "tied", tied, "w8-rtn", override)
    plan_of(tmp_path / "own", header_files.llama(), "w8-rtn", override)


@pytest.mark.parametrize(
    "pattern", ["lm_head", "lm_head.weight", "*.lm_head", r"^output\\.weight$"]
)
def test_the_head_of_a_gguf_file_that_is_the_embedding(pattern: str) -> None:
    """What the sentence says to name instead is what gets the type."""

    def planned(*sets: str) -> dict[str, str]:
        made = api.plan("tiny", "q4_k_m", changes=sets).json()["tensors"]
        return {one["name"]: one["type"] for one in made}

    with pytest.raises(RecipeError) as caught:
        planned(f'overrides=[{{match: "{pattern}", type: q8_0}}]')
    assert str(caught.value).endswith(
        " matches no tensor of the model, whose output head is its embedding; name that, as "
        'token_embd, give the type of both as changes=["output_type=q8_0"], or remove the override'
    )
    named = planned("overrides=[{match: token_embd, type: q8_0}]")
    assert named == planned("output_type=q8_0") and named["token_embd.weight"] == "Q8_0"


def test_the_head_of_a_gguf_file_by_the_name_in_a_checkpoint() -> None:
    """The one that it has there is part of others' names."""
    model = dense("llama", 1, 256, 512, 8, 2)
    with pytest.raises(RecipeError, match=r"is output.weight in GGUF; name it as \^output\\\., or"):
        gguf_plan_of(model, "q8_0", "overrides=[{match: lm_head, type: q5_0}]")
    plan = gguf_plan_of(model, "q8_0", r"overrides=[{match: '^output\.', type: q5_0}]")
    assert [one.name for one in plan.tensors if one.type.name == "Q5_0"] == ["output.weight"]


@pytest.mark.parametrize("block", ["model.layers.2", "mtp.layers.0"])
def test_overrides_of_blocks_that_predict_further_tokens(block: str, tmp_path: Path) -> None:
    """No override quantizes them, and each is told so that means one, beside others or alone."""
    shapes = header_files.llama()
    own = {name: shape for name, shape in shapes.items() if name.startswith("model.layers.1.")}
    shapes |= {name.replace("model.layers.1", block): shape for name, shape in own.items()}

    def said(*entries: str) -> list[str]:
        sets = f"overrides=[{', '.join(entries)}]"
        plan = plan_of(tmp_path / str(len(entries)), shapes, "w8-rtn", sets, num_hidden_layers=2)
        assert not [name for name in quantized(plan) if name.startswith(block)]
        return [one for one in plan.warnings if "overrides." in one]

    four, eight = "weights: {bits: 4}", "weights: {bits: 8}"
    beside, alone, none = said(
        f"{{match: '*.mlp.*_proj', {four}}}", "{match: '*.self_attn.*', dense: true}",
        f"{{match: '*{block.removeprefix('model')}.mlp.*', {eight}}}",
        f"{{match: '*norm', {eight}}}",
    )  # fmt: skip
    reason = "(multi-token prediction or the like)" if "model" in block else "the decoder blocks"
    start = f"note: overrides.0: '*.mlp.*_proj' also matches {block}.mlp.gate_proj.weight and 2"
    assert beside.startswith(start + " more, which stay dense: ") and beside.endswith(reason)
    assert "matches no quantized tensor, but" in alone and alone.endswith(reason)
    assert "overrides.3" in none
    assert said("{match: '*.1.mlp.up_proj', " + four + "}") == []


def test_an_override_of_fused_experts_that_do_not_run_is_told(tmp_path: Path) -> None:
    name = "mtp.layers.0.mlp.experts.gate_up_proj"
    shapes = {**header_files.llama(), name: (4, 64, 32)}
    sets = "overrides=[{match: '*_proj', weights: {bits: 4}}]"
    (said,) = (one for one in plan_of(tmp_path, shapes, "w8-rtn", sets).warnings if "match" in one)
    assert said.startswith(f"note: overrides.0: '*_proj' also matches {name}, which stays dense: ")
