"""compressed-tensors rotates as our evaluator does what transform_config leaves to the engine."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.quality.weights import ArtifactWeights, open_weights
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.workers import Workers

pytestmark = pytest.mark.oracle

TRANSFORMS = ("transforms=[rotate]",)


@pytest.mark.parametrize("which", ["r3", "r4", "both"])
def test_the_network_is_the_same_there(
    which: str,
    compressed_tensors: Callable[..., object],
    quantize: Callable[..., Path],
    tmp_path: Path,
) -> None:
    r3, r4 = (str(which in (one, "both")).lower() for one in ("r3", "r4"))
    # 8 bits, so that the rounded network is near the network; it is the same on both sides.
    path = quantize("tiny", "w8a16-ct", *TRANSFORMS, f"rotate={{r3: {r3}, r4: {r4}}}")
    tokens = np.random.default_rng(0).integers(0, 2000, (2, 24), dtype=np.int64)
    with open_weights(path) as weights, Workers(1) as workers:
        assert isinstance(weights, ArtifactWeights)
        assert bool(weights.online.heads) == (which != "r4")
        assert bool(weights.online.inputs) == (which != "r3")
        plain = {name: torch.from_numpy(weights.float32(name).copy()) for name in weights.tensors}
        ours = Skeleton.open(weights).logits(tokens, workers)
    save_file(plain, tmp_path / "plain.safetensors")
    said = compressed_tensors(
        "ct_rotation.py",
        [str(path), str(tmp_path / "plain.safetensors"), str(tmp_path / "out"), tokens.tolist()],
    )
    assert said == []
    theirs = load_file(tmp_path / "out")
    reach = float(ours.max() - ours.min())
    off = float((theirs["rotated"] - ours).abs().max()) / reach
    without = float((theirs["without"] - ours).abs().max()) / reach
    print(f"{which}: off by {off:.1e} of the range, without the rotation by {without:.1e}")
    assert off < 1e-5
    assert (without > 1e-2) == (which != "r3")
