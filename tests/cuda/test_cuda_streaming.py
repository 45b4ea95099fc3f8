"""Blocks and states on a device: what is measured there, passes, and is left behind."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qtool.calibrating import placed
from qtool.calibrating.sites import Tracer
from qtool.calibrating.stats import HISTOGRAM, NEEDS, collect
from qtool.cuda.device import Device
from qtool.streaming.hidden import OnDisk
from qtool.streaming.reading import Reading
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import InMemory, LoadedBlock, Stream
from qtool.streaming.workers import Workers
from support.cuda.cuda_device import device, emulator
from support.models import arch_models
from support.models.arch_models import VOCABULARY
from support.models.small_models import checkpoint, models

__all__ = ["device", "emulator", "models"]

ON_GPU = os.environ.get("QTOOL_TEST_DEVICE") == "cuda"


def opened(models: Path, name: str) -> tuple[Skeleton, Stream]:
    skeleton = Skeleton.open(checkpoint(models, name))
    tokens = np.random.default_rng(2).integers(3, VOCABULARY, (7, 40), dtype=np.int64)
    return skeleton, skeleton.embed(tokens, micro_batch_tokens=80)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_what_is_measured_there(name: str, models: Path, device: Device) -> None:
    """Every statistic, and the hidden states after the block: those of the CPU. The host's block
    stays as it is."""
    skeleton, stream = opened(models, name)
    block = skeleton.block(0)
    sites = Tracer().sites(block, stream).sites
    before = [one.clone() for one in stream.hidden]
    with Workers(2) as workers:
        wanted = collect(block, stream, sites, NEEDS | HISTOGRAM, workers)
        calls = placed.Calls(stream.calls, device)
        with placed.placed(device, calls, block, stream, workers) as (there, passing, turn):
            assert all(p.device.type == device.place.type for p in there.module.parameters())
            assert not {p.data_ptr() for p in there.module.parameters()} & {
                p.data_ptr() for p in block.module.parameters()
            }
            found = collect(there, passing, sites, NEEDS | HISTOGRAM, turn)
            assert all(torch.equal(a, b) for a, b in zip(before, stream.hidden, strict=True))
            skeleton.advance(there, passing, turn)
        after = [one.clone() for one in stream.hidden]
        stream = replace(stream, hidden=before)
        skeleton.advance(block, stream, workers)

    def alike(one: NDArray[Any], other: NDArray[Any]) -> None:
        limit = 1e-4 * float(np.abs(other).max()) if ON_GPU else 0.0
        np.testing.assert_allclose(one, other, rtol=0, atol=limit)

    for one, other in zip(after, stream.hidden, strict=True):
        alike(one.numpy(), other.numpy())
    for site in sites:
        mine, its = found[site.id], wanted[site.id]
        assert mine.count == its.count
        for key in ("gram", "mean_abs", "max_abs", "square", "histogram"):
            if its.count and not (ON_GPU and key == "histogram"):
                alike(getattr(mine, key), getattr(its, key))


@pytest.mark.parametrize("on_disk", [True, False])
def test_states_pass_in_their_order(on_disk: bool, tmp_path: Path, device: Device) -> None:
    """A micro-batch is read before the one before it is written back, and of every shape."""
    states: Any = OnDisk(tmp_path) if on_disk else InMemory()
    first = [torch.full((samples, 3, 2), float(number)) for number, samples in enumerate([2, 2, 1])]
    for one in first:
        states.append(one)
    passing = placed.Passing(states, device)
    for round_ in (1, 2):
        for number in range(len(passing)):
            there = passing[number]
            assert there.device.type == device.place.type
            assert torch.equal(there.cpu(), first[number] * 2 ** (round_ - 1))
            passing[number] = there * 2
            assert torch.equal(there.cpu(), first[number] * 2 ** (round_ - 1))
        passing.settle()
        for number, one in enumerate(states):
            assert torch.equal(one, first[number] * 2**round_)
    assert torch.equal(passing[1].cpu(), first[1] * 4)  # not the one that was read ahead
    assert [float(one.mean()) for one in passing] == [0.0, 4.0, 8.0]


@pytest.mark.parametrize("name", arch_models.CONFIGS)
def test_nothing_of_a_block_stays_behind(name: str, models: Path) -> None:
    """On torch's meta device, where nothing is computed, but where an operation on numbers that
    are partly elsewhere fails, as on a GPU: no other test here can tell one from the CPU."""
    skeleton, stream = opened(models, name)
    meta = torch.device("meta")
    calls = placed.Calls(stream.calls, Device(meta, print, "", 0))
    for index in range(skeleton.count):
        there = placed.placed_block(skeleton.block(index), meta)
        tensors = [*there.module.parameters(), *there.module.buffers()]
        assert tensors and all(one.device.type == "meta" for one in tensors)
        # Which rows an expert reads depends on numbers.
        if not any(".experts." in tensor for tensor in skeleton.block_tensors(index)):
            hidden = torch.empty(stream.hidden[0].shape, device="meta")
            assert there.run(hidden, calls[index][0]).device.type == "meta"
    block = skeleton.block(0)
    with pytest.raises(RuntimeError, match=r"not on the expected device|same device"):
        placed.placed_block(block, meta).run(stream.hidden[0], stream.calls[0][0])


def test_the_next_block_is_read_meanwhile(models: Path) -> None:
    skeleton, _ = opened(models, "llama")
    read: list[int] = []

    class Watched:
        count = skeleton.count

        def block(self, index: int, reading: Reading | None = None) -> LoadedBlock:
            read.append(index)
            return skeleton.block(index, reading)

    gpu = Device(torch.device("cpu"), print, "", 0)
    with placed.ahead(Watched(), gpu) as blocks:  # type: ignore[arg-type]
        taken = blocks.take(0)
        assert taken.index == 0
    assert read == [0, 1]  # the thread has ended
    with placed.ahead(Watched(), None) as blocks:  # type: ignore[arg-type]
        assert blocks.take(1).index == 1
    assert read == [0, 1, 1]
