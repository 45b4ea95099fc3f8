"""Figures of two distributions, against float64 sums over a vocabulary as large as they come."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qtool.messages.progress import Progress
from qtool.quality import metrics

WORDS, POSITIONS = 150_000, 14


def forward(logits: torch.Tensor) -> Any:
    """A model whose hidden states are its logits [positions, words]."""
    return SimpleNamespace(hidden=logits[None], logits=lambda: nullcontext(lambda hidden: hidden))


def log_softmax(logits: torch.Tensor) -> np.ndarray:
    wide = logits.double().numpy()
    shifted = wide - wide.max(-1, keepdims=True)
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


@pytest.mark.parametrize("noise", [1e-2, 5e-4])
def test_small_divergences_are_not_lost_among_many_words(noise: float) -> None:
    """Of 5e-5 and 1e-7, which float32 is 2 % off, and as far as the figure itself."""
    random = torch.Generator().manual_seed(0)
    reference = 3 * torch.randn(POSITIONS, WORDS, generator=random)
    reference[:, :7] = -torch.inf  # words that a model never says
    logits = reference + noise * torch.randn(POSITIONS, WORDS, generator=random)
    tokens = torch.randint(7, WORDS, (1, POSITIONS), generator=random).numpy()
    found = metrics.measure(
        tokens, range(POSITIONS), forward(logits), forward(reference), Progress(quiet=True)
    )
    log_p, log_q = log_softmax(reference), log_softmax(logits)
    p, q = np.exp(log_p), np.exp(log_q)
    assert found.kld is not None and found.variation is not None and found.change is not None
    kld = (p * (np.where(p > 0, log_p, 0) - np.where(p > 0, log_q, 0))).sum(-1)
    np.testing.assert_allclose(found.kld[0], kld, rtol=1e-6)
    np.testing.assert_allclose(found.variation[0], np.abs(p - q).sum(-1) / 2, rtol=1e-8)
    at = np.arange(POSITIONS - 1), tokens[0, 1:]
    np.testing.assert_allclose(found.loss[0], -log_q[at], rtol=1e-12)
    np.testing.assert_allclose(found.change[0], q[at] - p[at], rtol=1e-8, atol=1e-18)


def test_figures_are_the_same_for_any_number_of_threads() -> None:
    """A row by itself is one that torch sums in as many pieces as there are threads."""
    words, positions = 128_256, 17  # 8 rows are 2^20 numbers, and one is left
    random = torch.Generator().manual_seed(0)
    reference = 3 * torch.randn(positions, words, generator=random)
    logits = reference + 0.1 * torch.randn(positions, words, generator=random)
    following = torch.randint(0, words, (positions,), generator=random)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 4, 7):
            torch.set_num_threads(threads)
            found.append(metrics.numbers(following, logits, reference))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
