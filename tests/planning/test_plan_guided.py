"""Plans of gptq.guided: what it takes to find what tokens of keys and values count."""

from dataclasses import replace
from pathlib import Path

import pytest

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cli.plan import _end
from qtool.planning import estimate
from qtool.planning.plan import Plan, make_plan
from qtool.planning.shapes import Setting, shapes_of
from qtool.recipe.recipe import Recipe, load
from support.gguf.gguf_plans import plan_of as gguf_plan_of
from support.gguf.gguf_shapes import dense
from support.models import header_files

GUIDED = "gptq.guided=0.5"
HIDDEN, INNER, KV, LAYERS = 256, 768, 128, 2
LENGTH = 600
WEIGHTS = 2 * HIDDEN * HIDDEN + 2 * KV * HIDDEN + 3 * HIDDEN * INNER  # of a block


def both(folder: Path, recipe: str, samples: int = 40) -> tuple[Plan, Plan]:
    """The plan of a recipe without, and guided."""
    header_files.write(folder, header_files.llama(LAYERS, HIDDEN, INNER, KV, 512))
    model = Checkpoint.open(folder)
    text = (f"calibration.samples={samples}", f"calibration.length={LENGTH}")
    plain, guided = (load(recipe, [*text, more]) for more in ("gptq.guided=0", GUIDED))
    assert isinstance(plain, Recipe) and isinstance(guided, Recipe)
    return make_plan(plain, model, threads=1), make_plan(guided, model, threads=1)


@pytest.mark.parametrize("recipe", ["w4g128-gptq", "w4g128-awq-gptq"])
def test_most_of_a_forward_pass(recipe: str, tmp_path: Path) -> None:
    plain, guided = both(tmp_path, recipe, samples=4000)
    flops = 0.8 * 2 * 4000 * LENGTH * LAYERS * WEIGHTS
    assert guided.seconds - plain.seconds == pytest.approx(flops / 8.5e10, rel=0.01)
    assert guided.disk_bytes == plain.disk_bytes > 0


def test_gguf() -> None:
    model = dense("llama", LAYERS, HIDDEN, INNER, 2, 1)
    text = ("calibration.samples=4000", f"calibration.length={LENGTH}")
    plans = [
        gguf_plan_of(model, "q4_k_m-awq-gptq", *text, more, threads=1)
        for more in ("gptq.guided=0", GUIDED)
    ]
    plain, guided = plans
    flops = 0.8 * 2 * 4000 * LENGTH * LAYERS * WEIGHTS
    assert guided.seconds - plain.seconds == pytest.approx(flops / 8.5e10, rel=0.01)
    assert guided.memory.disk_bytes == plain.memory.disk_bytes


def test_memory_of_what_autograd_keeps(tmp_path: Path) -> None:
    plain, guided = (shapes_of(one.recipe, one.tensors) for one in both(tmp_path, "w4g128-gptq"))
    for threads in (1, 2):
        stages = [
            estimate._in_block(one, one.blocks[0], Setting(threads)) for one in (plain, guided)
        ]
        few, more = ({stage.of: stage.nbytes for stage in some} for some in stages)
        (name,) = more.keys() - few.keys()
        assert name == "gradients of keys and values"
        batch = -(-guided.batch // LENGTH) * LENGTH
        assert more[name] == 4 * (WEIGHTS + 2 * HIDDEN) + threads * int(4 * batch * 28 * HIDDEN)
        rows = "measuring a block's inputs"
        assert more[rows] - few[rows] == threads * 4 * batch * HIDDEN


def test_wide_queries_take_more(tmp_path: Path) -> None:
    """As many as Qwen3's, twice as wide as the states."""
    found = []
    for kv in (KV, 8 * HIDDEN):
        header_files.write(tmp_path / f"{kv}", header_files.llama(LAYERS, HIDDEN, INNER, kv, 512))
        plan = make_plan(load("w4g128-awq-gptq"), Checkpoint.open(tmp_path / f"{kv}"), threads=1)
        shapes = shapes_of(plan.recipe, plan.tensors)
        (block,) = shapes.blocks
        assert block.attending == HIDDEN + 2 * kv
        stages = estimate._in_block(shapes, block, Setting(1))
        gradients = next(one.nbytes for one in stages if one.of == "gradients of keys and values")
        found.append((gradients - block.nbytes) / (4 * shapes.batch * HIDDEN))
    assert found == [28, 9 + 6 * 17]


def test_what_is_not_swept_is_not_guided(tmp_path: Path) -> None:
    """The option says nothing to a method that does not ask for it."""
    plain, guided = both(tmp_path, "w4g128-awq")
    assert guided.recipe.gptq.guided
    assert replace(guided, recipe=plain.recipe, warnings=plain.warnings) == plain


def test_much_room_on_the_disk_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few, many = (both(tmp_path / f"{n}", "w4g128-gptq", n)[0] for n in (400, 4000))
    assert few.disk_bytes < 1e9 < many.disk_bytes
    for plan in (few, many):
        _end(plan.memory, 1.0, [])
    quiet, told = capsys.readouterr().out.splitlines()
    assert "disk" not in quiet
    assert f" MiB, {many.disk_bytes / 1e9:.1f} GB of disk beside the artifact, time " in told
