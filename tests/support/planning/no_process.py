"""Estimates of small models."""

import pytest

from qtool.planning import estimate


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models can be told apart where the process itself does not count."""
    monkeypatch.setattr(estimate, "TORCH_PROCESS_BYTES", 0)
