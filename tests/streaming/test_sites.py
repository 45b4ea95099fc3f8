"""Sites: readers, producers and order, on every architecture."""

from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch

from qtool.calibrating.sites import BlockSites, Tracer, trace
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.streaming.linears import Matrix, ObserveLinears, WeightIndex
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import LoadedBlock, Stream
from qtool.streaming.workers import Workers
from support.models.arch_models import CONFIGS, VOCABULARY, build


def opened(folder: Path, samples: int = 2) -> tuple[Skeleton, Stream]:
    skeleton = Skeleton.open(Checkpoint.open(folder))
    tokens = np.random.default_rng(1).integers(3, VOCABULARY, (samples, 40), dtype=np.int64)
    return skeleton, skeleton.embed(tokens)


def short(name: str | None) -> str | None:
    """model.layers.0.self_attn.q_proj.weight -> self_attn.q_proj"""
    return name.split("layers.")[1].split(".", 1)[1].rsplit(".", 1)[0] if name else None


def table(sites: BlockSites) -> list[tuple[tuple[str | None, ...], str | None]]:
    """Readers and producer of each site."""
    return [(tuple(map(short, site.names)), short(site.producer)) for site in sites.sites]


ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj")
LLAMA = [
    (ATTENTION, "input_layernorm"),
    (("self_attn.o_proj",), None),
    (MLP, "post_attention_layernorm"),
    (("mlp.down_proj",), None),
]
EXPECTED = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma3": [*LLAMA[:2], (MLP, "pre_feedforward_layernorm"), LLAMA[3]],
    "phi3": [
        (("self_attn.qkv_proj",), "input_layernorm"),
        (("self_attn.o_proj",), None),
        (("mlp.gate_up_proj",), "post_attention_layernorm"),
        (("mlp.down_proj",), None),
    ],
    "opt": [
        (ATTENTION, "self_attn_layer_norm"),
        (("self_attn.out_proj",), None),
        (("fc1",), "final_layer_norm"),
        (("fc2",), None),
    ],
    "gpt_neox": [
        (("attention.query_key_value",), "input_layernorm"),
        (("attention.dense",), None),
        (("mlp.dense_h_to_4h",), "post_attention_layernorm"),
        (("mlp.dense_4h_to_h",), None),
    ],
    "stablelm": [
        ((*ATTENTION, *MLP), "input_layernorm"),
        (("self_attn.o_proj",), None),
        (("mlp.down_proj",), None),
    ],
    "sarvam_moe": [
        (("attention.query_key_value",), "input_layernorm"),
        (("attention.dense",), None),
        *LLAMA[2:],
    ],
    "mixtral": [
        *LLAMA[:2],
        (("block_sparse_moe.gate",), "post_attention_layernorm"),
        *(
            row
            for e in range(4)
            for row in (
                (
                    (f"block_sparse_moe.experts.{e}.w1", f"block_sparse_moe.experts.{e}.w3"),
                    "post_attention_layernorm",
                ),
                ((f"block_sparse_moe.experts.{e}.w2",), None),
            )
        ),
    ],
    "qwen3_moe": [
        *LLAMA[:2],
        (("mlp.gate",), "post_attention_layernorm"),
        *(
            row
            for e in range(8)
            for row in (
                (
                    (f"mlp.experts.{e}.gate_proj", f"mlp.experts.{e}.up_proj"),
                    "post_attention_layernorm",
                ),
                ((f"mlp.experts.{e}.down_proj",), None),
            )
        ),
    ],
}


@pytest.mark.parametrize("name", CONFIGS)
def test_readers_and_producers(name: str, tmp_path: Path) -> None:
    skeleton, stream = opened(build(name, tmp_path))
    block = skeleton.block(0)
    found = Tracer().sites(block, stream)
    assert sorted(table(found), key=str) == sorted(EXPECTED[name], key=str)
    assert found.unread == ()
    matrices = {key for key, view in block.weights.items() if view.ndim == 2}
    assert sorted(n for site in found.sites for n in site.names) == sorted(matrices)
    for site in found.sites:
        for reader in site.readers:
            made = [
                (one.first, one.rows[1] - one.rows[0])
                for call in found.linears
                for one in call.readers
                if one.name == reader.name
            ]
            ends = accumulate(rows for _, rows in made)
            assert [first for first, _ in made] == [0, *ends][:-1]
            rows = sum(rows for _, rows in made)
            assert block.weights[reader.name].shape == (rows, site.in_features)
        if site.producer is not None:
            assert block.weights[site.producer].shape == (site.in_features,)
        has_bias = site.producer is not None and name in ("opt", "gpt_neox", "stablelm")
        assert (site.producer_bias is not None) == has_bias


def test_linears_come_in_the_order_of_the_forward_pass(tmp_path: Path) -> None:
    skeleton, stream = opened(build("opt", tmp_path))
    found = Tracer().sites(skeleton.block(1), stream)
    prefix = "model.decoder.layers.1."
    expected = [f"self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj", "out_proj")] + [
        "fc1",
        "fc2",
    ]
    assert [linear.readers[0].name for linear in found.linears] == [
        f"{prefix}{part}.weight" for part in expected
    ]
    assert [linear.bias for linear in found.linears] == [f"{prefix}{p}.bias" for p in expected]
    assert [linear.out_features for linear in found.linears] == [64, 64, 64, 64, 96, 64]


def test_a_fold_group_holds_router_and_all_experts(tmp_path: Path) -> None:
    skeleton, stream = opened(build("mixtral", tmp_path))
    groups = Tracer().sites(skeleton.block(0), stream).fold_groups()
    group = groups["model.layers.0.post_attention_layernorm.weight"]
    names = {name for site in group for name in site.names}
    experts = "model.layers.0.block_sparse_moe.experts"
    assert names == {"model.layers.0.block_sparse_moe.gate.weight"} | {
        f"{experts}.{e}.{w}.weight" for e in range(4) for w in ("w1", "w3")
    }


def test_experts_that_the_probe_misses_have_sites_too(tmp_path: Path) -> None:
    """Two tokens reach four of eight experts at most."""
    skeleton, stream = opened(build("qwen3_moe", tmp_path))
    block = skeleton.block(0)
    hidden, _ = stream.probe(0)
    few = skeleton.embed(np.array([[5, 6]]))
    found = trace(block, hidden[:, :2], few.calls[0][0])
    assert sum(site.calls == 0 for site in found.sites) >= 8
    whole = Tracer().sites(block, stream)
    assert sorted(table(found), key=str) == sorted(table(whole), key=str)
    assert {site.matrix for site in found.sites} == {site.matrix for site in whole.sites}
    assert {linear.readers for linear in found.linears} == {x.readers for x in whole.linears}


def test_experts_with_the_same_tokens_are_apart(tmp_path: Path) -> None:
    """One token goes to two experts of each block."""
    skeleton, _ = opened(build("mixtral", tmp_path))
    one = skeleton.embed(np.array([[7]]))
    found = trace(skeleton.block(0), one.hidden[0], one.calls[0][0])
    assert all(len(site.names) <= 3 for site in found.sites)
    assert {site.expert for site in found.sites if "w1" in site.id} == {0, 1, 2, 3}


def test_blocks_of_one_structure_are_traced_once(tmp_path: Path) -> None:
    skeleton, stream = opened(build("qwen3_moe", tmp_path))  # sparse, dense, sparse
    tracer = Tracer()
    with Workers(1) as workers:
        for index in range(skeleton.count):
            block = skeleton.block(index)
            found = tracer.sites(block, stream)
            again = trace(block, *stream.probe(index))
            assert sorted(table(found), key=str) == sorted(table(again), key=str)
            assert all(f"layers.{index}." in site.id for site in found.sites)
            skeleton.advance(block, stream, workers)
    assert len(tracer._known) == 2


def test_matrix_products_are_seen_in_every_spelling() -> None:
    linear = torch.nn.Linear(4, 3, bias=False)
    slab = torch.nn.Parameter(torch.randn(2, 3, 4))
    module = torch.nn.Module()
    module.register_parameter("weight", linear.weight)
    module.register_parameter("slab", slab)
    x = torch.randn(5, 4)
    seen: list[Matrix] = []
    with torch.no_grad(), ObserveLinears(WeightIndex(module), lambda m, *_: seen.append(m)):
        torch.nn.functional.linear(input=x, weight=module.weight)  # type: ignore[arg-type]
        x @ module.weight.T  # type: ignore[operator]
        torch.matmul(x, slab[1].T)
        torch.addmm(torch.zeros(3), x, slab[0].t())
        torch.mm(x, slab[1].t())
        torch.nn.functional.linear(x, torch.randn(3, 4))  # none of the module's
    expected = [("weight", None), ("weight", None), ("slab", 1), ("slab", 0), ("slab", 1)]
    assert seen == [Matrix(*item) for item in expected]


def test_a_matrix_that_nothing_reads_is_told(tmp_path: Path) -> None:
    skeleton, stream = opened(build("llama", tmp_path))
    block = skeleton.block(0)
    extra = torch.zeros(4, 4)
    weights = {**block.weights, "model.layers.0.never.weight": extra}
    patched = LoadedBlock(block.index, block.prefix, block.module, block.bindings, weights)
    assert Tracer().sites(patched, stream).unread == ("model.layers.0.never.weight",)
