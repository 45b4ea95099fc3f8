"""Folds on ten architectures: what takes a scale, that the block stays what it was, and undoing."""

from pathlib import Path

import numpy as np
import pytest
import torch

from qtool.calibrating.sites import BlockSites, Tracer
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import LoadedBlock, Stream
from qtool.transforms import fold
from support.models import arch_models

# Producers that take the scales of each input of the last block, by what they feed.
EXPECTED = {
    "sarvam_moe": {
        "query_key_value": "input_layernorm",
        "dense": "query_key_value",
        "gate": "post_attention_layernorm",
        "down_proj": "up_proj",
    },
    "llama": {
        "q_proj": "input_layernorm",
        "o_proj": "v_proj",
        "gate_proj": "post_attention_layernorm",
        "down_proj": "up_proj",
    },
    "stablelm": {"q_proj": "input_layernorm", "o_proj": "v_proj", "down_proj": "up_proj"},
    "qwen3": {
        "q_proj": "input_layernorm",
        "o_proj": "v_proj",
        "gate_proj": "post_attention_layernorm",
        "down_proj": "up_proj",
    },
    "qwen2": {
        "q_proj": "input_layernorm",
        "o_proj": "v_proj",
        "gate_proj": "post_attention_layernorm",
        "down_proj": "up_proj",
    },
    "gemma3": {
        "q_proj": "input_layernorm",
        "o_proj": "v_proj",
        "gate_proj": "pre_feedforward_layernorm",
        "down_proj": "up_proj",
    },
    "phi3": {
        "qkv_proj": "input_layernorm",
        "o_proj": "qkv_proj",
        "gate_up_proj": "post_attention_layernorm",
        "down_proj": "gate_up_proj",
    },
    "opt": {
        "q_proj": "self_attn_layer_norm",
        "out_proj": "v_proj",
        "fc1": "final_layer_norm",
        "fc2": "fc1",
    },
    "gpt_neox": {
        "query_key_value": "input_layernorm",
        "dense": "query_key_value",
        "dense_h_to_4h": "post_attention_layernorm",
        "dense_4h_to_h": None,  # GELU stands between
    },
    "mixtral": {
        "q_proj": "input_layernorm",
        "o_proj": "v_proj",
        "gate": "post_attention_layernorm",  # and with it every expert
        "w2": "w3",
    },
    "qwen3_moe": {
        "q_proj": "input_layernorm",
        "o_proj": "v_proj",
        "gate": "post_attention_layernorm",
        "down_proj": "up_proj",
    },
}


def opened(name: str, folder: Path) -> tuple[LoadedBlock, BlockSites, Stream]:
    """The last block of a small random model, and a stream that stands before the first."""
    skeleton = Skeleton.open(Checkpoint.open(arch_models.build(name, folder / name)))
    tokens = np.random.default_rng(0).integers(0, arch_models.VOCABULARY, (2, 32))
    stream = skeleton.embed(tokens)
    block = skeleton.block(skeleton.count - 1)
    return block, Tracer().sites(block, stream), stream


def module(name: str) -> str:
    return name.removesuffix(".weight").rsplit(".", 1)[-1]


def proposals(block: LoadedBlock, found: BlockSites) -> dict[str, list[fold.Fold]]:
    """All that is proposed, by the first reader of what shares scales."""
    of_norms = {
        sites[0].id: fold.norm_folds(norm, sites) for norm, sites in found.fold_groups().items()
    }
    alone = {
        site.id: list(fold.projection_folds(block, found, site))
        for site in found.sites
        if site.producer is None
    }
    return of_norms | alone


@pytest.mark.parametrize("name", arch_models.CONFIGS)
def test_the_right_producer_is_proved_and_no_other(name: str, tmp_path: Path) -> None:
    block, found, stream = opened(name, tmp_path)
    hidden, call = stream.probe(block.index)
    seen = fold.shown(block, hidden, call)
    before = {key: value.clone() for key, value in block.weights.items()}
    proved: dict[str, str | None] = {}
    for reader, options in proposals(block, found).items():
        good = [o for o in options if fold.proved(block, o, hidden, call, seen)]
        assert len(good) <= 1
        proved[module(reader)] = module(good[0].producer) if good else None
    assert proved == EXPECTED[name]
    for key, value in block.weights.items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", arch_models.CONFIGS)
def test_folding_all_at_once_changes_no_output(name: str, tmp_path: Path) -> None:
    block, found, stream = opened(name, tmp_path)
    hidden, call = stream.probe(block.index)
    expected = block.run(hidden, call)
    seen = fold.shown(block, hidden, call)
    before = {key: value.clone() for key, value in block.weights.items()}
    random = np.random.default_rng(1)
    chosen = [
        next(o for o in options if fold.proved(block, o, hidden, call, seen))
        for reader, options in proposals(block, found).items()
        if EXPECTED[name][module(reader)] is not None
    ]
    for option in chosen:
        width = block.weights[option.readers[0]].shape[1]
        scale = option.tied(random.uniform(0.5, 4, width).astype(np.float32))
        exact = fold.apply(block, option, scale, None)
        assert np.allclose(exact, scale, rtol=1e-5)
        assert not torch.equal(block.weights[option.producer], before[option.producer])
        for reader in option.readers:
            if reader != option.producer and reader not in {o.producer for o in chosen}:
                ratio = block.weights[reader] / before[reader]
                assert torch.allclose(ratio, torch.from_numpy(exact), rtol=1e-4)
    output = block.run(hidden, call)
    assert float((output - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_rounded_norm_stays_exact(name: str, dtype: str, tmp_path: Path) -> None:
    block, found, stream = opened(name, tmp_path)
    hidden, call = stream.probe(block.index)
    stored = {"BF16": torch.bfloat16, "F16": torch.float16}[dtype]
    norm, sites = next(iter(found.fold_groups().items()))
    block.weights[norm].copy_(block.weights[norm].to(stored))
    block.weights[norm][5] = 0.0  # a silent channel
    expected = block.run(hidden, call)
    option = fold.norm_folds(norm, sites)[name == "gemma3"]
    scale = np.random.default_rng(2).uniform(0.3, 3, block.weights[norm].numel())
    exact = fold.apply(block, option, scale.astype(np.float32), lambda _: dtype)
    new = block.weights[norm]
    assert torch.equal(new, new.to(stored).float())
    assert np.abs(exact / scale - 1).max() > 1e-5  # not the scales asked for,
    output = block.run(hidden, call)  # but the output is the same
    assert float((output - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_a_scale_that_would_silence_a_channel_is_left_out(tmp_path: Path) -> None:
    block, found, _ = opened("llama", tmp_path)
    norm, sites = next(iter(found.fold_groups().items()))
    scale = np.ones(block.weights[norm].numel(), np.float32)
    scale[[1, 2]] = [1e30, 1e-30]
    before = block.weights[norm].clone()
    exact = fold.apply(block, fold.norm_folds(norm, sites)[0], scale, lambda _: "F16")
    assert exact[[1, 2]].tolist() == [1, 1]
    assert torch.equal(block.weights[norm][[1, 2]], before[[1, 2]])


def test_a_forgotten_reader_is_noticed(tmp_path: Path) -> None:
    block, found, stream = opened("llama", tmp_path)
    hidden, call = stream.probe(block.index)
    seen = fold.shown(block, hidden, call)
    norm, sites = next(iter(found.fold_groups().items()))
    whole = fold.norm_folds(norm, sites)[0]
    assert fold.proved(block, whole, hidden, call, seen) is True
    for number in range(len(whole.readers)):
        readers = whole.readers[:number] + whole.readers[number + 1 :]
        part = fold.Fold(readers, norm, None, None)
        assert fold.proved(block, part, hidden, call, seen) is False


def test_what_the_probe_does_not_reach_proves_nothing(tmp_path: Path) -> None:
    block, found, stream = opened("qwen3_moe", tmp_path)
    hidden, call = stream.probe(block.index)
    # All experts score alike, so every token takes the same two.
    block.weights[f"{block.prefix}mlp.gate.weight"].zero_()
    seen = fold.shown(block, hidden, call)
    answers = []
    for site in found.sites:
        if site.expert is not None and module(site.id) == "down_proj":
            option = next(fold.projection_folds(block, found, site))
            answers.append(fold.proved(block, option, hidden, call, seen))
    assert sorted(answers, key=str) == [None] * 6 + [True] * 2
