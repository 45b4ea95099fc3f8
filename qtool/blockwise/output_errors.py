"""What a layer's output loses by the rounding of its weights, as the summary says it of each:

    sqrt(tr(E H E') / tr(W H W'))    E = W - Q, H the Gram matrix of the input

over evenly spaced rows; without H, of the norms of the weights alone.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.calibrating.stats import SiteStats, gram_on
from qtool.cuda.device import Device
from qtool.planning.duration import REPORTED_ROWS

Floats = NDArray[np.float32]
Part = tuple[torch.Tensor, torch.Tensor]  # the rows that are looked at, and what they lost


def output_error(weight: Floats, dequantized: Floats, stats: SiteStats | None) -> float:
    """Of one matrix."""
    return output_errors([part(weight, dequantized)], stats, None)[0]


def part(weight: Floats, dequantized: Floats) -> Part:
    """What is kept of a matrix until the others that read its input are quantized."""
    rows = np.linspace(0, weight.shape[0] - 1, min(REPORTED_ROWS, weight.shape[0])).astype(int)
    kept = torch.from_numpy(weight[rows])
    return kept, kept - torch.from_numpy(dequantized[rows])


def output_errors(
    parts: Sequence[Part], stats: SiteStats | None, device: Device | None
) -> list[float]:
    """Of matrices that read one input."""
    if stats is None or stats.gram is None:
        return [_ratio(_sum(kept * kept), _sum(lost * lost)) for kept, lost in parts]
    if device is None:
        return _with_gram(parts, torch.from_numpy(stats.gram))
    with device.alone, device.explained():
        return _with_gram(parts, gram_on(device, stats))


def _with_gram(parts: Sequence[Part], gram: torch.Tensor) -> list[float]:
    there = ((kept.to(gram.device), lost.to(gram.device)) for kept, lost in parts)
    return [_ratio(*signal_and_noise(kept, lost, gram)) for kept, lost in there]


def signal_and_noise(
    kept: torch.Tensor, lost: torch.Tensor, gram: torch.Tensor
) -> tuple[float, float]:
    """tr(W H W') and tr(E H E') of rows W, and of what they lost, [rows, in] each."""
    return _sum((kept @ gram) * kept), _sum((lost @ gram) * lost)


def _sum(products: torch.Tensor) -> float:
    return float(products.sum(dtype=torch.float64))


def _ratio(whole: float, lost: float) -> float:
    return float(np.sqrt(max(lost, 0.0) / whole)) if whole > 0 else 0.0
