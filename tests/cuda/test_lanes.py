"""Threads that round side by side on streams of their own, on the emulated GPU."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qtool.cuda import lanes
from qtool.cuda.device import Device, host
from qtool.errors import UnsupportedError
from qtool.recipe.recipe import Recipe, load
from qtool.runs import by_rows, each_tensor
from support.cuda.cuda_emulation import emulator
from support.cuda.emulated_cuda import Cuda
from support.cuda.emulated_gpu import cuda, gpu, quantized
from support.models.small_models import checkpoint
from support.runs import quantizing

__all__ = ["cuda", "emulator", "gpu"]


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "fp8-dynamic"])
def test_rounding_side_by_side(
    recipe: str, cuda: Cuda, gpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows at a time on streams of their own, as many as threads; the CPU's bytes."""
    monkeypatch.setattr(each_tensor, "ROWS_AT_ONCE", 1 << 10)
    source = checkpoint(tmp_path, "llama").path
    sets = ["weights.group_size=32"] if "g128" in recipe else []
    before = len(cuda.streams)
    quantized(recipe, tmp_path / "there", gpu, source, *sets)
    assert before + 1 <= len(cuda.streams) <= before + 2 and cuda.devices == {1}
    assert sum(name.endswith("_codes") for name in cuda.launched) > 2 * 14
    quantized(recipe, tmp_path / "here", None, source, *sets)
    assert quantizing.files(tmp_path / "here") == quantizing.files(tmp_path / "there")


def test_lanes_are_lent_to_one_at_a_time(cuda: Cuda, gpu: Device) -> None:
    """What a lane copies may be under way when the next array is put; its own stream orders it."""
    lent = lanes.Lanes(gpu)
    with lent.one() as first, lent.one() as second:
        assert first.stream is not second.stream and first.alone is not second.alone
        for one in (first, second):
            with one.alone, one.explained():
                assert torch.cuda.current_stream() is one.stream
                numbers = [one.put(np.full(64, n, np.float32)) for n in (1, 2)]
                np.testing.assert_array_equal(host(numbers[0] + numbers[1]), 3)
    with lent.one() as again, again.explained():
        assert again.stream in (first.stream, second.stream)
        there = again.put(np.ones(64, np.float32))
        with (
            pytest.raises(UnsupportedError, match="not hold rows of 4 matrices"),
            again.explained(),
        ):
            raise torch.OutOfMemoryError("20 GiB")
    assert not cuda.order.faults
    _ = there * 2  # by another stream, which nothing orders after the copy
    assert cuda.order.faults
    del there
    cuda.order.faults.clear()
    before = len(cuda.streams)
    for _ in range(lanes.LANES):
        with pytest.raises(KeyError), lent.one():
            raise KeyError
    assert len(cuda.streams) == before  # those that failed came back


@pytest.mark.parametrize("recipe", ["int8-llmint8", "w8-rtn"])
def test_only_what_is_rounded_there_has_a_lane(
    recipe: str, gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLM.int8() is the CPU's, by as many threads as there are."""

    def one(_: lanes.Lanes) -> Any:
        raise KeyError

    monkeypatch.setattr(lanes.Lanes, "one", one)
    loaded, weight = load(recipe), np.ones((2, 64), np.float32)
    assert isinstance(loaded, Recipe)
    rounding = by_rows.side_by_side(gpu)
    with nullcontext() if "llmint8" in recipe else pytest.raises(KeyError):
        by_rows.nearest(weight, 0, loaded.scheme, loaded, rounding)
