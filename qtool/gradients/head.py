"""Through the head and back, with tokens drawn from what it predicts; and how far apart are
predictions that have nothing to do with each other, which no error can make much worse.

A micro-batch is a thread's work, in parts of few tokens, and draws from random numbers of its own:
what comes out does not depend on the number of threads.
"""

from contextlib import nullcontext
from math import fsum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.errors import SourceError
from qtool.gradients.passing import Passing
from qtool.gradients.sensitivity import Sensitivity
from qtool.gradients.sums import Seen, add, observed
from qtool.messages.progress import Progress
from qtool.planning.fitting import LOGITS
from qtool.streaming.linears import Matrix, WeightIndex
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import Stream
from qtool.streaming.workers import Workers

_HEAD = Matrix("weight", None)


def through_head(
    skeleton: Skeleton,
    stream: Stream,
    tokens: NDArray[np.int64],
    seed: int,
    gradients: Passing,
    workers: Workers,
    progress: Progress,
    back_alone: bool = False,
) -> tuple[Sensitivity | None, float | None]:
    """The head's sensitivity, None where there is no one matrix; and the mean KL divergence between
    predictions at places that are unrelated, None of a text too short to have any. back_alone:
    neither is asked for.

    gradients: none yet; those by what leaves the last block are appended, a micro-batch each.
    """
    count = len(stream.hidden)
    sums: Seen = {}
    divergences: list[float] = []
    with skeleton.open_head() as head:
        vocabulary = head(stream.hidden[0][:1, :1]).shape[-1]  # reads its weights, once for all
        output: Any = skeleton.model.get_output_embeddings()
        index = WeightIndex(output if output is not None else torch.nn.Module())

        def one(number: int) -> tuple[Seen, torch.Tensor, list[float]]:
            random = torch.Generator().manual_seed(_own(seed, number))
            hidden = stream.hidden[number]
            step = max(1, LOGITS // (vocabulary * hidden.shape[0]))
            seen: Seen = {}
            found: list[torch.Tensor] = []
            apart: list[float] = []
            for first in range(0, hidden.shape[1], step):
                with torch.enable_grad():
                    part = hidden[:, first : first + step].detach().requires_grad_()
                    with nullcontext() if back_alone else observed(index, seen):
                        logits = head(part).float()
                    if not bool(torch.isfinite(logits).all()):
                        raise SourceError(
                            f"{skeleton.checkpoint.path}: the logits are not finite on this text; "
                            "the model is broken, or overflows in float32"
                        )
                    told = logits.log_softmax(-1)
                    found += torch.autograd.grad(_drawn(told, random), part)
                apart += [] if back_alone else _unrelated(told.detach())
            return seen, torch.cat(found, dim=1), apart

        turns = range(0, count, workers.threads)
        for turn in progress.blocks(len(turns), "head, part"):
            numbers = range(turns[turn], min(count, turns[turn] + workers.threads))
            for seen, gradient, apart in workers.map(one, numbers):
                add(sums, seen)
                gradients.append(gradient)
                divergences += apart
    found = sums.get(_HEAD)
    sensitivity = None if found is None else found.sensitivity(tokens.size)
    return sensitivity, fsum(divergences) / len(divergences) if divergences else None


def _own(seed: int, number: int) -> int:
    """The seed of a micro-batch."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])


def _drawn(told: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """The log-likelihood of tokens that are drawn as told [batch, length, vocabulary], logarithms
    of chances, says."""
    flat = told.flatten(0, 1)
    drawn = torch.multinomial(flat.detach().exp(), 1, generator=random)
    return flat.gather(1, drawn).sum()


def _unrelated(told: torch.Tensor) -> list[float]:
    """The KL divergence from each place's predictions to those half of this part away."""
    length = told.shape[1]
    found: list[float] = []
    for place in range(length if length > 1 else 0):
        here, there = told[:, place], told[:, (place + length // 2) % length]
        found += (here.exp() * (here - there)).sum(-1).tolist()
    return found
