"""Estimates of small models."""

import pytest

from qtool.planning import peak


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models can be told apart where the process itself does not count."""
    monkeypatch.setattr(peak, "TORCH_PROCESS_BYTES", 0)
