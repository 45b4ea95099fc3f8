"""Numbers that say how far a model's distributions are from another's.

For every evaluated position, with p of the reference and q of the artifact over the vocabulary:

    kld         sum p (log p - log q)                 in nats
    variation   sum |p - q| / 2                       what speculative decoding rejects
    change      q(next) - p(next)                     of the probability of the text's own token
    loss        - log q(next), - log p(next)
    same        whether the most likely tokens agree

All of these are taken in float64: in float32 log p and log q are off by up to 5e-7 of all words
alike, which is more than the divergence of some positions.

Intervals are 95 %: standard errors of the mean over windows, as positions of one window are not
independent, times Student's t; with one window they are not known. Where k tokens are drafted and
a share a of them accepted, a pass of the reference yields (1 - a^(k+1)) / (1 - a) tokens, and
decoding is faster by that over 1 + k c, with c the cost of a token of the draft: decoding is
reading weights, so that c is taken to be the ratio of sizes. Source: Leviathan et al. 2023, section
3.
"""

import math
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.errors import SourceError
from qtool.messages.progress import Progress
from qtool.quality.forward import Forward, Logits

_AT_ONCE = 1 << 23  # logits of a model in memory
_IN_DOUBLE = 1 << 20  # of these, in float64
_STUDENT = (12.7062, 4.3027, 3.1824)  # t of 1, 2 and 3 degrees of freedom, 97.5 %
_DRAFTS = (1, 2, 4, 8)
_OF_NEXT = (0, 1, 4)  # loss, reference_loss and change: of what _positions gives
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """Per position, [windows, positions]; all finite. Without a reference there is only `loss`."""

    loss: Floats  # of positions that a token of their window follows, as all of the next token
    reference_loss: Floats | None = None
    kld: Floats | None = None
    variation: Floats | None = None
    change: Floats | None = None  # of those positions
    same: Floats | None = None


def measure(
    tokens: NDArray[np.int64],
    positions: range,
    artifact: Forward,
    reference: Forward | None,
    progress: Progress,
) -> Measured:
    """tokens [windows, length]; `positions` of each window are looked at.

    SourceError where a figure is not finite: a mean that passed over it would call a broken
    artifact good.
    """
    if reference is None:
        with artifact.logits() as head:
            rows = _each(tokens, positions, artifact, head, None, None, progress)
    else:
        with artifact.logits() as head, reference.logits() as other:
            rows = _each(tokens, positions, artifact, head, reference, other, progress)
    followed = len(range(positions.start, min(positions.stop, tokens.shape[1] - 1)))
    rows = [row[:, :followed] if index in _OF_NEXT else row for index, row in enumerate(rows)]
    for row in rows:
        if not np.isfinite(row).all():
            window, at = np.argwhere(~np.isfinite(row))[0]
            raise SourceError(
                f"{artifact.skeleton.checkpoint.path}: what it, or the reference, says of token "
                f"{positions.start + at} of window {window} is not a finite number; it is broken, "
                "or overflows in float32"
            )
    return Measured(*rows)


def _each(
    tokens: NDArray[np.int64],
    positions: range,
    artifact: Forward,
    head: Logits,
    reference: Forward | None,
    other: Logits | None,
    progress: Progress,
) -> list[Floats]:
    windows, first, end = len(tokens), positions.start, positions.stop
    rows = [np.full((windows, end - first), np.nan) for _ in range(6 if reference else 1)]
    # The last token of a window is followed by none; what is computed for it is not looked at.
    following = np.concatenate([tokens[:, 1:], tokens[:, -1:]], axis=1)
    step = 64
    for window in progress.blocks(windows, "window"):
        start = first
        while start < end:
            part = slice(start, min(start + step, end))
            logits = head(artifact.hidden[window : window + 1, part])[0]
            wanted = None
            if reference is not None and other is not None:
                wanted = other(reference.hidden[window : window + 1, part])[0]
            ids = torch.from_numpy(following[window, part]).to(logits.device)
            found = numbers(ids, logits, wanted)
            for row, values in zip(rows, found, strict=True):
                row[window, part.start - first : part.stop - first] = values.cpu().numpy()
            start, step = part.stop, max(1, _AT_ONCE // logits.shape[-1])
    return rows


def numbers(
    following: torch.Tensor, logits: torch.Tensor, reference: torch.Tensor | None
) -> list[torch.Tensor]:
    """The numbers of some positions, float64 [positions] each. following: tokens [positions];
    logits [positions, vocabulary], of the artifact and of the reference."""
    found = []
    # In parts of about one size: torch sums a row that is alone in as many pieces as there are
    # threads.
    count = max(1, min(logits.numel() // _IN_DOUBLE, len(logits) // 2))
    edges = [len(logits) * number // count for number in range(count + 1)]
    for part in starmap(slice, pairwise(edges)):
        log_q = torch.log_softmax(logits[part], -1, dtype=torch.float64)
        log_p = None
        if reference is not None:
            log_p = torch.log_softmax(reference[part], -1, dtype=torch.float64)
        found.append(_positions(following[part], log_q, log_p))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def _positions(
    following: torch.Tensor, log_q: torch.Tensor, log_p: torch.Tensor | None
) -> list[torch.Tensor]:
    """The numbers of some positions, [positions] each."""

    def of_next(values: torch.Tensor) -> torch.Tensor:
        return values.gather(1, following[:, None])[:, 0]

    if log_p is None:
        return [-of_next(log_q)]
    p, q = log_p.exp(), log_q.exp()
    # A zero of p contributes nothing, also where log q is -inf.
    divergence = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
    return [
        -of_next(log_q),
        -of_next(log_p),
        divergence,
        (p - q).abs().sum(-1) / 2,
        of_next(q) - of_next(p),
        (log_p.argmax(-1) == log_q.argmax(-1)).double(),
    ]


def summary(found: Measured, cost: float = 1.0) -> dict[str, Any]:
    """The keys of `qtool eval --json`, but for tokens and protocol.

    cost: of a token of the artifact, where one of the reference is 1.
    """
    loss, spread = _mean(found.loss)
    row: dict[str, Any] = {
        "perplexity": _perplexity(loss),
        "perplexity_interval": None
        if spread is None
        else [_perplexity(loss - spread), _perplexity(loss + spread)],
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
    row["reference_perplexity"] = _perplexity(_mean(found.reference_loss)[0])
    row["kld"] = {
        "mean": kld,
        "median": float(np.median(found.kld)),
        "p99": float(np.quantile(found.kld, 0.99)),
        "max": float(found.kld.max()),
        "interval": None if kld_spread is None else [kld - kld_spread, kld + kld_spread],
    }
    row["top1_agreement"] = same
    row["top1_interval"] = (
        None
        if same_spread is None
        else [max(0.0, same - same_spread), min(1.0, same + same_spread)]
    )
    row["rms_dp"] = math.sqrt(float(np.mean(found.change**2)))
    row["acceptance"] = acceptance
    row["tokens_per_pass"] = {str(k): _drafted(acceptance, k) for k in _DRAFTS}
    row["speed_up"] = {str(k): _drafted(acceptance, k) / (1 + k * cost) for k in _DRAFTS}
    return row


def _perplexity(loss: float) -> float:
    """exp(loss)."""
    try:
        return math.exp(loss)
    except OverflowError:
        raise SourceError(
            f"a loss of {loss:.0f} nats a token has no perplexity that a number can hold; the "
            "artifact is broken"
        ) from None


def _drafted(acceptance: float, drafts: int) -> float:
    """Tokens a pass of the reference yields when the artifact drafts `drafts` before it."""
    if acceptance >= 1.0:
        return drafts + 1.0
    return float((1 - acceptance ** (drafts + 1)) / (1 - acceptance))


def _mean(values: Floats) -> tuple[float, float | None]:
    """Mean over positions, and half of its 95 % interval; None with one window."""
    means = np.mean(values, axis=1)
    if len(means) == 1:
        return float(np.mean(values)), None
    errors = _quantile(len(means) - 1) * float(np.std(means, ddof=1)) / math.sqrt(len(means))
    return float(np.mean(values)), errors


def _quantile(freedom: int) -> float:
    """Of Student's t, 97.5 %, by degrees of freedom: what few windows vary by chance, too."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = 1.959964  # the normal distribution's
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )  # Abramowitz and Stegun, 26.7.5
    return z + sum(term / float(freedom**power) for power, term in enumerate(terms, 1))
