"""Round to nearest works on some rows at a time: the same artifact as of whole matrices."""

import tracemalloc
from functools import partial
from pathlib import Path

import header_files
import pytest
from quantizing import files, quantize

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.hub import tiny_folder
from qtool.planning.plan import make_plan
from qtool.planning.shapes import CACHED_AT_ONCE
from qtool.recipe.recipe import load
from qtool.runs import by_rows, pipeline
from qtool.runs.sink import Sink
from qtool.scheme import Scheme
from qtool.streaming.weights import rows_of

RECIPES = [
    "w4g128-rtn", "w4g64-rtn", "w8-rtn", "w3g128-rtn", "w8a16-ct", "w8a8-dynamic", "fp8-dynamic",
    "fp8-block", "fp8-block-hf", "mxfp4", "mxfp4-w4a4", "nvfp4", "w4g64-mlx-rtn", "w8g64-mlx-rtn",
]  # fmt: skip
SETS = [
    ("w4g128-rtn", "awq.layout=gemv"), ("w4g128-rtn", "awq.layout=gemv_fast"),
    ("w4g128-rtn", "awq.layout=llm_awq"), ("w4g128-rtn", "rtn.clip=true"),
    ("w4g128-rtn", "transforms=[rotate]"), ("w4g128-rtn", "format=gptq"),
    ("nvfp4", "rtn.clip=true"), ("fp8-dynamic", "weights.rows=-1"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "change"), [*((r, "") for r in RECIPES), *SETS])
def test_no_byte_depends_on_how_many_rows_there_are(
    recipe: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [change] if change else []
    assert not load(recipe, sets).calibrates
    whole = quantize(tiny_folder(), recipe, tmp_path / "whole" / "m", *sets)
    monkeypatch.setattr(pipeline, "CACHED_AT_ONCE", 1)
    some = quantize(tiny_folder(), recipe, tmp_path / "some" / "m", *sets)
    assert files(whole.out) == files(some.out)
    if load(recipe, sets).weights.rows > 0:
        assert all(len(quant.codes) for quant in some.quants.values())


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "w8a16-ct", "fp8-dynamic", "nvfp4"])
def test_memory_is_that_of_some_rows_and_of_what_they_become(recipe: str, tmp_path: Path) -> None:
    """A matrix of 16 million weights, which are 67 MB as float32."""
    shapes = header_files.llama(1, 2048, 8192, 256)
    checkpoint = Checkpoint.open(header_files.write(tmp_path / "m", shapes))
    plan = make_plan(load(recipe), checkpoint)
    planned = plan.by_name["model.layers.0.mlp.up_proj.weight"]
    assert isinstance(planned.action, Scheme)
    rounded = partial(by_rows.nearest, scheme=planned.action, recipe=plan.recipe, device=None)
    stored = sum(spec.nbytes for spec in planned.outputs)
    (out := tmp_path / "out").mkdir()
    tracemalloc.start()
    with Sink(plan, checkpoint, out) as sink:
        by_rows.quantize_rows(
            planned, checkpoint, rounded, sink.packed,
            read=rows_of(checkpoint, planned.name), weights=CACHED_AT_ONCE,
        )  # fmt: skip
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < stored + 16e6, peak - stored
