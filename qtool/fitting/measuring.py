"""Costs, measured: one pass forwards, one backwards, and every tensor encoded as every type."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qtool.calibrating.skeleton import Skeleton
from qtool.calibrating.weights import Weights
from qtool.calibrating.workers import Workers
from qtool.checkpoint import Checkpoint
from qtool.errors import SourceError
from qtool.fitting import slopes
from qtool.fitting.costs import Costs
from qtool.fitting.losses import EMBEDDING, HEAD, candidates, weighed
from qtool.fitting.request import FitRequest
from qtool.gguf.from_hf import hf_source
from qtool.gguf.open import is_gguf, open_source
from qtool.gguf.planned import PlannedTensor
from qtool.gguf.source import GgufSource, as_floats
from qtool.gguf.weights import gguf_weights
from qtool.quality.weights import runnable
from qtool.runs.progress import Progress
from qtool.runs.workspace import Workspace

_ROWS = 256  # of the embedding, whose squares are compared with those of what enters block 0


@contextmanager
def opened(path: Path) -> Iterator[tuple[Weights, GgufSource]]:
    """The model to run, and its tensors as llama.cpp names them."""
    if is_gguf(path):
        with gguf_weights(open_source(path)) as found:
            yield found
    else:
        checkpoint = Checkpoint.open(path)
        yield runnable(checkpoint), hf_source(checkpoint)


def measured(
    request: FitRequest,
    weights: Weights,
    source: GgufSource,
    free: Sequence[PlannedTensor],
    tokens: NDArray[np.int64],
    space: Workspace,
    progress: Progress,
) -> Costs:
    """free: the tensors whose types are to be chosen. tokens: [samples, length]. space: where what
    is finished is kept."""
    with progress.stage("calibrate"):
        skeleton = Skeleton.open(weights)
        seed = request.settings.seed
        found = slopes.measure(skeleton, tokens, seed, space, request.threads, progress)
    larger = _larger(source, tokens, found.entered)
    tied = all(tensor.name != HEAD for tensor in source.tensors)
    costs = {}
    with progress.stage("quantize"), Workers(request.threads) as workers:
        for number in progress.blocks(len(free), "tensor"):
            if ways := weighed(free[number], found, larger, tied):
                every = candidates(ways, request.types, request.recipe.importance, workers)
                costs[free[number].name] = {one.name: one for one in every}
    if not costs:
        raise SourceError(
            f"{request.source}: of none of its matrices could be measured what errors in it cost"
        )
    return Costs(costs, tokens.size)


def _larger(source: GgufSource, tokens: NDArray[np.int64], entered: float) -> float:
    """How much larger squares of numbers are before block 0 than in the embedding, which some
    models multiply by a number of their own."""
    table = next((tensor for tensor in source.tensors if tensor.name == EMBEDDING), None)
    if table is None:
        return 1.0
    rows = tokens.reshape(-1)
    rows = rows[np.linspace(0, rows.size - 1, min(_ROWS, rows.size)).astype(int)]
    if int(rows.max()) >= table.rows:
        return 1.0
    found = [as_floats(table, np.ascontiguousarray(table.read(row, row + 1))) for row in rows]
    own = float(np.mean(np.square(found, dtype=np.float64)))
    return entered / own if own > 0 else 1.0
