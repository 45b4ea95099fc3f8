"""Gradients behind blocks, as gptq.yaqa measures them."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.fused_experts import apart
from qtool.gradients.block_gradients import Ends
from qtool.messages.progress import Progress
from qtool.streaming.skeleton import Skeleton
from qtool.workspaces.workspace import Workspace, workspace
from support.models import arch_models

QUIET = Progress(quiet=True)


def measured(
    model: Path, folder: Path, samples: int = 2, length: int = 512, all_samples: int = 3
) -> tuple[Skeleton, NDArray[np.int64], Ends]:
    skeleton = Skeleton.open(apart(Checkpoint.open(model)))
    shape = (all_samples, length)
    tokens = np.random.default_rng(5).integers(3, arch_models.VOCABULARY, shape, dtype=np.int64)
    with workspace(folder / "out", is_folder=True, nbytes=0, fresh=False) as space:
        kept = Workspace(folder / "out", folder, space.journal)
        ends = Ends.of(samples, skeleton, tokens, 1, kept, 2, QUIET, None)
    return skeleton, tokens, ends
