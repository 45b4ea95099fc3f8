"""Runs whose products are made in bfloat16."""

import pytest
import torch
from quantizing import Call, caller

SMALL = ("--samples", 4, "--length", 64)
ASKED = "calibration.precision=bfloat16"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    return caller(monkeypatch, capfd)


def now() -> str:
    return str(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]
