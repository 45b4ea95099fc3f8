"""Accesses that nothing orders, each of which the checker of streams finds."""

import re
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from support.cuda.cuda_emulation import emulator
from support.cuda.emulated_cuda import Cuda
from support.cuda.emulated_gpu import cuda

__all__ = ["cuda", "emulator"]


def pinned(numbers: float = 1.0) -> torch.Tensor:
    return torch.full((64,), numbers).pin_memory()


def waits_for_a_stream(right: bool) -> None:
    side, there, here = torch.cuda.Stream(), torch.empty(64, device="cuda"), pinned()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there.copy_(here, non_blocking=True)
    if right:
        torch.cuda.current_stream().wait_stream(side)
    there.mul_(2)
    torch.cuda.current_stream().synchronize()


def waits_before_it_overwrites(right: bool) -> None:
    """The other way around: what is on its way in is not to meet what still reads."""
    side, there, here = torch.cuda.Stream(), torch.ones(64, device="cuda"), pinned()
    _ = there * 2
    if right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there.copy_(here, non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)


def synchronizes(right: bool) -> None:
    there, here, event = torch.ones(64, device="cuda"), pinned(), torch.cuda.Event()
    here.copy_(there, non_blocking=True)
    event.record()
    if right:
        event.synchronize()
    _ = here.clone()


def records_after_the_copy(right: bool) -> None:
    there, here, event = torch.ones(64, device="cuda"), pinned(), torch.cuda.Event()
    if not right:
        event.record()
    here.copy_(there, non_blocking=True)
    if right:
        event.record()
    event.synchronize()
    _ = here.clone()


def refills_in_time(right: bool) -> None:
    there, here = torch.empty(64, device="cuda"), pinned()
    there.copy_(here, non_blocking=True)
    if right:
        torch.cuda.current_stream().synchronize()
    here.fill_(3)


def refills_an_array_in_time(right: bool) -> None:
    there, here = torch.empty(64, device="cuda"), pinned()
    array = here.numpy()
    there.copy_(here, non_blocking=True)
    if right:
        torch.cuda.current_stream().synchronize()
    array[:8] = np.ones(8, np.float32)


def frees_in_time(right: bool) -> None:
    side, there, here = torch.cuda.Stream(), torch.ones(64, device="cuda"), pinned()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        here.copy_(there, non_blocking=True)
    if right:
        torch.cuda.current_stream().wait_stream(side)
    del there


def tells_the_allocator(right: bool) -> None:
    side, there, here = torch.cuda.Stream(), torch.ones(64, device="cuda"), pinned()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        here.copy_(there, non_blocking=True)
    if right:
        there.record_stream(side)  # type: ignore[arg-type]
    del there


def waits_for_a_thread(right: bool) -> None:
    there, lock = torch.zeros(64, device="cuda"), threading.Lock()

    def add() -> None:
        if right:
            with lock:
                there.add_(1)
        else:
            there.add_(1)

    threads = [threading.Thread(target=add) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    there.add_(1)


WAYS: dict[Callable[[bool], None], str] = {
    waits_for_a_stream: r"nothing orders copy_ .* and mul_",
    waits_before_it_overwrites: r"nothing orders (ones|mul) .* and copy_",
    synchronizes: r"pinned memory.* nothing orders copy_ .* and clone",
    records_after_the_copy: r"pinned memory.* nothing orders copy_ .* and clone",
    refills_in_time: r"pinned memory.* nothing orders copy_ .* and fill_",
    refills_an_array_in_time: r"pinned memory.* nothing orders copy_ .* and an array",
    frees_in_time: r"is freed to stream .* while copy_ .* may still use it",
    tells_the_allocator: r"is freed to stream .* while copy_ .* may still use it",
    waits_for_a_thread: r"nothing orders the threads of add_ .* and add_",
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_checker_finds_it(way: Callable[[bool], None], cuda: Cuda) -> None:
    way(True)
    assert not cuda.order.faults
    way(False)
    assert cuda.order.faults
    assert all(re.search(WAYS[way], said) for said in cuda.order.faults), cuda.order.faults
    cuda.order.faults.clear()
