"""Runs whose products are made in bfloat16."""

import torch

SMALL = ("--samples", 4, "--length", 64)
ASKED = "calibration.precision=bfloat16"


def now() -> str:
    return str(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]
