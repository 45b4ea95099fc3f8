"""AWQ's search against examples worked by hand and plain formulas; whole blocks stay equivalent."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qtool.calibrating.sites import BlockSites, Tracer
from qtool.calibrating.stats import SiteStats, collect
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.methods import gptq, rtn
from qtool.planning.plan import Plan, make_plan
from qtool.recipe import recipe
from qtool.recipe.recipe import Recipe
from qtool.scheme import Scheme
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import LoadedBlock, Stream
from qtool.streaming.workers import Workers
from qtool.transforms import awq
from qtool.transforms.proved import Subject, map_stats
from support.models import arch_models

T = TypeVar("T")
R = TypeVar("R")


class InTurn:
    """Workers that are one."""

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        return [function(item) for item in items]


def measured(
    weight: list[list[float]], importance: list[float], scheme: Scheme, share: float = 1.0
) -> awq.Measured:
    cost = np.array(importance, np.float32)
    return awq.Measured(np.array(weight, np.float32), scheme, cost, np.diag(cost), share)


def test_a_scaled_weight_by_hand() -> None:
    # The grid is 0 .. 15 in steps of 1: 1.4 becomes 1. Scaled by 2 it is 2.8, becomes 3, and 3 / 2
    # is nearer to 1.4.
    reader = measured([[0, 15, 1.4]], [0, 0, 1], Scheme(4, 3, False))
    plain, scaled = np.ones(3, np.float32), np.array([1, 1, 2], np.float32)
    for error in (awq.diagonal_error, awq.output_error):
        assert error(reader, plain) == pytest.approx(0.16, rel=1e-5)
        assert error(reader, scaled) == pytest.approx(0.01, rel=1e-5)
    assert awq.search([reader], [plain, scaled], InTurn()) == 1
    # A channel that costs nothing may lose all it likes; one that costs more decides.
    other = measured([[0, 15, 1.0]], [0, 0, 100], Scheme(4, 3, False))
    wrong = np.array([1, 1, 1.4], np.float32)
    assert awq.search([other, reader], [plain, wrong, scaled], InTurn()) == 2


def test_part_of_the_rows_counts_for_all() -> None:
    scale = np.array([1, 1, 2], np.float32)
    whole = measured([[0, 15, 1.4]] * 4, [0, 0, 1], Scheme(4, 3, False))
    part = measured([[0, 15, 1.4]], [0, 0, 1], Scheme(4, 3, False), share=0.25)
    for error in (awq.diagonal_error, awq.output_error):
        assert error(part, scale) == pytest.approx(error(whole, scale))


def test_errors_are_summed_by_numpy_itself() -> None:
    """To the bit: sums of BLAS over many columns depend on its threads."""
    random = np.random.default_rng(2)
    weight = random.normal(size=(4, 14336)).astype(np.float32)
    cost = random.lognormal(size=14336).astype(np.float32)
    reader = awq.Measured(weight, Scheme(4, 128, False), cost, None)
    for scale in random.lognormal(size=(8, 14336)).astype(np.float32):
        columns = np.square(awq._error(reader, scale)).sum(0, dtype=np.float64)
        expected = (columns * (cost / np.square(scale)).astype(np.float64)).sum()
        assert awq.diagonal_error(reader, scale) == expected


def test_candidates_are_the_formula() -> None:
    random = np.random.default_rng(0)
    x, w = random.lognormal(size=(2, 16)).astype(np.float32)
    found = awq.candidates(x, w, 20)
    assert len(found) == 100
    assert (found[0] == 1).all()
    for step in range(20):
        for place, exponent in enumerate((0, 0.25, 0.5, 0.75, 1)):
            scale = x.astype(np.float64) ** (step / 20) / w.astype(np.float64) ** exponent
            scale /= np.sqrt(scale.max() * scale.min())
            assert np.allclose(found[5 * step + place], scale, rtol=1e-5)


def test_silent_channels_keep_their_scale() -> None:
    x = np.array([1, 0, 4, 16], np.float32)
    for scale in awq.candidates(x, np.ones(4, np.float32), 4):
        assert scale[1] == 1
        assert scale[[0, 2, 3]].max() * scale[[0, 2, 3]].min() == pytest.approx(1)
    assert [s.tolist() for s in awq.candidates(np.zeros(3, np.float32), x[:3], 4)] == [[1, 1, 1]]


def test_scales_stay_where_float16_is_exact() -> None:
    x = np.array([1e-6, 1, 1, 1e6], np.float32)
    found = np.array(awq.candidates(x, x[::-1].copy(), 20))
    assert found.max() == 128
    assert found.min() == 1 / 128


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(3, 32, False),
        Scheme(4, 16, True, "float8_e4m3", "e2m1", 1, "divides"),
        Scheme(4, 32, True, "e8m0", "e2m1"),
    ],
    ids=str,
)
def test_the_search_finds_the_least_output_error(scheme: Scheme) -> None:
    random = np.random.default_rng(1)
    inputs = random.normal(size=(256, 64)) * random.lognormal(0, 1.5, 64)
    gram = (inputs.T @ inputs).astype(np.float32)
    weights = [random.normal(size=(24, 64)).astype(np.float32) for _ in range(2)]
    readers = [awq.Measured(w, scheme, np.diagonal(gram).copy(), gram) for w in weights]
    mean_weight = np.abs(np.concatenate(weights)).mean(0)
    scales = awq.candidates(np.abs(inputs).mean(0).astype(np.float32), mean_weight, 20)

    def lost(scale: NDArray[np.float32]) -> float:
        total = 0.0
        for weight in weights:
            quant = rtn.quantize(weight * scale, None, scheme, rtn.Options()).quant
            error = (quant.dequantize().astype(np.float64) / scale - weight) @ inputs.T
            total += float((error**2).sum())
        return total

    errors = [lost(scale) for scale in scales]
    for number in (0, 7, 99):
        given = sum(awq.output_error(reader, scales[number]) for reader in readers)
        assert given == pytest.approx(errors[number], rel=1e-3)
    best = awq.search(readers, scales, InTurn())
    assert errors[best] < 0.8 * errors[0]
    assert errors[best] <= sorted(errors)[5]  # the diagonal sifts, so not always the very best


def test_statistics_of_the_scaled_input() -> None:
    random = np.random.default_rng(2)
    inputs = random.normal(size=(32, 8)).astype(np.float32)
    scale = random.uniform(0.5, 2, 8).astype(np.float32)

    def of(x: NDArray[np.float32]) -> SiteStats:
        return SiteStats(32, x.T @ x, np.abs(x).mean(0), np.abs(x).max(0), (x * x).sum(0))

    mapped, expected = map_stats(of(inputs), scale), of(inputs / scale)
    assert mapped.count == 32
    for name in ("gram", "mean_abs", "max_abs", "square"):
        assert np.allclose(getattr(mapped, name), getattr(expected, name), rtol=1e-4, atol=1e-4)
    assert map_stats(SiteStats(3), scale) == SiteStats(3)
    assert map_stats(SiteStats(3, there=torch.ones(2, 2)), scale).there is None


def opened(
    name: str, folder: Path, method: str
) -> tuple[Recipe, Plan, LoadedBlock, BlockSites, Stream]:
    """A block with a few loud input channels, and what the pipeline knows of it."""
    checkpoint = Checkpoint.open(arch_models.build(name, folder / name))
    wanted = recipe.load(method, ["weights.group_size=32", "indivisible=dense"])
    skeleton = Skeleton.open(checkpoint)
    tokens = np.random.default_rng(0).integers(0, arch_models.VOCABULARY, (8, 32))
    stream = skeleton.embed(tokens)
    block = skeleton.block(skeleton.count - 1)
    found = Tracer().sites(block, stream)
    for norm in found.fold_groups():
        block.weights[norm][::11] *= 6
    return wanted, make_plan(wanted, checkpoint), block, found, stream


def total_error(
    block: LoadedBlock, found: BlockSites, stats: dict[str, SiteStats], plan: Plan, method: str
) -> float:
    """Sum of relative output errors of all quantized matrices."""
    total = 0.0
    for site in found.sites:
        gram = stats[site.id].gram if site.id in stats else None
        if gram is None:
            continue
        for name in site.names:
            scheme = plan.by_name[name].scheme
            if scheme is None:
                continue
            weight = block.weights[name].numpy()
            if method == "gptq":
                quant = gptq.quantize(weight, stats[site.id], scheme, gptq.Options()).quant
            else:
                quant = rtn.quantize(weight, None, scheme, rtn.Options()).quant
            error = quant.dequantize() - weight
            total += float(np.sum(error @ gram * error) / np.sum(weight @ gram * weight))
    return total


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, "w4g128-awq") for name in arch_models.ARCHITECTURES),
        ("llama", "w4g128-awq-gptq"),
        pytest.param("gemma3", "w4g128-awq-gptq", marks=pytest.mark.slow),
        pytest.param("mixtral", "w4g128-awq-gptq", marks=pytest.mark.slow),
    ],
)
def test_a_block_stays_what_it_was(name: str, method: str, tmp_path: Path) -> None:
    wanted, plan, block, found, stream = opened(name, tmp_path, method)
    rounding = wanted.rounding
    with Workers(2) as workers:
        stats = collect(block, stream, found.sites, {"gram", "mean_abs", "max_abs"}, workers)
        before = total_error(block, found, stats, plan, rounding)
        hidden, call = stream.probe(block.index)
        expected = block.run(hidden, call)
        original = {key: value.clone() for key, value in block.weights.items()}
        result = awq.apply(Subject(block, found, plan, wanted, stream, workers), stats)
        output = block.run(hidden, call)
        assert float((output - expected).abs().max()) < 1e-4 * float(expected.abs().max())
        again = collect(block, stream, found.sites, {"gram", "mean_abs", "max_abs"}, workers)
    for site_id, mapped in result.stats.items():
        if mapped.gram is not None:
            level = np.sqrt(np.diagonal(mapped.gram))
            off = np.abs(mapped.gram - again[site_id].gram) / (np.outer(level, level) + 1e-6)
            assert off.max() < 1e-3
    assert total_error(block, found, result.stats, plan, rounding) < 0.99 * before
    # What is written as it is is either untouched or said to be changed.
    changed = {k for k, v in block.weights.items() if not torch.equal(v, original[k])}
    dense = {k for k in changed if plan.by_name[k].scheme is None}
    assert dense == result.changed
    assert dense & set(found.fold_groups())


def test_a_dense_router_loses_no_bit(tmp_path: Path) -> None:
    wanted, plan, block, found, stream = opened("mixtral", tmp_path, "w4g128-awq")
    router = next(name for name in block.weights if name.endswith("moe.gate.weight"))
    block.weights[router].copy_(block.weights[router].bfloat16())
    before = block.weights[router].clone()
    with Workers(1) as workers:
        stats = collect(block, stream, found.sites, awq.NEEDS, workers)
        awq.apply(Subject(block, found, plan, wanted, stream, workers), stats)
    ratio = block.weights[router] / before
    assert not torch.equal(block.weights[router], before)
    assert torch.equal(ratio, torch.exp2(torch.log2(ratio).round()))
    assert torch.equal(block.weights[router], block.weights[router].bfloat16().float())


def test_experts_that_saw_few_tokens_are_left_out(tmp_path: Path) -> None:
    """They get no scales of their own, and no voice in those that a norm gives to all."""
    wanted, plan, block, found, stream = opened("mixtral", tmp_path, "w4g128-awq")
    original = {key: value.clone() for key, value in block.weights.items()}
    with Workers(1) as workers:
        stats = collect(block, stream, found.sites, awq.NEEDS, workers)
        stats = {
            key: replace(s, count=min(s.count, 63)) if ".experts.2." in key else s
            for key, s in stats.items()
        }
        group = found.fold_groups()["model.layers.1.post_attention_layernorm.weight"]
        subject = Subject(block, found, plan, wanted, stream, workers)
        weights = [m.weight for m in awq._measured(subject, group, stats, None)]
        awq.apply(subject, stats)
    assert len(weights) == 2 * 3  # w1 and w3; the router stays dense
    experts = "model.layers.1.block_sparse_moe.experts"
    same = [e for e in range(4)
            if torch.equal(block.weights[f"{experts}.{e}.w2.weight"],
                           original[f"{experts}.{e}.w2.weight"])]  # fmt: skip
    assert same == [2]


def test_channels_that_are_always_zero_change_no_others_importance(tmp_path: Path) -> None:
    """Before GPTQ: errors cost what they do, and the damping, of channels that see something alone;
    half of them are silent."""
    wanted, plan, block, found, stream = opened("llama", tmp_path, "w4g128-awq-gptq")
    rounding = gptq.Options(token_damping=False)
    group = found.fold_groups()[f"{block.prefix}input_layernorm.weight"]
    (site,) = group
    live = np.arange(site.in_features) % 2 == 0
    gram = np.diag(np.random.default_rng(3).lognormal(size=site.in_features)).astype(np.float32)
    gram[~live] = 0
    with Workers(1) as workers:
        subject = Subject(block, found, plan, wanted, stream, workers)
        stats = {site.id: SiteStats(1000, gram)}
        costs = [one.importance for one in awq._measured(subject, group, stats, rounding)]
    mean = np.diagonal(gram)[live].mean()
    for cost in costs:
        np.testing.assert_allclose(cost[live], np.diagonal(gram)[live] + 0.01 * mean, rtol=1e-5)
        np.testing.assert_allclose(cost[~live], 0.01 * mean, rtol=1e-4)


def test_what_takes_no_scales_is_said(tmp_path: Path) -> None:
    wanted, plan, block, found, stream = opened("gpt_neox", tmp_path, "w4g128-awq")
    with Workers(1) as workers:
        stats = collect(block, stream, found.sites, awq.NEEDS, workers)
        result = awq.apply(Subject(block, found, plan, wanted, stream, workers), stats)
    assert result.notes == (
        "no AWQ scales for the input of mlp.dense_4h_to_h.weight: nothing before it takes them",
    )


def test_the_thread_count_changes_nothing(tmp_path: Path) -> None:
    found_weights = []
    for threads in (1, 3):
        wanted, plan, block, found, stream = opened(
            "llama", tmp_path / str(threads), "w4g128-awq-gptq"
        )
        with Workers(threads) as workers:
            stats = collect(block, stream, found.sites, awq.NEEDS, workers)
            awq.apply(Subject(block, found, plan, wanted, stream, workers), stats)
        found_weights.append({k: v.numpy().tobytes() for k, v in block.weights.items()})
    assert found_weights[0] == found_weights[1]
