"""`qtool bench`: rows for every kernel, sane figures, refusals in a sentence."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from qtool import native
from qtool.benching.cases import DTYPES, all_cases
from qtool.benching.run import Settings, bench, cases_named
from qtool.cli.main import app
from qtool.errors import UnsupportedError, UsageError
from qtool.gguf_types import BY_NAME
from qtool.native.library import aligned
from qtool.native.plain import plain

TINY = Settings(traffic=1e6, seconds=0.001, runs=1)


def test_every_kernel_has_a_case() -> None:
    names = [(case.name, case.dtype) for case in all_cases()]
    assert len(names) == len(set(names))
    for block in BY_NAME:
        assert {d for name, d in names if name == f"dequantize gguf-{block}"} == set(DTYPES)
        assert (f"encode gguf-{block} importance", "blocks") in names
    for bits in (2, 3, 4, 8):
        assert (f"dequantize gptq {bits} bits", "bfloat16") in names


def test_figures() -> None:
    before = native.selected()
    cases = [*cases_named("dequantize gptq 4 bits float32"), *cases_named("unpack across")]
    report = bench(cases, TINY)
    assert native.selected() == before
    assert len(report.results) == len(cases) * len(native.available())
    for result in report.results:
        assert result.weights > 0
        assert 0.01 < result.mweights_per_s < 1e6
        assert result.fraction == result.mweights_per_s / result.plain_mweights_per_s
        assert result.gains is None


@pytest.mark.parametrize(
    "name", ["encode gguf-Q4_0", "gptq_sweep*float64", "pack strips*", "convert float16*", "*fp4*"]
)
def test_every_kind_of_case_runs(name: str) -> None:
    report = bench(cases_named(name), TINY, native.available()[-1:])
    assert report.results


def test_json() -> None:
    options = ["bench", "--quick", "--json", "--kernels", "dequantize nvfp4 float16", "--threads"]
    said = CliRunner().invoke(app, [*options, "2"])
    assert said.exit_code == 0
    found = json.loads(said.stdout)
    assert found["threads"] == 2
    (result,) = found["results"]
    assert result["kernel"] == "dequantize nvfp4"
    assert result["isa"] == native.available()[-1]
    assert result["mweights_per_s"] > 0
    assert set(result["gains"]) == {"kernel", "plain", "cached"}
    assert all(0.01 < gain < 100 for gain in result["gains"].values())


def test_table() -> None:
    said = CliRunner().invoke(app, ["bench", "--quick", "--kernels", "convert float32 float16"])
    assert said.exit_code == 0
    assert "convert float32" in said.stdout and "memory allows" in said.stdout
    assert "in cache" not in said.stdout
    command = ["bench", "--quick", "--kernels", "convert float32 float16", "--threads", "2"]
    said = CliRunner().invoke(app, command)
    assert "in cache" in said.stdout and said.stdout.count("x ") >= 3


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match="no kernel matches 'q9_k'; there are convert, "):
        cases_named("q9_k")
    said = CliRunner().invoke(app, ["bench", "--device", "tpu"])
    assert isinstance(said.exception, UsageError)
    assert "tpu: expected cpu or cuda" in str(said.exception)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("size", "room"), [(1 << 16, 1 << 18), (1 << 18, 1 << 16), (4096, 8192)])
def test_the_plain_loop_fills_its_target(size: int, room: int, streaming: bool) -> None:
    source, target = aligned((size,), np.uint8), aligned((room,), np.uint8)
    source[:] = 7
    before = native.selected()
    for isa in native.available():
        native.select(isa)
        target[:] = 1
        plain(source, target, streaming=streaming, threads=2)
        # From a larger source, the exclusive or of 4, 8, 12, ... equal vectors is stored.
        assert (target == (7 if size <= room else 0)).all(), isa
    native.select(before)
    with pytest.raises(ValueError, match="expected at least 64"):
        plain(source[:32], target)
