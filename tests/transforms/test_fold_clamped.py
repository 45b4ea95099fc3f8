"""Folds before a clamp: exact while it has nothing to do, and not for the scales that are found."""

from pathlib import Path

import numpy as np
import pytest
import torch

from qtool.calibrating.sites import BlockSites, Tracer
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.recipe.rotate import RotateOptions
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import LoadedBlock, Stream
from qtool.transforms import fold, rotate, smooth_attention
from qtool.transforms.rotated import untied

_IDLE = 12.0  # more than twice what any query, key or value of the probe is


def opened(folder: Path, clip: float | None) -> tuple[LoadedBlock, BlockSites, Stream]:
    """A block of OLMo, which clips queries, keys and values, with a stream before it."""
    from transformers import OlmoConfig, OlmoForCausalLM

    torch.manual_seed(0)
    config = OlmoConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        clip_qkv=clip,
        tie_word_embeddings=False,
    )
    model = OlmoForCausalLM(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim > 1:
                value.normal_(0, value.shape[1] ** -0.5)
            if "v_proj" in name:
                value.mul_(0.5)
    model.save_pretrained(folder)
    skeleton = Skeleton.open(Checkpoint.open(folder))
    stream = skeleton.embed(np.random.default_rng(0).integers(0, 96, (2, 32)))
    block = skeleton.block(0)
    return block, Tracer().sites(block, stream), stream


@pytest.mark.parametrize(("clip", "proved"), [(None, True), (_IDLE, False)])
def test_values_are_folded_where_nothing_clips_them(
    clip: float | None, proved: bool, tmp_path: Path
) -> None:
    block, found, stream = opened(tmp_path, clip)
    hidden, call = stream.probe(0)
    seen = fold.shown(block, hidden, call)
    largest = max(float(one.abs().max()) for calls in seen.outputs.values() for one in calls)
    assert largest < _IDLE / 2  # twice which the first scales of a proof may make of it
    site = next(one for one in found.sites if one.id.endswith("o_proj.weight"))
    before = {name: value.clone() for name, value in block.weights.items()}
    option = next(
        one for one in fold.projection_folds(block, found, site) if "v_proj" in one.producer
    )
    assert fold.proved(block, option, hidden, call, seen) is proved
    assert all(torch.equal(value, before[name]) for name, value in block.weights.items())


@pytest.mark.parametrize(("clip", "proved"), [(None, True), (_IDLE, False)])
def test_keys_are_folded_where_nothing_clips_them(
    clip: float | None, proved: bool, tmp_path: Path
) -> None:
    block, found, stream = opened(tmp_path, clip)
    pair = smooth_attention.find_pair(block, found, stream)
    assert isinstance(pair, smooth_attention.Pair) is proved


@pytest.mark.parametrize(("clip", "rotated"), [(None, 1), (_IDLE, 0)])
def test_values_are_rotated_where_nothing_clips_them(
    clip: float | None, rotated: int, tmp_path: Path
) -> None:
    opened(tmp_path, clip)
    view = untied(Checkpoint.open(tmp_path), stream=False)
    found = rotate.prepare(view, RotateOptions(r1=False), lambda _: None)
    assert len(found.r2) == rotated
    assert any("no" in why and "head by head" in why for why in found.left_out) is (not rotated)


def test_scales_of_a_proof_are_powers_of_two_as_far_as_any_that_are_found() -> None:
    found = fold.far_scales(4096)
    mantissas, exponents = np.frexp(found)
    assert (mantissas == 0.5).all()
    assert (exponents.min() - 1, exponents.max() - 1) == (-10, 10)
