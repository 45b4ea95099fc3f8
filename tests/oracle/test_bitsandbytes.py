"""transformers loads our int8 artifacts with bitsandbytes on a CPU: the same weights, and inputs
rounded as the evaluator rounds them, layer by layer in float32. The network it computes in
bfloat16, which costs as much as the rounding: there the predictions are nearly the same."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qtool.artifacts.artifact import Artifact
from qtool.messages.progress import Progress
from qtool.quality.engine_inputs import activations
from qtool.quality.forward import forward
from qtool.quality.weights import open_weights
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.workers import Workers

pytestmark = pytest.mark.oracle


def test_transformers_loads_it(
    bitsandbytes: Callable[..., object], quantize: Callable[..., Path], tmp_path: Path
) -> None:
    out = quantize("tiny", "int8-llmint8", "calibration.samples=4", "calibration.length=64")
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 2000, (1, 64), dtype=np.int64)
    assert bitsandbytes("bnb_model.py", [str(out), tokens.tolist(), str(tmp_path / "theirs")]) == 28
    theirs = load_file(tmp_path / "theirs")
    for name, entry in Artifact.open(out).entries.items():
        if entry.scheme is not None:
            ours = Artifact.open(out).read(name).dequantize()
            assert np.array_equal(theirs[name].numpy(), ours), name
    with open_weights(out) as weights:
        rounded = activations(weights, "plain")
        for name, rounding in rounded.of_matrix.items():
            layer = name.removesuffix(".weight")
            x, weight = theirs[f"{layer}.input"], theirs[name].double()
            wanted = theirs[f"{layer}.output"].double()
            there = (rounding.apply(x).double() @ weight.T - wanted).abs().mean()
            plain = (x.double() @ weight.T - wanted).abs().mean()
            # What int8 gives goes through float16 there: 2^-12 of it on average at most.
            assert there < 2.0**-12 * wanted.abs().mean() < plain / 4, (name, there, plain)
        run = forward(Skeleton.open(weights), rounded, tokens, 1, Progress(quiet=True), keep=False)
        with run.logits() as head:
            logits = head(run.hidden)
        plain = type(rounded)()
        with Workers(1):
            exact = forward(
                Skeleton.open(weights), plain, tokens, 1, Progress(quiet=True), keep=False
            )
        with exact.logits() as head:
            unrounded = head(exact.hidden)
    there, here, without = (
        torch.log_softmax(x.double(), -1) for x in (theirs["logits"], logits, unrounded)
    )
    difference = float((there - here).abs().mean())
    of_rounding = float((without - here).abs().mean())
    print(f"mean |difference| {difference:.4f} nat; rounding inputs alone: {of_rounding:.4f}")
    assert difference < 0.08
