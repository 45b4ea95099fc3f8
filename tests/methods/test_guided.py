"""gptq.guided: which matrices others read, gradients against float64, weighted sums."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qtool.calibrating import guidance
from qtool.calibrating.guidance import Guidance, Mixing, mixing
from qtool.calibrating.placed import Passage
from qtool.calibrating.sites import BlockSites, Tracer
from qtool.calibrating.stats import collect
from qtool.errors import QtoolError, UnsupportedError
from qtool.streaming.stream import LoadedBlock, Stream
from qtool.streaming.workers import Workers
from support.calibrating.recorded_inputs import opened, recorded
from support.gguf import gguf_models
from support.gguf.gguf_runs import NOT_STREAMED, STREAMED, streamed, without_tokenizers
from support.models import arch_models
from support.runs import quantizing

__all__ = ["without_tokenizers"]


def weights_of(
    block: LoadedBlock, stream: Stream, found: BlockSites, power: float = 0.5, threads: int = 2
) -> dict[str, NDArray[np.float32]]:
    with Workers(threads) as workers:
        passage = Passage.of(stream, workers, None)
        made = Guidance(power, 3).weights(block, passage, found)
    return {name: torch.cat([*some]).numpy() for name, some in made.items()}


@pytest.mark.parametrize(
    ("name", "read", "behind"),
    [
        ("llama", ["k_proj", "v_proj"], "o_proj"),
        pytest.param(*("gemma3", ["k_proj", "v_proj"], "o_proj"), marks=pytest.mark.slow),
        ("phi3", ["qkv_proj"], "o_proj"),
        ("gpt_neox", ["query_key_value"], "dense"),
        pytest.param(*("opt", ["k_proj", "v_proj"], "out_proj"), marks=pytest.mark.slow),
        ("mixtral", ["k_proj", "v_proj"], "o_proj"),
        pytest.param(*("stablelm", ["k_proj", "v_proj"], "o_proj"), marks=pytest.mark.slow),
    ],
)
def test_what_others_read_is_seen(name: str, read: list[str], behind: str, tmp_path: Path) -> None:
    block, stream, _ = opened(arch_models.build(name, tmp_path))
    how = mixing(block, *stream.probe(0))
    assert sorted(one.parameter.split(".")[-2] for one in how.read) == read
    assert how.behind is not None and how.behind.parameter.split(".")[-2] == behind


@pytest.mark.parametrize(
    ("name", "read", "behind"),
    [
        (
            "deepseek-v2",
            ["self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"],
            "self_attn.o_proj",
        ),
        # Attention and state space side by side: what they both come to.
        (
            "falcon-h1-tied",
            ["mamba.in_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "feed_forward.up_proj",
        ),
    ],
)
def test_so_it_is_of_other_attention(
    name: str, read: list[str], behind: str, tmp_path: Path
) -> None:
    block, stream, _ = opened(gguf_models.build(name, tmp_path / "model"))
    how = mixing(block, *stream.probe(0))
    assert [one.parameter for one in how.read] == [f"{one}.weight" for one in read]
    assert how.behind is not None and how.behind.parameter == f"{behind}.weight"


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_STREAMED)
def test_all_others_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match=NOT_STREAMED[name]):
        streamed(name, tmp_path / "model").embed(np.full((3, 24), 5))


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMED)
def test_all_models_that_attend_are_guided(name: str, tmp_path: Path) -> None:
    """Of all that can be calibrated; weights have a mean of 1."""
    skeleton = streamed(name, tmp_path / "model")
    tokens = np.random.default_rng(1).integers(3, 90, (3, 24), dtype=np.int64)
    stream, tracer, guided = skeleton.embed(tokens), Tracer(stacked=True), 0
    with Workers(1) as workers:
        passage, guide = Passage.of(stream, workers, None), Guidance(0.5, 0)
        for index in range(skeleton.count):
            block = skeleton.block(index)
            made = guide.weights(block, passage, tracer.sites(block, stream))
            for counts in made.values():
                one = torch.cat([*counts])
                assert len(one) == tokens.size and one.min() >= 0
                assert abs(float(one.mean()) - 1) < 1e-4
            guided += bool(made)
            skeleton.advance(block, stream, workers)
    attends = not name.startswith(("mamba", "falcon-mamba"))
    assert bool(guided) is attends


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_a_state_space_keeps_to_plain_sums(name: str, tmp_path: Path) -> None:
    block, stream, found = opened(gguf_models.build(name, tmp_path / "model"))
    assert mixing(block, *stream.probe(0)) == Mixing()
    assert weights_of(block, stream, found) == {}


def by_hand(block: LoadedBlock, stream: Stream, power: float) -> NDArray[np.float64]:
    """What tokens count for the input of q, k and v, by hooks on modules, in float64."""
    attention: Any = block.module.double().self_attn
    squares = []
    for number, states in enumerate(stream.hidden):
        gave: dict[str, torch.Tensor] = {}
        hooks = []
        for part in "kvo":
            hook = partial(_keep, gave, part)
            hooks.append(getattr(attention, f"{part}_proj").register_forward_hook(hook))
        call = stream.calls[0][number]
        wide = replace(call, kwargs={name: _double(one) for name, one in call.kwargs.items()})
        with torch.enable_grad():
            block.outputs(block.module, states.double(), wide)
        for hook in hooks:
            hook.remove()
        seed = int(np.random.SeedSequence([3, 0, number]).generate_state(1)[0])
        noise = torch.randn(gave["o"].shape, generator=torch.Generator().manual_seed(seed))
        gradients = torch.autograd.grad(gave["o"], [gave["k"], gave["v"]], noise.double())
        tokens = states.shape[0] * states.shape[1]
        squares.append([one.reshape(tokens, -1).square().mean(-1) for one in gradients])
    block.module.float()
    counts = [torch.cat(some) ** power for some in zip(*squares, strict=True)]
    mean: NDArray[np.float64] = sum(one / one.mean() for one in counts).numpy() / 2
    return mean


def _keep(
    gave: dict[str, torch.Tensor], part: str, _: Any, inputs: Any, output: torch.Tensor
) -> torch.Tensor:
    gave[part] = output if part == "o" else output.detach().requires_grad_()
    return gave[part]


def _double(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_double, value))
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floats else value


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_weights_are_those_of_gradients(power: float, tmp_path: Path) -> None:
    """Of micro-batches of two samples, the last of one; nothing else is weighed."""
    block, stream, found = opened(arch_models.build("llama", tmp_path))
    assert len({len(states) for states in stream.hidden}) == 2
    made = weights_of(block, stream, found, power)
    (name,) = made
    site = next(one for one in found.sites if one.id == name)
    assert [one.split(".")[-2] for one in site.names] == ["q_proj", "k_proj", "v_proj"]
    expected = by_hand(block, stream, power)
    assert expected.max() > 1.5 * expected.min()
    np.testing.assert_allclose(made[name], expected, rtol=1e-4)
    np.testing.assert_array_equal(made[name], weights_of(block, stream, found, power, 1)[name])


@pytest.mark.parametrize("samples", [0, 1])
def test_a_block_without_a_gradient_keeps_to_plain_sums(
    samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the probe, or only on more samples than it has."""
    block, stream, found = opened(arch_models.build("llama", tmp_path))
    outputs = LoadedBlock.outputs

    def broken(self: LoadedBlock, module: Any, states: torch.Tensor, call: Any) -> torch.Tensor:
        with torch.set_grad_enabled(len(states) <= samples):
            return outputs(self, module, states, call)

    monkeypatch.setattr(LoadedBlock, "outputs", broken)
    assert bool(mixing(block, *stream.probe(0)).read) is bool(samples)
    assert weights_of(block, stream, found) == {}


def test_a_device_that_fails_is_no_reason_for_plain_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, stream, found = opened(arch_models.build("llama", tmp_path))

    def failing(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(guidance, "_gradients", failing)
    with pytest.raises(UnsupportedError, match=r"illegal memory access.*gptq\.guided=0"):
        weights_of(block, stream, found)


def test_too_little_memory_is_no_reason_for_plain_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, stream, found = opened(arch_models.build("llama", tmp_path))

    def failing(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(guidance, "_gradients", failing)
    with pytest.raises(MemoryError):
        weights_of(block, stream, found)


def test_matrices_that_are_called_otherwise_on_the_text_keep_to_plain_sums(tmp_path: Path) -> None:
    block, stream, found = opened(arch_models.build("llama", tmp_path))
    attention: Any = block.module.self_attn
    for one in (attention.k_proj, attention.v_proj):

        def by_sample(x: torch.Tensor, one: Any = one) -> torch.Tensor:
            return torch.cat([torch.nn.functional.linear(some, one.weight) for some in x.split(1)])

        one.forward = by_sample
    assert mixing(block, *stream.probe(0)).read
    assert weights_of(block, stream, found) == {}


def test_without_a_matrix_behind_gradients_are_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, stream, found = opened(arch_models.build("llama", tmp_path))
    plain = weights_of(block, stream, found)

    def without(*given: Any) -> Mixing:
        return replace(mixing(*given), behind=None)

    monkeypatch.setattr(guidance, "mixing", without)
    other = weights_of(block, stream, found)
    assert other.keys() == plain.keys()
    ((first, second),) = zip(plain.values(), other.values(), strict=True)
    assert not np.array_equal(first, second)
    assert np.corrcoef(first, second)[0, 1] > 0.8


def test_weights_count_in_products_alone(tmp_path: Path) -> None:
    block, stream, found = opened(quantizing.build("llama", tmp_path))
    sizes = [states.shape[0] * states.shape[1] for states in stream.hidden]
    rng = np.random.default_rng(0)
    weights = {
        site.id: torch.from_numpy(rng.exponential(size=sum(sizes)).astype(np.float32)).split(sizes)
        for site in found.sites[1:]
    }
    with Workers(2) as workers:
        needs = {"gram", "square"}
        stats = collect(block, stream, found.sites, needs, workers, weights=weights)
    for site in found.sites:
        x = recorded(block, stream)[site.matrix]
        own = torch.cat([*weights[site.id]]) if site.id in weights else torch.ones(sum(sizes))
        gram = ((x * own.double()[:, None]).T @ x).numpy()
        one = stats[site.id]
        assert one.gram is not None and one.square is not None and one.count == sum(sizes)
        assert np.abs(one.gram - gram).max() <= 1e-6 * np.abs(gram).max()
        np.testing.assert_allclose(one.square, x.square().sum(0).numpy(), rtol=1e-5)
