"""Smoothing: the formula by hand, what a search looks at, and models that stay what they were."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from qtool.calibrating.sites import Tracer
from qtool.calibrating.stats import collect
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.planning.plan import make_plan
from qtool.recipe import recipe
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.workers import Workers
from qtool.transforms import awq, smooth, smooth_attention
from qtool.transforms.fold import restored
from qtool.transforms.proved import Subject, proved_folds, too_large
from support.models import arch_models
from support.runs.quantizing import assert_reads_back, build, quantize, text_file, write_dense
from support.transforms.loud_channels import opened

NORMS_OF_KEYS = ("qwen3", "gemma3", "qwen3_moe")  # and of queries
KEYS_SCALED = {
    "llama": "4 pairs of channels in each of 2 heads, in self_attn.k_proj.weight and "
    "self_attn.q_proj.weight (3 times)",
    "opt": "16 single channels in each of 4 heads, in self_attn.k_proj.weight and "
    "self_attn.q_proj.weight (2 times)",
    "gpt_neox": "2 pairs of channels and 12 single channels in each of 4 heads, in "
    "attention.query_key_value.weight (2 times)",
}
_ATTENTION = "self_attn.q_proj.weight, self_attn.k_proj.weight, self_attn.v_proj.weight"
_EXPERTS = "block_sparse_moe.experts.*"
SMOOTHED = {  # each input by those that read it
    "llama": f"{_ATTENTION}; mlp.gate_proj.weight, mlp.up_proj.weight; self_attn.o_proj.weight; "
    "mlp.down_proj.weight (3 times)",
    "mixtral": f"{_ATTENTION}; {_EXPERTS}.w1.weight, {_EXPERTS}.w3.weight; "
    f"self_attn.o_proj.weight; {_EXPERTS}.w2.weight (2 times)",
}


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.75, 1.0])
def test_scales_are_the_formula(alpha: float) -> None:
    x, w = np.array([1, 4, 16], np.float32), np.array([2, 0.5, 1], np.float32)
    assert np.allclose(smooth.scales(x, w, alpha), x**alpha / w ** (1 - alpha), rtol=1e-6)


def test_channels_that_say_nothing_keep_their_scale() -> None:
    x, w = np.array([0, 4, 1e-9], np.float32), np.array([2, 0, 1], np.float32)
    found = smooth.scales(x, w, 0.5)
    assert found[0] == found[1] == 1
    assert found[2] == pytest.approx(np.sqrt(4e-4))  # as 1 / 10 000 of the largest
    assert (smooth.scales(np.zeros(2, np.float32), w[:2], 0.5) == 1).all()


@pytest.mark.parametrize(("name", "module", "said"), [
    ("w8a8-dynamic", smooth, "not smoothed: the input of {}; x could not hold its scales"),
    ("w4g128-awq", awq, "no AWQ scales for the input of {}: x could not hold them"),
])  # fmt: skip
def test_who_is_left_out_is_named(
    name: str, module: ModuleType, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "too_large", lambda *_: "x")
    text = text_file(tmp_path / "text.txt", 6000)
    sets = [f"calibration.source={text}", "calibration.samples=1", "calibration.length=32"]
    sets += ["transforms=[smooth]"] if module is smooth else ["indivisible=dense"]
    sets += ["weights.group_size=-1"] if module is awq else []
    model = build("llama", tmp_path / "m")
    notes = quantize(model, name, tmp_path / "out", *sets).summary.notes
    for names in (_ATTENTION, "mlp.gate_proj.weight, mlp.up_proj.weight"):
        assert any(note.startswith(said.format(names)) for note in notes), notes


def logits(folder: Path, tokens: np.ndarray) -> torch.Tensor:
    with Workers(1) as workers:
        return Skeleton.open(Checkpoint.open(folder)).logits(tokens, workers)


@pytest.mark.parametrize("name", arch_models.ARCHITECTURES)
def test_the_network_stays_what_it_was(name: str, tmp_path: Path) -> None:
    """Bar of exactness: logits within 1e-4 of their range, with both transforms in one run."""
    model = build(name, tmp_path / "m")
    text = text_file(tmp_path / "text.txt", 6000)
    sets = [f"calibration.source={text}", "calibration.samples=4", "calibration.length=32",
            "transforms=[smooth, smooth-attention]", "smooth.sites=all"]  # fmt: skip
    (tmp_path / "dense.yaml").write_text("method: none\nformat: dense\n", encoding="utf-8")
    made = quantize(model, str(tmp_path / "dense.yaml"), tmp_path / "out", *sets)
    tokens = np.random.default_rng(3).integers(0, arch_models.VOCABULARY, (2, 48))
    before, after = logits(model, tokens), logits(made.out, tokens)
    span = float(before.max() - before.min())
    assert float((after - before).abs().max()) < 1e-4 * span
    weights = {path: Checkpoint.open(path) for path in (model, made.out)}
    changed = {
        key for key in weights[model].tensors
        if not np.array_equal(weights[model].float32(key), weights[made.out].float32(key))
    }  # fmt: skip
    assert any("norm" in key for key in changed)
    left_out = [note for note in made.summary.notes if "keys not scaled" in note]
    assert bool(left_out) == (name in NORMS_OF_KEYS)
    smoothed = [note for note in made.summary.notes if note.startswith("smoothed: the inputs of ")]
    assert smoothed
    if name in SMOOTHED:
        assert smoothed == [f"smoothed: the inputs of {SMOOTHED[name]}"]
    scaled = [note for note in made.summary.notes if "keys scaled: " in note]
    assert bool(scaled) != bool(left_out)
    if name in KEYS_SCALED:
        assert scaled == [f"keys scaled: {KEYS_SCALED[name]}"]
    queries = [key for key in changed if "q_proj" in key or "qkv" in key or "query_key" in key]
    assert queries


@pytest.mark.parametrize(
    ("chosen", "chain", "sets"),
    [
        pytest.param("w8a8-smoothquant", "smooth", (), marks=pytest.mark.slow),
        pytest.param("w8a8-smoothquant", "smooth", ("method=gptq",), marks=pytest.mark.slow),
        ("w8a8-smoothquant", "smooth", ("smooth.alpha=search", "smooth.sites=all")),
        ("w8a8-smoothquant", "rotate, smooth, smooth-attention", ("rotate.r2=false",)),
        ("w8a16-ct", "smooth-attention, smooth, awq", ()),
        ("w8-rtn", "smooth", ("method=[awq, gptq]", "weights.group_size=32")),
        ("fp8-static", "smooth", ()),
    ],
)
def test_chains(chosen: str, chain: str, sets: tuple[str, ...], tmp_path: Path) -> None:
    """With 8 bits little is lost, whatever comes before; and much where a chain is wrong."""
    model = build("llama", tmp_path / "m")
    text = text_file(tmp_path / "text.txt", 6000)
    given = [f"calibration.source={text}", "calibration.samples=4", "calibration.length=32",
             f"transforms=[{chain}]", *sets]  # fmt: skip
    run = quantize(model, chosen, tmp_path / "out", *given)
    assert_reads_back(run)
    tokens = np.random.default_rng(3).integers(0, arch_models.VOCABULARY, (2, 48))
    before, after = logits(model, tokens), logits(write_dense(run.out, tmp_path / "dense"), tokens)
    lost = 0.15 if chosen.startswith("fp8") else 0.06  # of 3 and of 7 bits of a number
    assert float((after - before).std()) < lost * float(before.std())


@pytest.mark.parametrize(("name", "which"), [("llama", "norms"), ("mixtral", "all")])
def test_statistics_of_smoothed_inputs(name: str, which: str, tmp_path: Path) -> None:
    wanted, plan, block, found, stream = opened(name, tmp_path, f"smooth.sites={which}")
    needs = {"gram", "max_abs"}
    with Workers(2) as workers:
        stats = collect(block, stream, found.sites, needs, workers)
        before = {key: one.max_abs for key, one in stats.items()}
        result = smooth.apply(Subject(block, found, plan, wanted, stream, workers), stats)
        again = collect(block, stream, found.sites, needs, workers)
    for key, mapped in result.stats.items():
        assert (mapped.max_abs is None) == (again[key].max_abs is None)
        if mapped.max_abs is not None:
            assert np.allclose(mapped.max_abs, again[key].max_abs, rtol=1e-3, atol=1e-5)
            level = np.sqrt(np.diagonal(mapped.gram))
            off = np.abs(mapped.gram - again[key].gram) / (np.outer(level, level) + 1e-6)
            assert off.max() < 1e-3
    norm = next(site for site in found.sites if site.producer is not None)
    largest = result.stats[norm.id].max_abs
    assert np.ptp(np.log(before[norm.id])) > 2 * np.ptp(np.log(largest))
    if which == "norms":  # half and half: channels of the input are as large as those of weights
        top = np.maximum.reduce([block.weights[key].abs().amax(0).numpy() for key in norm.names])
        assert np.allclose(largest, top, rtol=0.01)


def test_what_float16_cannot_hold_is_not_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases of a norm and of a projection, a projection's rows, a dense reader; and of keys."""
    checkpoint = Checkpoint.open(arch_models.build("opt", tmp_path / "m", dtype="float16"))
    (tmp_path / "r.yaml").write_text("method: none\nformat: dense\ntransforms: [smooth]\n")
    wanted = recipe.load(str(tmp_path / "r.yaml"), ["smooth.sites=all"])
    plan = make_plan(wanted, checkpoint)
    skeleton = Skeleton.open(checkpoint)
    stream = skeleton.embed(np.random.default_rng(0).integers(3, arch_models.VOCABULARY, (2, 32)))
    block = skeleton.block(0)
    with Workers(1) as workers:
        found = Tracer().sites(block, stream)
        stats = collect(block, stream, found.sites, {"max_abs"}, workers)
        seen: dict[bool, int] = {True: 0, False: 0}
        for _, chosen in proved_folds(block, found, stats, stream):
            assert chosen is not None and chosen.bias is not None
            scale = np.full(block.weights[chosen.readers[0]].shape[1], 0.5, np.float32)
            assert too_large(block, chosen, scale, plan) is None
            names = [chosen.bias, *([] if chosen.rows is None else [chosen.producer])]
            for name in names:
                row = chosen.bias_offset if name == chosen.bias else 0
                with restored(block, [name]):
                    block.weights[name][row] = 40000
                    assert too_large(block, chosen, scale, plan) == name
                    assert too_large(block, chosen, 1 / scale, plan) is None
            with restored(block, [chosen.readers[-1]]):
                block.weights[chosen.readers[-1]][1, 2] = -40000
                assert too_large(block, chosen, 1 / scale, plan) == chosen.readers[-1]
            seen[chosen.rows is None] += 1
        assert seen == {True: 2, False: 2}
        huge = np.float32(2.0**20)
        monkeypatch.setattr(smooth_attention, "scales", lambda k, *_: np.full_like(k, huge))
        chain = Subject(block, found, plan, wanted, stream, workers)
        before = {name: view.clone() for name, view in block.weights.items()}
        done = smooth_attention.apply(chain, {})
        assert "q_proj.weight could not hold the scales in float16" in done.notes[0]
        assert not done.changed
        assert all(torch.equal(before[name], view) for name, view in block.weights.items())


def test_pairs_of_rotary_embedding() -> None:
    shared = [list(one) for one in smooth_attention.sharings(8)]
    assert shared[:3] == [list(range(8)), [0, 1, 2, 3] * 2, [0, 0, 1, 1, 2, 2, 3, 3]]
    assert [0, 1, 0, 1, 2, 3, 4, 5] in shared  # half of the channels are turned
    keys = np.array([[1, 2, 0, 8, 4, 0, 0, 2]], np.float32)
    found = smooth_attention.scales(keys, np.array([0, 1, 2, 3] * 2), 0.5)
    assert np.allclose(found, np.sqrt([[4, 2, 1, 8] * 2]))


@pytest.mark.parametrize(
    ("name", "pairs", "heads"),
    [("llama", "halves", 2), ("phi3", "halves", 2), ("opt", "none", 4), ("mixtral", "halves", 2),
     ("stablelm", "part", 4), ("gpt_neox", "part", 4)],
)  # fmt: skip
def test_keys_that_are_found(name: str, pairs: str, heads: int, tmp_path: Path) -> None:
    skeleton = Skeleton.open(Checkpoint.open(arch_models.build(name, tmp_path / name)))
    tokens = np.random.default_rng(0).integers(0, arch_models.VOCABULARY, (4, 32))
    stream = skeleton.embed(tokens)
    block = skeleton.block(0)
    found = Tracer().sites(block, stream)
    pair = smooth_attention.find_pair(block, found, stream)
    assert not isinstance(pair, str), pair
    width = pair.head_dim
    different = len(set(pair.shared))
    assert {"halves": width // 2, "none": width}.get(pairs, different) == different
    assert (pairs == "part") == (width // 2 < different < width)
    with Workers(2) as workers:
        before = smooth_attention.largest_keys(block, stream, pair, workers)
        scale = smooth_attention.scales(before, pair.shared, 1.0)
        smooth_attention.fold(block, pair, scale)
        after = smooth_attention.largest_keys(block, stream, pair, workers)
    assert before.shape == (pair.heads, width) and pair.heads == heads
    assert np.allclose(after, before / scale, rtol=1e-4)
    assert after.max() == pytest.approx(1, rel=1e-4)
