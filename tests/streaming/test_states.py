"""Hidden states between two blocks: in memory they stay in their places, and on the disk there."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qtool.blockwise.originals import Originals
from qtool.calibrating.placed import Passage
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.streaming.hidden import OnDisk
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import InMemory, States, Stream
from qtool.streaming.workers import Workers
from support.models.arch_models import VOCABULARY, build


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(2) as pool:
        yield pool


def test_states_in_memory_stay_where_they_are(tmp_path: Path, workers: Workers) -> None:
    skeleton = Skeleton.open(Checkpoint.open(build("llama", tmp_path)))
    tokens = np.random.default_rng(0).integers(3, VOCABULARY, (5, 40), dtype=np.int64)
    stream = skeleton.embed(tokens, micro_batch_tokens=80)
    before = [(one.data_ptr(), one.clone()) for one in stream.hidden]
    skeleton.advance(skeleton.block(0), stream, workers)
    for (place, states), now in zip(before, stream.hidden, strict=True):
        assert now.data_ptr() == place and not torch.equal(now, states)


def test_states_in_memory_are_nobody_elses() -> None:
    hidden = InMemory()
    given = torch.zeros(3, 2, 4).movedim(0, 1)
    hidden.append(given)
    given += 1
    assert not hidden[0].any() and hidden[0].is_contiguous()
    with torch.inference_mode():  # of the caller, and not of the threads that write
        hidden.append(given)
    hidden[1] = torch.zeros(2, 3, 4)
    for other in (torch.ones(2, 3, 4).double(), torch.ones(4)):
        with pytest.raises(AssertionError):
            hidden[0] = other


@pytest.mark.parametrize("on_disk", [True, False])
def test_states_of_the_original_are_kept_as_those_of_the_run(
    on_disk: bool, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From disk to disk one after the other, however little memory there is."""
    there: list[weakref.ref[torch.Tensor]] = []
    read = OnDisk.__getitem__

    def counted(self: OnDisk, number: int) -> torch.Tensor:
        assert sum(one() is not None for one in there) < 2
        found = read(self, number)
        there.append(weakref.ref(found))
        return found

    monkeypatch.setattr(OnDisk, "__getitem__", counted)
    hidden: States = OnDisk(tmp_path) if on_disk else InMemory()
    for number in range(5):
        hidden.append(torch.full((2, 3, 4), float(number)))
    nothing: Any = None
    stream = Stream(hidden, nothing, [], [], 0)
    both = Originals.of(nothing, Passage.of(stream, workers, None), tmp_path)
    kept = both.original.stream.hidden
    assert type(kept) is type(hidden) and len(there) == (5 if on_disk else 0)
    hidden[1] = torch.ones(2, 3, 4) * 7
    assert [float(states[0, 0, 0]) for states in kept] == [0, 1, 2, 3, 4]
