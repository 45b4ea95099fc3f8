"""Inputs of a model's matrices, recorded."""

from pathlib import Path

import numpy as np
import torch

from qtool.calibrating.sites import BlockSites, Tracer
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.streaming.linears import Matrix, ObserveLinears, WeightIndex
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import LoadedBlock, Stream
from support.models.arch_models import VOCABULARY


def opened(folder: Path) -> tuple[LoadedBlock, Stream, BlockSites]:
    skeleton = Skeleton.open(Checkpoint.open(folder))
    tokens = np.random.default_rng(2).integers(3, VOCABULARY, (7, 40), dtype=np.int64)
    stream = skeleton.embed(tokens, micro_batch_tokens=80)
    block = skeleton.block(0)
    return block, stream, Tracer().sites(block, stream)


def recorded(block: LoadedBlock, stream: Stream) -> dict[Matrix, torch.Tensor]:
    """Every row that each matrix reads, float64."""
    rows: dict[Matrix, list[torch.Tensor]] = {}

    def observe(matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        rows.setdefault(matrix, []).append(x.reshape(-1, x.shape[-1]).double())

    with ObserveLinears(WeightIndex(block.module), observe):
        for hidden, call in zip(stream.hidden, stream.calls[0], strict=True):
            block.run(hidden, call)
    return {matrix: torch.cat(parts) for matrix, parts in rows.items()}
