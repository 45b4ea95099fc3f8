"""A block with a few loud channels, opened for smoothing."""

from pathlib import Path

import numpy as np

from qtool.calibrating.sites import Tracer
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.planning.plan import make_plan
from qtool.recipe import recipe
from qtool.streaming.skeleton import Skeleton
from support.models import arch_models

OPTIONS = ["weights.group_size=-1", "indivisible=dense"]


def opened(name: str, folder: Path, *sets: str):
    """The last block of a model with a few loud channels."""
    checkpoint = Checkpoint.open(arch_models.build(name, folder / name))
    wanted = recipe.load("w8a8-dynamic", [*OPTIONS, "transforms=[smooth]", *sets])
    skeleton = Skeleton.open(checkpoint)
    tokens = np.random.default_rng(0).integers(0, arch_models.VOCABULARY, (8, 32))
    stream = skeleton.embed(tokens)
    block = skeleton.block(skeleton.count - 1)
    found = Tracer().sites(block, stream)
    for norm, sites in found.fold_groups().items():
        block.weights[norm][::11] *= 30
        for site in sites:
            for reader in site.names:
                block.weights[reader][:, ::11] /= 30
    return wanted, make_plan(wanted, checkpoint), block, found, stream
