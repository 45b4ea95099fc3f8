"""Scales tuned by the gradient of a block's error: the numbers, and a block."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qtool.blockwise import tune_block as module
from qtool.blockwise.tune_block import parts, tune_block
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import UnsupportedError
from qtool.methods import rtn, tune
from qtool.recipe.methods import TuneOptions
from qtool.scheme import GroupQuant, Scheme
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import LoadedBlock, Stream
from qtool.streaming.workers import Workers
from support.runs import quantizing

ASYMMETRIC = Scheme(3, 16, False)
SCHEMES = (ASYMMETRIC, Scheme(4, -1, True))


def problem(scheme: Scheme, *, ordered: bool = False, rows: int = 300) -> GroupQuant:
    rng = np.random.default_rng(7)
    weight = rng.normal(size=(rows, 64)).astype(np.float32)
    quant = rtn.quantize(weight, None, scheme, rtn.Options()).quant
    if not ordered:
        return quant
    return replace(quant, g_idx=rng.permutation(quant.group_index()).astype(np.int32))


def moved_weight(quant: GroupQuant, moved: torch.Tensor) -> torch.Tensor:
    """The definition, in float64: (code - zero) * scale * exp(p)."""
    index = torch.from_numpy(quant.group_index().astype(np.int64))
    return torch.from_numpy(quant.dequantize()).double() * moved[0].exp()[:, index]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_gradient_is_that_of_the_definition(scheme: Scheme, ordered: bool) -> None:
    quant = problem(scheme, ordered=ordered)
    scales = tune.Grouped(quant).scales()
    target = torch.randn(quant.shape, dtype=torch.float64)
    moved = (0.1 * torch.randn(scales.moved.shape, dtype=torch.float64)).requires_grad_()
    weight = moved_weight(quant, moved)
    (weight - target).square().sum().backward()
    by_weight = (2 * (weight - target)).detach().float()
    found = tune.gradient(scales, weight.detach().float(), by_weight)
    assert moved.grad is not None
    torch.testing.assert_close(found, moved.grad.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("ordered", [False, True])
def test_steps_are_those_of_adam(ordered: bool) -> None:
    """torch's own, in float64, on a loss whose minimum the scales can nearly reach."""
    quant = problem(ASYMMETRIC, ordered=ordered)
    scales, weight = tune.Grouped(quant).scales(), torch.from_numpy(quant.dequantize())
    target = weight.double() * 1.03 + 0.01
    moved = torch.zeros(scales.moved.shape, dtype=torch.float64, requires_grad=True)
    oracle = torch.optim.Adam([moved], lr=1.0, betas=(tune.MOMENTUM, tune.MOMENTUM_OF_SQUARES),
                              eps=tune.SMALLEST)  # fmt: skip
    steps, rate = 12, 0.01
    for number in range(1, steps + 1):
        oracle.zero_grad()
        (moved_weight(quant, moved) - target).square().mean().backward()
        oracle.param_groups[0]["lr"] = rate * (1 - (number - 1) / steps)
        oracle.step()
        by_weight = 2 * (weight - target.float()) / weight.numel()
        gradient = tune.gradient(scales, weight, by_weight)
        tune.step(scales, weight, gradient, number, tune.rate_at(number, steps, rate))
    torch.testing.assert_close(scales.moved.double(), moved.detach(), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(weight.double(), moved_weight(quant, moved.detach()), rtol=1e-5,
                               atol=1e-7)  # fmt: skip
    assert float(scales.moved.abs().max()) > 0.02


def test_codes_and_zeros_stay_and_scales_are_rounded_once() -> None:
    quant = problem(ASYMMETRIC)
    scales = tune.Grouped(quant).scales()
    scales.moved += 0.05 * torch.randn(scales.moved.shape)
    found = tune.Grouped(quant).tuned(scales).quant
    assert found.codes is quant.codes and found.zero is quant.zero
    wide = quant.scale.astype(np.float32) * np.exp(scales.moved[0].numpy())
    assert np.array_equal(found.scale, wide.astype(np.float16))
    still = tune.Grouped(quant).tuned(tune.Grouped(quant).scales()).quant
    assert np.array_equal(still.scale, quant.scale)


def test_a_scale_beyond_float16_is_refused_and_none_becomes_zero() -> None:
    quant = problem(ASYMMETRIC)
    large = replace(quant, scale=np.full_like(quant.scale, 60000))
    scales = tune.Grouped(large).scales()
    scales.moved += 1.0
    with pytest.raises(UnsupportedError, match="larger scale than float16 holds"):
        tune.Grouped(large).tuned(scales)
    small = replace(quant, scale=np.full_like(quant.scale, 2.0**-24))
    scales = tune.Grouped(small).scales()
    scales.moved -= 5.0
    assert np.array_equal(tune.Grouped(small).tuned(scales).quant.scale, small.scale)


def test_an_eighth_of_the_text_takes_no_part() -> None:
    assert parts(16) == ([*range(14)], [14, 15])
    assert parts(9) == ([*range(8)], [8])
    assert parts(2) == ([0], [1])
    assert parts(1) == ([0], [0])


Case = tuple[LoadedBlock, dict[str, tune.Grouped], Stream, list[torch.Tensor]]


def block_case(folder: Path) -> Case:
    """The first block of `tiny`, rounded to 3 bits, on words; what the original gives back."""
    skeleton = Skeleton.open(Checkpoint.open(quantizing.first_block_of_tiny(folder)))
    # Text that repeats, as a language does: what helps on a part of it helps on the rest.
    tokens = np.random.default_rng(0).zipf(1.5, size=(16, 64)) % 500
    stream = skeleton.embed(tokens.astype(np.int64), micro_batch_tokens=128)
    block = skeleton.block(0)
    calls = stream.calls[0]
    targets = [block.run(h, c) for h, c in zip(stream.hidden, calls, strict=True)]
    matrices = {}
    for name, weight in block.weights.items():
        if weight.dim() == 2:
            scheme = Scheme(3, 64, False)
            quant = rtn.quantize(weight.numpy(), None, scheme, rtn.Options()).quant
            matrices[name] = tune.Grouped(quant)
            weight.copy_(torch.from_numpy(quant.dequantize()))
    return block, matrices, stream, targets


def relative(block: LoadedBlock, stream: Stream, targets: list[torch.Tensor], at: slice) -> float:
    """The definition, in float64: each token's squared error over its own target's, mean over the
    tokens `at` these places of samples that take no part."""
    errors = []
    for number in parts(len(targets))[1]:
        found = block.run(stream.hidden[number], stream.calls[0][number]).double()
        target = targets[number].double()
        ratio = (found - target).square().sum(-1) / target.square().sum(-1)
        errors.append(float(ratio[:, at].mean()))
    return sum(errors) / len(errors)


def test_all_tokens_count_alike_however_large(tmp_path: Path) -> None:
    """As where the first token of a text has states a thousand times as large as others, which no
    scale brings near: the others come nearer, and it is they who judge."""
    block, matrices, stream, targets = block_case(tmp_path / "model")
    for target in targets:
        target[:, 0] *= 1000
    every, others = slice(None), slice(1, None)
    first, before = (relative(block, stream, targets, at) for at in (every, others))
    with Workers(2) as workers:
        tuned = tune_block(block, matrices, stream, targets, workers, TuneOptions(steps=12))
    assert tuned.before == pytest.approx(first, rel=1e-4)
    assert tuned.after == pytest.approx(relative(block, stream, targets, every), rel=1e-4)
    assert relative(block, stream, targets, others) < 0.95 * before


def test_a_token_of_nothing_counts_as_a_faint_one() -> None:
    """No token's loss is divided by less than a hundredth of the median of others than zeros."""
    target = torch.randn(2, 8, 16, dtype=torch.float64)
    found = target + 0.1 * torch.randn(2, 8, 16, dtype=torch.float64)
    target[1, 3] = 0
    target[0, 0] *= 1000
    size = target.square().mean(-1)
    expected = (found - target).square().mean(-1) / size
    expected[1, 3] = found[1, 3].square().mean() / (0.01 * size[size > 0].median())
    assert float(tune.lost(found, target)) == pytest.approx(float(expected.mean()))
    nothing = torch.zeros(2, 8, 16)
    assert float(tune.lost(nothing, nothing)) == 0
    target[:, 1:] = 0  # most, as of a text that ends early
    assert 0 < float(tune.lost(found, target)) < 1e6


def holds(block: LoadedBlock, matrices: Mapping[str, tune.Grouped]) -> bool:
    return all(
        np.array_equal(block.weights[n].numpy(), one.dequantize()) for n, one in matrices.items()
    )


def test_a_block_comes_nearer_on_text_that_took_no_part(tmp_path: Path) -> None:
    found = []
    for threads in (1, 3):
        block, matrices, stream, targets = block_case(tmp_path / "model")
        with Workers(threads) as workers:
            tuned = tune_block(block, matrices, stream, targets, workers, TuneOptions(steps=12))
        assert tuned.after < 0.95 * tuned.before
        assert holds(block, tuned.matrices)
        assert all(tuned.matrices[n].quant.codes is one.quant.codes for n, one in matrices.items())
        assert not any(p.requires_grad or p.grad is not None for p in block.module.parameters())
        found.append(tuned)
    assert found[0].after == found[1].after and found[0].before == found[1].before
    for name, one in found[0].matrices.items():
        assert np.array_equal(one.quant.scale, found[1].matrices[name].quant.scale), name


def test_a_block_that_comes_no_nearer_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right_way = tune.step

    def wrong_way(scales: tune.Scales, weight: torch.Tensor, gradient: torch.Tensor, number: int,
                  rate: float) -> None:  # fmt: skip
        right_way(scales, weight, -gradient, number, rate)

    monkeypatch.setattr(module.tune, "step", wrong_way)
    block, matrices, stream, targets = block_case(tmp_path / "model")
    with Workers(2) as workers:
        tuned = tune_block(block, matrices, stream, targets, workers, TuneOptions(steps=3))
    assert tuned.after == tuned.before
    assert holds(block, matrices) and tuned.matrices is matrices


def test_scales_that_leave_all_bounds_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undefined ones, and ones that float16 does not hold."""
    for value in (float("nan"), 40.0):

        def far(scales: tune.Scales, *_: object, value: float = value) -> None:
            scales.moved.fill_(value)

        monkeypatch.setattr(module.tune, "step", far)
        block, matrices, stream, targets = block_case(tmp_path / "model")
        with Workers(2) as workers:
            tuned = tune_block(block, matrices, stream, targets, workers, TuneOptions(steps=1))
        assert tuned.after == tuned.before
        assert holds(block, matrices) and tuned.matrices is matrices


def test_too_little_memory_is_no_lack_of_a_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 TB")

    monkeypatch.setattr(torch.autograd, "backward", fails)
    block, matrices, stream, targets = block_case(tmp_path / "model")
    with Workers(1) as workers, pytest.raises(MemoryError, match="can't allocate"):
        tune_block(block, matrices, stream, targets, workers, TuneOptions(steps=1))


def test_what_has_no_gradient_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    block, matrices, stream, targets = block_case(tmp_path / "model")
    kind = type(block.module)
    plain = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *a, **k: Rounded.apply(plain(*a, **k)))
    with (
        Workers(1) as workers,
        pytest.raises(UnsupportedError, match=r"^model.layers.0: torch has no gradient .*without"),
    ):
        tune_block(block, matrices, stream, targets, workers, TuneOptions(steps=1))
