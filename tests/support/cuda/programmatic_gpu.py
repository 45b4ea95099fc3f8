"""torch's GPU, or an emulated one where kernels wait for those before them."""

from collections.abc import Iterator

import pytest
import torch

from support.cuda.cuda_emulation import Emulator, OnGpu
from support.cuda.emulated_cuda import Cuda, emulated


@pytest.fixture
def cuda(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda | None]:
    """torch's, emulated where there is no GPU: then at the end nothing was found to be wrong."""
    if isinstance(emulator, OnGpu):
        yield None
        return
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, and QTOOL_TEST_DEVICE=cuda is not set")
    with emulated(monkeypatch, emulator) as cuda:
        yield cuda
    assert not cuda.order.faults, "\n".join(cuda.order.faults[:20])
