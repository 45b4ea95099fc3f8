"""How long a plan says that a run takes, summed by hand."""

from pathlib import Path

import pytest

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import load
from support.gguf.gguf_plans import plan_of as gguf_plan_of
from support.gguf.gguf_shapes import dense
from support.models import header_files

HIDDEN, INNER, KV, LAYERS = 256, 768, 128, 2
# What each matrix of a block gives and reads, those that read one input together.
INPUTS = (
    [(HIDDEN, HIDDEN), (KV, HIDDEN), (KV, HIDDEN)],
    [(HIDDEN, HIDDEN)],
    [(INNER, HIDDEN), (INNER, HIDDEN)],
    [(HIDDEN, INNER)],
)
RATE = 8.5e10  # operations of a core in a second


def seconds_of(
    folder: Path, shapes: dict[str, tuple[int, ...]], *sets: str, recipe: str = "w4g128-gptq",
    threads: int = 1, **config: object,
) -> float:  # fmt: skip
    header_files.write(folder, shapes, config)
    return make_plan(load(recipe, sets), Checkpoint.open(folder), threads=threads).seconds


def text(samples: int, length: int) -> tuple[str, str]:
    return f"calibration.samples={samples}", f"calibration.length={length}"


@pytest.mark.parametrize("threads", [1, 2])
def test_a_whole_run(threads: int, tmp_path: Path) -> None:
    tokens, length, passes = 4000 * 600, 600, 2
    flops = bytes_ = rounded = small = 0.0
    for matrices in INPUTS:
        width = matrices[0][1]
        flops += 0.55 * 2 * tokens * width**2 + 2 * width**3  # the Gram matrix and its factor
        for out, _ in matrices:
            flops += passes * 2 * tokens * out * width + 2 * out * width**2
            flops += 2 * 2 * min(out, 256) * width**2  # of both, what it was and what it lost
            bytes_ += out * width * (2 + 0.5 + (2 + 0.5) / 128)
            rounded += out * width
            small += 5e-3
    flops += passes * tokens * HIDDEN * 5 * length  # attention
    small += passes * tokens * HIDDEN * 5e-8
    bytes_ += 4 * (HIDDEN * 512 * 2) + 4 * HIDDEN  # both ends, kept; norms are as good as nothing
    work = LAYERS * (flops / RATE + small + rounded / 1.5e8)
    wanted = 6.0 + work / threads + LAYERS * bytes_ / 4e8
    shapes = header_files.llama(LAYERS, HIDDEN, INNER, KV, 512)
    found = seconds_of(tmp_path, shapes, *text(4000, length), threads=threads)
    assert found == pytest.approx(wanted, abs=0.1)


def test_tokens_of_a_longer_sample_look_at_more(tmp_path: Path) -> None:
    shapes = header_files.llama(LAYERS, HIDDEN, INNER, KV, 512)
    short, long = (seconds_of(tmp_path, shapes, *text(*one)) for one in ((4000, 600), (2000, 1200)))
    more = 2 * 5 * (1200 - 600) * 4000 * 600 * HIDDEN * LAYERS / RATE
    assert long - short == pytest.approx(more, abs=0.1)


def test_gguf_counts_attention_too() -> None:
    model = dense("llama", LAYERS, HIDDEN, INNER, 2, 1)
    short, long = (
        gguf_plan_of(model, "q4_k_m-awq-gptq", *text(*one), "gptq.guided=0", "gptq.yaqa=0",
                     threads=1).seconds
        for one in ((4000, 600), (2000, 1200))
    )  # fmt: skip
    each = 5 * (1200 - 600) * 4000 * 600 * HIDDEN * LAYERS / RATE
    assert (long - short) / each == pytest.approx(round((long - short) / each), abs=0.01)
    assert long - short > 1.5 * each  # two passes or more


def test_an_expert_costs_by_what_its_tokens_read_and_give(tmp_path: Path) -> None:
    shapes = header_files.experts(LAYERS, 16, HIDDEN, 128)
    few, many = (
        seconds_of(
            tmp_path, shapes, *text(4000, 600), num_experts=16, num_experts_per_tok=active,
            norm_topk_prob=True,
        )
        for active in (2, 4)
    )  # fmt: skip
    met = 4000 * 600 * (4 - 2)  # more, by all experts of a block together
    flops = seconds = 0.0
    for number, width in ((2, HIDDEN), (1, 128)):
        flops += 0.55 * 2 * met * width**2
        flops += number * 2 * 2 * met * HIDDEN * 128
        seconds += number * 2 * met * (HIDDEN + 128) * 3.5e-9
    assert many - few == pytest.approx(LAYERS * (flops / RATE + seconds), abs=0.2)


def test_what_sees_is_not_as_wide_as_states(tmp_path: Path) -> None:
    shapes = header_files.llama(LAYERS, HIDDEN, INNER, KV, 512)
    eye = {"visual.blocks.0.mlp.fc2.weight": (1280, 5120)}
    alone, seeing = (
        seconds_of(tmp_path / str(number), more, *text(4000, 600))
        for number, more in enumerate((shapes, shapes | eye))
    )
    assert seeing - alone == pytest.approx(4 * 1280 * 5120 / 4e8, abs=0.1)


def test_torch_starts_once(tmp_path: Path) -> None:
    """A rotation is proved with it, and text read."""
    shapes = header_files.llama(LAYERS, HIDDEN, INNER, KV, 512)
    plain, turned = (
        seconds_of(tmp_path, shapes, *text(4, 600), f"transforms=[{chain}]")
        for chain in ("", "rotate")
    )
    weights = 2 * 512 * HIDDEN + LAYERS * (sum(o * i for one in INPUTS for o, i in one))
    assert turned - plain == pytest.approx(2 * weights / 2e7, abs=0.15)
