"""Round to nearest works on some rows at a time: the same artifact as of whole matrices."""

import time
import tracemalloc
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.converting import view as converted
from qtool.errors import UnsupportedError
from qtool.formats import awq
from qtool.hub import tiny_folder
from qtool.messages.progress import Progress
from qtool.methods.rtn import ON_CPU
from qtool.planning.plan import make_plan
from qtool.planning.shapes import CACHED_AT_ONCE
from qtool.quantizing import pipeline
from qtool.recipe.recipe import load
from qtool.runs import by_rows, each_tensor
from qtool.runs import sink as sink_module
from qtool.runs.sink import Sink
from qtool.scheme import Scheme
from qtool.streaming.weights import rows_of
from support.models import header_files
from support.runs.quantizing import files, quantize

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
    monkeypatch.setattr(each_tensor, "CACHED_AT_ONCE", 1)
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
    make = partial(by_rows.nearest, scheme=planned.action, recipe=plan.recipe, rounding=ON_CPU)
    stored = sum(spec.nbytes for spec in planned.outputs)
    (out := tmp_path / "out").mkdir()
    tracemalloc.start()
    with Sink(plan, checkpoint, out) as sink:
        by_rows.quantize_rows(
            planned, checkpoint, make, sink.packed,
            read=rows_of(checkpoint, planned.name), weights=CACHED_AT_ONCE,
        )  # fmt: skip
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < stored + 16e6, peak - stored


def test_a_refusal_names_the_row_of_the_matrix(tmp_path: Path) -> None:
    """Of the last of many rows that are rounded together."""
    model = header_files.write(tmp_path / "m", header_files.llama(1, 1024, 2048, 256), dtype="F32")
    info = Checkpoint.open(model).tensors["model.layers.0.mlp.up_proj.weight"]
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(info.start + 4 * (1900 * 1024 + 5))
        file.write(np.float32(3e7).tobytes())
    with pytest.raises(UnsupportedError, match=r"up_proj\.weight: row 1900, group 0 needs"):
        quantize(model, "w4g128-rtn", tmp_path / "out")


def test_a_matrix_of_other_numbers_is_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(header_files.write(tmp_path / "m", {"a": (8, 8)}, dtype="I8"))
    with pytest.raises(UnsupportedError, match="a: expected weights in F32, F16 or BF16, found I8"):
        rows_of(checkpoint, "a")


def test_a_view_makes_what_it_copies_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large it is, and however many threads copy; and packing takes the time that it
    takes."""
    source = quantize(tiny_folder(), "fp8-block", tmp_path / "fp8").out
    read: list[str] = []
    plain, pack, dequantize = converted.plain, awq.pack, converted.dequantize

    def slowly(*given: Any) -> Any:
        time.sleep(0.001)  # what is told is rounded to this
        return pack(*given)

    def counted(tensor: Any, *rest: Any) -> Any:
        read.append(tensor.name)
        return plain(tensor, *rest)

    def late(quant: Any, rows: slice) -> Any:
        time.sleep(0.001)  # so that threads take turns
        return dequantize(quant, rows)

    def opened(view: Any, name: str, step: Any) -> Any:
        read.extend([step.tensor.name] * (name not in view._open))
        return quantized(view, name, step)

    quantized = converted.Plain._quantized
    monkeypatch.setattr(converted.Plain, "_quantized", opened)

    monkeypatch.setattr(awq, "pack", slowly)
    monkeypatch.setattr(converted, "dequantize", late)
    monkeypatch.setattr(converted, "plain", counted)
    monkeypatch.setattr(sink_module, "_READ_AT_ONCE", 4096)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "# of a test\nmethod: rtn\nformat: awq\n"
        "weights: {bits: 4, group_size: 128, symmetric: false}\n"
        "overrides: [{match: '*.mlp.*', dense: true}]\n"
    )
    request = pipeline.Request(
        model="x", source=source, recipe=load(str(recipe)), out=tmp_path / "out", stats=None,
        threads=4, max_shard_bytes=1 << 30, requantize=True,
    )  # fmt: skip
    summary = pipeline.run(request, Progress(quiet=True))
    assert summary.seconds["pack"] > 0
    assert len(read) == len(set(read)) == 28


def test_what_overflows_warns_of_nothing() -> None:
    """numpy's own warning stood before the sentence that says what is wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert by_rows._squares(np.full(4, 1e30, np.float32)) == np.inf
