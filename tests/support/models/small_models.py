"""Small models of every architecture as checkpoints, and what their networks give."""

from pathlib import Path

import numpy as np
import pytest
import torch

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.workers import Workers
from support.models import arch_models
from support.runs import quantizing


def checkpoint(models: Path, name: str, dtype: str = "float32") -> Checkpoint:
    """The model of an architecture, made once in the folder `models`."""
    folder = models / dtype / name
    if not folder.exists():
        quantizing.add_tokenizer(arch_models.build(name, folder, dtype=dtype))
    return Checkpoint.open(folder)


def logits(weights: Checkpoint) -> torch.Tensor:
    """Of two samples of 40 tokens."""
    tokens = np.random.default_rng(1).integers(3, arch_models.VOCABULARY, (2, 40), dtype=np.int64)
    with Workers(1) as workers:
        return Skeleton.open(weights).logits(tokens, workers)


def difference(before: torch.Tensor, after: torch.Tensor) -> float:
    """The largest, as a share of the range."""
    return float((before - after).abs().max() / (before.max() - before.min()))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for models that tests of a module share."""
    return tmp_path_factory.mktemp("models")
