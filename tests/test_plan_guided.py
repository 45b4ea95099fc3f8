"""Plans of gptq.guided: what slopes and a Gram matrix of each matrix take, beside plain GPTQ."""

from dataclasses import replace
from pathlib import Path

import header_files
import pytest
from gguf_shapes import dense
from planning import plan_of
from test_gguf_plan import plan_of as gguf_plan_of

from qtool.checkpoint import Checkpoint
from qtool.cli.plan import _end
from qtool.fitting.memory import BESIDE_BYTES, Fitting, memory, passing
from qtool.plan import budget, estimate
from qtool.plan.plan import Plan, make_plan
from qtool.plan.shapes import (
    GRAM_BYTES,
    Setting,
    Shapes,
    gram_sum_bytes,
    groups,
    in_turns,
    shapes_of,
)
from qtool.recipe.recipe import Recipe, load

GUIDED = "gptq.guided=0.5"
HIDDEN, INNER, KV, LAYERS, WORDS = 256, 768, 128, 2, 512
SAMPLES, LENGTH = 40, 600
TOKENS = SAMPLES * LENGTH
TEXT = (f"calibration.samples={SAMPLES}", f"calibration.length={LENGTH}")
# [out, in] of the matrices of a block, as header_files has them, and of what they read.
MATRICES = [(HIDDEN, HIDDEN), *[(KV, HIDDEN)] * 2, (HIDDEN, HIDDEN),
            *[(INNER, HIDDEN)] * 2, (HIDDEN, INNER)]  # fmt: skip
INPUTS = [HIDDEN, HIDDEN, HIDDEN, INNER]


def both(
    folder: Path, recipe: str, *sets: str, vocabulary: int = WORDS, threads: int | None = None
) -> tuple[Plan, Plan]:
    """The plan of a recipe as it is, and guided."""
    header_files.write(folder, header_files.llama(LAYERS, HIDDEN, INNER, KV, vocabulary))
    model = Checkpoint.open(folder)
    plain, guided = (load(recipe, [*TEXT, *sets, *more]) for more in ((), (GUIDED,)))
    assert isinstance(plain, Recipe) and isinstance(guided, Recipe)
    return make_plan(plain, model, threads=threads), make_plan(guided, model, threads=threads)


def shapes(plan: Plan) -> Shapes:
    return shapes_of(plan.recipe, plan.tensors)


@pytest.mark.parametrize("recipe", ["w4g128-gptq", "w4g128-awq-gptq"])
def test_the_disk_holds_states_before_every_block(recipe: str, tmp_path: Path) -> None:
    """Those behind the last, gradients by two of them, slopes, and what each token counts."""
    plain, guided = both(tmp_path, recipe)
    states = 4 * HIDDEN * (LAYERS + 3) * TOKENS
    slopes = 8 * (LAYERS * sum(map(sum, MATRICES)) + 2 * (WORDS + HIDDEN))
    counted = 4 * TOKENS * LAYERS * len(MATRICES)
    assert guided.disk_bytes - plain.disk_bytes == states + slopes + counted


def test_much_room_on_the_disk_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, guided = both(tmp_path, "w4g128-gptq", "calibration.samples=400")
    assert plain.disk_bytes < 1e9 < guided.disk_bytes
    for plan in (plain, guided):
        _end(plan.memory, 1.0, [])
    few, many = capsys.readouterr().out.splitlines()
    assert "disk" not in few
    assert f" MiB, {guided.disk_bytes / 1e9:.1f} GB of disk beside the artifact, time " in many


@pytest.mark.parametrize("recipe", ["w4g128-gptq", "w4g128-awq-gptq"])
def test_time_of_passes_head_and_gram_matrices(recipe: str, tmp_path: Path) -> None:
    """Where transforms measure plain ones before, these still are, and take a pass of their own."""
    plain, guided = both(tmp_path, recipe, "calibration.samples=4000", threads=1)
    chained, tokens = "awq" in recipe, 4000 * LENGTH
    passes = (4 + chained) * 2 * sum(out * width for out, width in MATRICES)
    more = sum(width**2 for _, width in MATRICES)
    more -= 0 if chained else sum(width**2 for width in INPUTS)
    head = 6 * WORDS * HIDDEN
    flops = tokens * (LAYERS * (passes + 1.1 * more) + head)
    states = 5 * 4 * HIDDEN * tokens * LAYERS  # twice written and thrice read, of two kinds
    seconds = flops / 8.5e10 + states / 4e8
    assert guided.seconds - plain.seconds == pytest.approx(seconds, rel=0.01)
    assert seconds > 100


def test_memory_is_what_a_fit_takes_where_that_is_most(tmp_path: Path) -> None:
    """Of a model with many words the head in float32, and logits."""
    plain, guided = both(tmp_path, "w4g128-gptq", vocabulary=200_000, threads=2)
    head = 4 * 200_000 * HIDDEN
    logits = 2 * 7 * 4 * (1 << 22) // 200_000 * 200_000
    assert guided.peak_rss_bytes - estimate.TORCH_PROCESS_BYTES > head + 0.9 * logits
    assert guided.peak_rss_bytes > plain.peak_rss_bytes
    assert guided.memory.estimated.of == "the head in float32, and logits"
    measured = passing(shapes(plain), plain.recipe.calibration)
    fit = memory(Fitting(measured, 0, 0), 2, None, chooses_only=False)
    assert guided.memory.estimated.nbytes == fit.estimated.nbytes + BESIDE_BYTES


def test_memory_of_a_gram_matrix_for_each_matrix(tmp_path: Path) -> None:
    """Two more of q, k and v and one more of gate and up: as sums, and in float32 behind them."""
    plain, guided = (shapes(one) for one in both(tmp_path, "w4g128-gptq"))
    (block,) = guided.blocks
    assert sorted(one.width for one in in_turns(guided, block)) == sorted(w for _, w in MATRICES)
    assert [one.width for one in in_turns(plain, plain.blocks[0])] == sorted(INPUTS, reverse=True)
    rounding = "rounding the matrices of a block"
    found = [
        max(stage.nbytes for stage in estimate._in_block(one, one.blocks[0], Setting(1))
            if stage.of == rounding)
        for one in (plain, guided)
    ]  # fmt: skip
    assert found[1] - found[0] == 3 * 4 * HIDDEN**2


def test_fewer_gram_matrices_at_a_time_take_more_passes(tmp_path: Path) -> None:
    """Weighted ones follow plain ones of transforms, which are all there together."""
    wide = gram_sum_bytes(INNER)
    for recipe, before in (("w4g128-gptq", 0), ("w4g128-awq-gptq", 1)):
        plain, guided = (shapes(one) for one in both(tmp_path, recipe))
        (block,) = guided.blocks
        assert groups(guided, block, Setting(1)) == before + 1
        assert groups(guided, block, Setting(1, gram_bytes=wide)) == before + 2
        assert groups(plain, plain.blocks[0], Setting(1)) == 1
        rooms = {one.gram_bytes for one in budget.settings(guided, 1)}
        assert min(rooms) == wide and max(rooms) == GRAM_BYTES
        most = [
            [stage.nbytes for stage in estimate._in_block(guided, block, Setting(1, True, room))]
            for room in (GRAM_BYTES, wide)
        ]
        assert max(most[1]) < max(most[0])


def test_inputs_of_routed_experts_stay_as_they_are(tmp_path: Path) -> None:
    model = {**header_files.experts(1, 8), **{
        name: shape for name, shape in header_files.llama(1).items() if "self_attn" in name
    }}  # fmt: skip
    plan = plan_of(tmp_path, model, "w4g128-gptq", GUIDED)
    (block,) = shapes(plan).blocks
    routed = [one for one in in_turns(shapes(plan), block) if one.share is not None]
    assert len(block.guided) == 4 and len(routed) == 2 * 8
    assert len(in_turns(shapes(plan), block)) == 4 + 2 * 8


def test_what_is_not_swept_is_not_guided(tmp_path: Path) -> None:
    """The option says nothing to a method that does not ask for it."""
    plain, guided = both(tmp_path, "w4g128-awq")
    assert guided.recipe.gptq.guided
    assert replace(guided, recipe=plain.recipe, warnings=plain.warnings) == plain


@pytest.mark.parametrize("sets", [(), ("transforms=[]",)])
def test_gguf(sets: tuple[str, ...]) -> None:
    """The same of a GGUF file; importance is of plain sums, of which transforms have theirs."""
    model = dense("llama", LAYERS, HIDDEN, INNER, 2, 1)
    words = next(t.shape[0] for t in model.tensors if t.name == "token_embd.weight")
    text = ("calibration.samples=4000", TEXT[1])
    tokens = 4000 * LENGTH
    plain = gguf_plan_of(model, "q4_k_m-awq-gptq", *text, *sets, threads=1)
    guided = gguf_plan_of(model, "q4_k_m-awq-gptq", *text, *sets, GUIDED, threads=1)
    states = 4 * HIDDEN * (LAYERS + 3) * tokens
    slopes = 8 * sum(sum(tensor.shape) for tensor in model.tensors if len(tensor.shape) == 2)
    counted = 4 * tokens * LAYERS * len(MATRICES)
    assert guided.memory.disk_bytes - plain.memory.disk_bytes == states + slopes + counted
    more = sum(width**2 for _, width in MATRICES)
    more -= sum(width**2 for width in INPUTS) if sets else 0
    passes = 5 * 2 * sum(out * width for out, width in MATRICES)
    flops = tokens * (LAYERS * (passes + more) + 6 * words * HIDDEN)
    seconds = flops / 8.5e10 + 5 * 4 * HIDDEN * tokens * LAYERS / 4e8
    assert guided.seconds - plain.seconds == pytest.approx(seconds, rel=0.02)
    assert guided.peak_rss_bytes > plain.peak_rss_bytes
