"""Numbers that say how far a model's distributions are from another's.

For every evaluated position, with p of the reference and q of the artifact over the vocabulary:

    kld         sum p (log p - log q)                 in nats
    variation   sum |p - q| / 2                       what speculative decoding rejects
    change      q(next) - p(next)                     of the probability of the text's own token
    loss        - log q(next), - log p(next)
    same        whether the most likely tokens agree

Intervals are 95 %: 1.96 standard errors of the mean over windows, as positions of one window are
not independent. Source of the acceptance rate: Leviathan et al. 2023, section 3.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.quality.forward import Forward, Logits

_AT_ONCE = 1 << 24  # logits of a model in memory
_DRAFTS = (1, 2, 4, 8)
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """Per position, [windows, positions]; of the reference alone `kld` and the like are None."""

    loss: Floats  # nan where a window ends
    reference_loss: Floats | None = None
    kld: Floats | None = None
    variation: Floats | None = None
    change: Floats | None = None
    same: Floats | None = None


def measure(
    tokens: NDArray[np.int64], positions: range, artifact: Forward, reference: Forward | None
) -> Measured:
    """tokens [windows, length]; `positions` of each window are looked at."""
    if reference is None:
        with artifact.logits() as head:
            return Measured(_each(tokens, positions, artifact, head, None, None)[0])
    with artifact.logits() as head, reference.logits() as other:
        return Measured(*_each(tokens, positions, artifact, head, reference, other))


def _each(
    tokens: NDArray[np.int64],
    positions: range,
    artifact: Forward,
    head: Logits,
    reference: Forward | None,
    other: Logits | None,
) -> list[Floats]:
    windows, first, end = len(tokens), positions.start, positions.stop
    rows = [np.full((windows, end - first), np.nan) for _ in range(6 if reference else 1)]
    following = np.concatenate([tokens[:, 1:], np.full((windows, 1), -1)], axis=1)
    step = 64
    for window in range(windows):
        start = first
        while start < end:
            part = slice(start, min(start + step, end))
            log_q = torch.log_softmax(head(artifact.hidden[window : window + 1, part])[0], -1)
            log_p = None
            if reference is not None and other is not None:
                log_p = torch.log_softmax(other(reference.hidden[window : window + 1, part])[0], -1)
            found = _positions(torch.from_numpy(following[window, part]), log_q, log_p)
            for row, values in zip(rows, found, strict=True):
                row[window, part.start - first : part.stop - first] = values.numpy()
            start, step = part.stop, max(1, _AT_ONCE // log_q.shape[-1])
    return rows


def _positions(
    following: torch.Tensor, log_q: torch.Tensor, log_p: torch.Tensor | None
) -> list[torch.Tensor]:
    """The numbers of some positions, [positions] each; nan where no token follows."""
    ends = following < 0
    chosen = following.clamp(min=0)[:, None]

    def of_next(values: torch.Tensor) -> torch.Tensor:
        return values.gather(1, chosen)[:, 0].double().masked_fill(ends, math.nan)

    if log_p is None:
        return [-of_next(log_q)]
    p, q = log_p.exp(), log_q.exp()
    # A zero of p contributes nothing, also where log q is -inf.
    divergence = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1, dtype=torch.float64)
    return [
        -of_next(log_q),
        -of_next(log_p),
        divergence,
        (p - q).abs().sum(-1, dtype=torch.float64) / 2,
        of_next(q) - of_next(p),
        (log_p.argmax(-1) == log_q.argmax(-1)).double(),
    ]


def summary(found: Measured) -> dict[str, Any]:
    """The keys of `qtool eval --json`, but for tokens and protocol."""
    loss, spread = _mean(found.loss)
    row: dict[str, Any] = {
        "perplexity": math.exp(loss),
        "perplexity_interval": [math.exp(loss - spread), math.exp(loss + spread)],
    }
    if (
        found.reference_loss is None
        or found.kld is None
        or found.variation is None
        or found.change is None
        or found.same is None
    ):
        return row
    kld, kld_spread = _mean(found.kld)
    same, same_spread = _mean(found.same)
    acceptance = 1 - _mean(found.variation)[0]
    row["reference_perplexity"] = math.exp(_mean(found.reference_loss)[0])
    row["kld"] = {
        "mean": kld,
        "median": float(np.median(found.kld)),
        "p99": float(np.quantile(found.kld, 0.99)),
        "max": float(found.kld.max()),
        "interval": [kld - kld_spread, kld + kld_spread],
    }
    row["top1_agreement"] = same
    row["top1_interval"] = [max(0.0, same - same_spread), min(1.0, same + same_spread)]
    row["rms_dp"] = math.sqrt(float(np.nanmean(found.change**2)))
    row["acceptance"] = acceptance
    row["tokens_per_pass"] = {str(k): _drafted(acceptance, k) for k in _DRAFTS}
    return row


def _drafted(acceptance: float, drafts: int) -> float:
    """Tokens a pass of the reference yields when the artifact drafts `drafts` before it."""
    if acceptance >= 1.0:
        return drafts + 1.0
    return float((1 - acceptance ** (drafts + 1)) / (1 - acceptance))


def _mean(values: Floats) -> tuple[float, float]:
    """Mean over positions, and half of its 95 % interval."""
    means = np.nanmean(values, axis=1)
    spread = float(np.std(means, ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return float(np.nanmean(values)), 1.96 * spread
