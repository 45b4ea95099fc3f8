"""Plans refuse what would leave much of a decoder dense, where nobody asked for that."""

from pathlib import Path

import pytest

from qtool.errors import UnsupportedError
from qtool.planning.gguf.plan import make_gguf_plan
from qtool.planning.plan import Plan
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import load
from support.gguf import gguf_shapes
from support.models import header_files
from support.planning.planning import plan_of, quantized

ATTENTION = {"attn.q_proj.weight": (256, 256), "attn.o_proj.weight": (256, 256)}
DBRX = {f"ffn.experts.mlp.{part}": (4 * 512, 256) for part in ("w1", "v1", "w2")}
JETMOE = {"mlp.input_linear.weight": (4, 512, 256), "mlp.output_linear.weight": (4, 256, 256)}
GPT_OSS = {
    "mlp.experts.gate_up_proj": (4, 256, 512), "mlp.experts.gate_up_proj_bias": (4, 512),
    "mlp.experts.down_proj": (4, 256, 256), "mlp.experts.down_proj_bias": (4, 256),
}  # fmt: skip
FUSED = "experts fused in one tensor"


def shapes_of(blocks: header_files.Shapes, prefix: str = "model.layers") -> header_files.Shapes:
    return {f"{prefix}.{i}.{name}": shape for i in range(2) for name, shape in blocks.items()}


@pytest.mark.parametrize(
    ("blocks", "share", "words", "pattern"),
    [
        (DBRX, "92%", FUSED, "ffn.experts.mlp.*"),
        (JETMOE, "86%", FUSED, "mlp.*"),
        (GPT_OSS, "86%", FUSED, "mlp.experts.*"),
        ({"moe.w1": (4, 256, 256)}, "67%", "3-D, not a matrix", "moe.*"),
        ({"attn.w2": (256, 512)}, "50%", "no linear layer's weight", "attn.w2"),
    ],
)
def test_what_no_scheme_was_thought_of_for(
    blocks: header_files.Shapes, share: str, words: str, pattern: str, tmp_path: Path
) -> None:
    shapes = shapes_of(ATTENTION | blocks)
    with pytest.raises(UnsupportedError) as caught:
        plan_of(tmp_path, shapes, "w4g128-gptq")
    said = str(caught.value)
    assert f"would leave {share} of the decoder blocks' weights dense" in said and words in said
    way = f'overrides=[{{match: "model.layers.*.{pattern}", dense: true}}]'
    assert said.endswith(f"--set '{way}'")
    other = 'overrides=[{match: "*.o_proj", weights: {bits: 8}}]'
    with pytest.raises(UnsupportedError, match=r"add \{match: .* to its overrides$"):
        plan_of(tmp_path, shapes, "w4g128-gptq", other)
    plan = plan_of(tmp_path, shapes, "w4g128-gptq", way)
    assert len(quantized(plan)) == 4
    none = plan_of(tmp_path, shapes, "w4g128-gptq", "method=none", "format=dense")
    assert none.tensors


def test_gguf_recipes_are_named_where_they_take_the_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="or take a GGUF recipe such as q4_k_m"):
        plan_of(
            tmp_path, shapes_of(ATTENTION | GPT_OSS), "w4g128-gptq",
            architectures=["GptOssForCausalLM"],
        )  # fmt: skip


def test_a_second_list_of_blocks(tmp_path: Path) -> None:
    """Both lists are the decoder, and one of them is seen as its blocks."""
    second = shapes_of(ATTENTION, "model.L_module.layers")
    with pytest.raises(UnsupportedError, match=r"50% .*blocks in a list of their own") as caught:
        plan_of(tmp_path, shapes_of(ATTENTION, "model.H_module.layers") | second, "w4g128-gptq")
    assert 'match: "model.L_module.layers.*.attn.*", dense: true' in str(caught.value)
    # Towers, blocks that predict further on, and blocks of another kind are none.
    decoder = shapes_of(ATTENTION | {"mlp.up.weight": (256, 256)})
    for other in ("visual.blocks", "mtp.layers"):
        plan = plan_of(tmp_path, decoder | shapes_of(ATTENTION, other), "w4g128-gptq")
        assert len(quantized(plan)) == 6
    crossing = shapes_of(ATTENTION | {"cross.weight": (256, 8)}, "model.crossing")
    assert len(quantized(plan_of(tmp_path, decoder | crossing, "w4g128-gptq"))) == 6


def test_what_the_recipe_leaves_dense_and_what_is_little_are_no_reason(tmp_path: Path) -> None:
    wide = {"mlp.experts.gate_up_proj": (4, 512, 256), "mlp.experts.down_proj": (4, 256, 256)}

    def of(blocks: header_files.Shapes, *sets: str) -> Plan:
        return plan_of(tmp_path, shapes_of(ATTENTION | blocks), "w4g128-gptq", *sets)

    # What can be taken apart is fused still where a recipe leaves it dense.
    assert of(wide).unquantized_share > 0.5
    assert of({"up.weight": (256, 1000)}, "indivisible=dense").unquantized_share > 0.5
    assert of({"attn.A_log": (256, 96)}).unquantized_share < 0.25


def test_gguf_rows_that_no_type_divides() -> None:
    recipe = load("q4_k_m")
    assert isinstance(recipe, GgufRecipe)
    odd = gguf_shapes.dense("llama", 2, 240, 512, 8, 2)
    with pytest.raises(UnsupportedError, match=r"of the blocks' weights in F16 .*rows of 240"):
        make_gguf_plan(recipe, odd)
    said = 'overrides=[{match: "attn_|ffn_gate|ffn_up", type: f16}]'
    asked = load("q4_k_m", [said])
    assert isinstance(asked, GgufRecipe)
    types = {tensor.type.name for tensor in make_gguf_plan(asked, odd).tensors}
    assert "F16" in types and len(types) > 2
