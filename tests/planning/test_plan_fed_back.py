"""Plans of gptq.yaqa: what it takes to tell how rows compensate for each other."""

from pathlib import Path

import pytest

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.planning import estimate
from qtool.planning.peak import KEPT_BYTES_PER_WEIGHT
from qtool.planning.plan import Plan, make_plan
from qtool.planning.shapes import Block, Input, Setting, Shapes, shapes_of, whole_batches
from qtool.recipe.recipe import load
from support.gguf.gguf_plans import plan_of as gguf_plan_of
from support.gguf.gguf_shapes import dense
from support.models import header_files

HIDDEN, INNER, KV, LAYERS, VOCABULARY = 256, 768, 128, 2, 512
LENGTH = 600
INSIDE = 2 * HIDDEN * HIDDEN + 2 * KV * HIDDEN + 3 * HIDDEN * INNER  # of a block
MADE = [INNER, INNER, HIDDEN, HIDDEN, HIDDEN, KV, KV]  # rows of its matrices
READ = [HIDDEN, HIDDEN, HIDDEN, HIDDEN, INNER, HIDDEN, HIDDEN]  # and columns


def both(folder: Path, recipe: str, samples: int = 100) -> tuple[Plan, Plan]:
    """The plan of a recipe without, and with rows that compensate for each other."""
    header_files.write(folder, header_files.llama(LAYERS, HIDDEN, INNER, KV, VOCABULARY))
    model = Checkpoint.open(folder)
    text = ("calibration.samples=4000", f"calibration.length={LENGTH}")
    plain, fed = (load(recipe, [*text, f"gptq.yaqa={n}"]) for n in (0, samples))
    return make_plan(plain, model, threads=1), make_plan(fed, model, threads=1)


def seconds(weights: int, tokens: int) -> float:
    flops = 7 * 2 * tokens * weights
    for out, width in zip(MADE, READ, strict=True):
        flops += 2 * LAYERS * out * (tokens * out + out**2 + out * width)
    return flops / 8.5e10


@pytest.mark.parametrize("recipe", ["w4g128-gptq", "w4g128-awq-gptq"])
def test_time_and_room_on_the_disk(recipe: str, tmp_path: Path) -> None:
    plain, fed = both(tmp_path, recipe)
    weights = LAYERS * INSIDE + 2 * VOCABULARY * HIDDEN
    wanted = seconds(weights, 100 * LENGTH)
    assert fed.seconds - plain.seconds == pytest.approx(wanted, abs=0.1)
    shapes = shapes_of(fed.recipe, fed.tensors)
    behind = 4 * 100 * LENGTH * HIDDEN * LAYERS
    # Less is on the disk while they are measured than of 4000 samples afterwards.
    assert fed.disk_bytes == plain.disk_bytes + behind == shapes.on_disk
    _, every = both(tmp_path, recipe, 4000)
    states = 4 * 4000 * LENGTH * HIDDEN
    assert every.disk_bytes == states * (LAYERS + LAYERS + 3) + shapes.sensitivities


def test_gguf() -> None:
    model = dense("llama", LAYERS, HIDDEN, INNER, 2, 1)
    text = ("calibration.samples=4000", f"calibration.length={LENGTH}")
    plain, fed = (
        gguf_plan_of(model, "q4_k_m-awq-gptq", *text, f"gptq.yaqa={n}", threads=1) for n in (0, 100)
    )
    outside = [t for t in fed.tensors if not t.name.startswith("blk") and len(t.shape) == 2]
    weights = LAYERS * INSIDE + sum(tensor.parameters for tensor in outside)
    wanted = seconds(weights, 100 * LENGTH)
    assert fed.seconds - plain.seconds == pytest.approx(wanted, abs=0.1)
    assert fed.memory.disk_bytes - plain.memory.disk_bytes == 4 * 100 * LENGTH * HIDDEN * LAYERS


@pytest.mark.parametrize("inner", [128, HIDDEN])
def test_experts(inner: int, tmp_path: Path) -> None:
    """Of their last matrices: one H and factor for all of a block, gradients of those that a token
    meets."""
    count, met, tokens = 4, 2, 100 * LENGTH
    shapes = header_files.experts(LAYERS, count, HIDDEN, inner)
    config = {"num_experts": count, "num_experts_per_tok": met}
    model = Checkpoint.open(header_files.write(tmp_path / "m", shapes, config))
    text = ("calibration.samples=4000", f"calibration.length={LENGTH}")
    plain, fed = (
        make_plan(load("w4g128-gptq", [*text, f"gptq.yaqa={n}"]), model, threads=1)
        for n in (0, 100)
    )
    weights = LAYERS * (count * HIDDEN + met * 3 * HIDDEN * inner) + 512 * HIDDEN
    flops = 7 * 2 * tokens * weights
    flops += 2 * LAYERS * HIDDEN * (met * tokens * HIDDEN + count * HIDDEN * inner)
    assert fed.seconds - plain.seconds == pytest.approx(flops / 8.5e10, abs=0.1)
    few, more = (shapes_of(one.recipe, one.tensors, met / count) for one in (plain, fed))
    (block,) = more.blocks
    assert (block.given, block.made) == (met * HIDDEN, ())
    # Of each expert's last matrix alone, and of no rows of its own.
    assert {(one.width, one.rows, one.fed) for one in block.inputs if one.share} == {
        (HIDDEN, 0, 0), (inner, 0, HIDDEN * inner),
    }  # fmt: skip
    rounding = "rounding the matrices of a block"
    parts = [
        {stage.of: stage.nbytes for stage in estimate._in_block(one, block, Setting(1))}
        for one in (few, more)
    ]
    each = [max(estimate._job(one, part) for part in block.inputs) for one in (few, more)]
    assert each[1] >= 4 * inner**2 + estimate.FED_BACK_BYTES * HIDDEN * inner
    assert parts[1][rounding] - parts[0][rounding] == 4 * HIDDEN**2 + each[1] - each[0]
    kept = estimate.BACK_OF_HIDDEN * HIDDEN + estimate.BACK_OF_WIDEST * block.widest
    back = parts[1]["gradients by what matrices of a block give"]
    grams = 4 * sum(one.width**2 for one in estimate._together(more, block, Setting(1)))
    free = KEPT_BYTES_PER_WEIGHT * max(one.largest for one in block.inputs)
    assert back == free + block.nbytes + grams + 4 * HIDDEN**2 + int(
        4 * more.batch * (kept + 3 * met * HIDDEN)
    )


def wide_experts(hidden: int) -> tuple[Shapes, Block]:
    """A block of few tokens, of whose experts' H little is beside its factor."""
    inputs = (Input(hidden, 0, 0.5), Input(64, 0, 0.5, fed=64 * hidden))
    block = Block(0, 0, 64, inputs, given=hidden)
    return Shapes(
        True, 1, 1, 1, hidden, 0, 0, 0, (block,), grams=True, chained=False, solves=True,
        fed_back=1,
    ), block  # fmt: skip


@pytest.mark.parametrize(("hidden", "factored"), [(2048, 12), (4096, 4)])
def test_the_sum_of_experts_is_factored_as_other_matrices_are(hidden: int, factored: int) -> None:
    """A wide one in place."""
    shapes, block = wide_experts(hidden)
    stages = estimate._in_block(shapes, block, Setting(1))
    back = next(
        one.nbytes for one in stages if one.of == "gradients by what matrices of a block give"
    )
    grams = 4 * (hidden**2 + 64**2)
    assert back == grams + (4 + factored) * hidden**2


def test_memory(tmp_path: Path) -> None:
    plain, fed = (shapes_of(one.recipe, one.tensors) for one in both(tmp_path, "w4g128-gptq"))
    assert fed.blocks[0].made == tuple(MADE)
    for threads in (1, 2):
        few, more = (
            {stage.of: stage.nbytes for stage in estimate._in_block(one, block, Setting(threads))}
            for one in (plain, fed)
            for block in one.blocks
        )
        (name,) = more.keys() - few.keys()
        assert name == "gradients by what matrices of a block give"
        rounding = "rounding the matrices of a block"
        rows = 4 * sum(out**2 for out in MADE)
        # What gate and up read is narrow, and their rows are many: these take most, then the input
        # of down_proj, which alone took most without.
        gate = 4 * HIDDEN**2 + 12 * INNER**2
        down, plain_gate = 12 * INNER**2, 4 * HIDDEN**2 + 6 * HIDDEN * INNER
        assert gate > down > plain_gate
        own = sum([gate, down][:threads]) - sum([down, plain_gate][:threads])
        assert more[rounding] - few[rounding] == rows + own
    both_peaks = [estimate.peak(one, Setting(2)).nbytes for one in (plain, fed)]
    assert both_peaks[1] > both_peaks[0] + 50_000_000


@pytest.mark.parametrize(
    ("widths", "measured"), [((2048, 5632, 512), 1579), ((1024, 2816, 256), 940)]
)
def test_as_much_as_was_measured(
    widths: tuple[int, int, int], measured: int, tmp_path: Path
) -> None:
    """By two threads, of the shapes 2048 and 1024 of tests/benchmarks/max_ram.py."""
    model = header_files.write(tmp_path / "m", header_files.llama(2, *widths, vocabulary=2048))
    text = ("calibration.samples=8", "calibration.length=512")
    planned = make_plan(load("w4g128-awq-gptq", text), Checkpoint.open(model), threads=2)
    assert measured <= planned.peak_rss_bytes / 2**20 <= 1.15 * measured


@pytest.mark.parametrize(
    ("some", "samples", "length", "tokens"),
    [
        (0, 9, 512, 0),
        (1, 9, 512, 1024),
        (16, 128, 512, 8192),
        (5, 9, 256, 2048),
        (99, 9, 300, 2700),
    ],
)
def test_whole_micro_batches(some: int, samples: int, length: int, tokens: int) -> None:
    assert whole_batches(some, samples, length) == tokens


def test_what_is_not_swept_has_none(tmp_path: Path) -> None:
    plain, fed = both(tmp_path, "w4g128-awq")
    assert fed.recipe.gptq.yaqa == 100
    assert (fed.seconds, fed.disk_bytes, fed.memory) == (
        plain.seconds, plain.disk_bytes, plain.memory,
    )  # fmt: skip


def test_statistics_of_a_file_need_no_gradients(tmp_path: Path) -> None:
    shapes = header_files.llama(LAYERS, HIDDEN, INNER, KV, VOCABULARY)
    model = Checkpoint.open(header_files.write(tmp_path / "m", shapes))
    text = ["calibration.samples=4000", f"calibration.length={LENGTH}"]
    saved, plain, fed = (
        make_plan(load("w4g128-awq-gptq", [*text, *more]), model, threads=1, from_stats=given)
        for more, given in (([], True), (["gptq.yaqa=0", "gptq.guided=0"], False), ([], False))
    )
    assert saved.peak_rss_bytes == plain.peak_rss_bytes < fed.peak_rss_bytes
    assert saved.seconds == plain.seconds < fed.seconds
    assert saved.disk_bytes == plain.disk_bytes <= fed.disk_bytes
