"""Experts that a model keeps as [in, out] (gpt-oss), or multiplies by all at once (Llama 4)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool.calibrating.sites import Tracer
from qtool.calibrating.stats import collect
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.fused_experts import apart
from qtool.gguf.from_hf.source import hf_source
from qtool.gguf.open import open_source
from qtool.gguf.source import as_floats
from qtool.gradients.measure import measure
from qtool.gradients.sensitivity import Sensitivities
from qtool.messages.progress import Progress
from qtool.messages.summary import OUTPUTS
from qtool.recipe.recipe import load
from qtool.streaming.linears import Matrix, ObserveLinears, WeightIndex
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.workers import Workers
from qtool.texts.calibration import calibration_tokens
from qtool.workspaces.workspace import workspace
from support.fitting.sensitivities_by_hand import likeliest, measured, ways_of
from support.gguf import gguf_models
from support.gguf.gguf_runs import fed_blocks, without_tokenizers, write
from support.models.transposed_experts import transposed
from support.runs import quantizing

__all__ = ["likeliest", "without_tokenizers"]

NAMES = ("gpt-oss", "llama4")
TOKENS = np.random.default_rng(5).integers(3, 90, (6, 40), dtype=np.int64)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: gguf_models.build(name, root / name) for name in NAMES}


def by_hand(
    folder: Path, tokens: np.ndarray[Any, Any] = TOKENS
) -> dict[str, dict[int, np.ndarray[Any, Any]]]:
    """What each expert reads, by the parameter's name, from the model's own code of experts."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    found: dict[str, dict[int, np.ndarray[Any, Any]]] = {}

    def note(name: str, module: Any) -> None:
        def gpt_oss(_: Any, args: Any, kwargs: Any) -> None:
            hidden, chosen = (
                args[0].detach(),
                args[1] if len(args) > 1 else kwargs["router_indices"],
            )
            for expert in range(module.num_experts):
                rows = hidden.reshape(-1, hidden.shape[-1])[(chosen == expert).any(-1)].double()
                gate_up = rows @ module.gate_up_proj[expert].double()
                gate_up += module.gate_up_proj_bias[expert].double()
                inner = module._apply_gate(gate_up)
                keep(expert, rows, inner)

        def llama4(_: Any, args: Any) -> None:
            for expert, every in enumerate(
                args[0].view(module.num_experts, -1, module.hidden_size)
            ):
                rows = every[every.abs().sum(-1) > 0].double()
                gate, up = (rows @ module.gate_up_proj[expert].double()).chunk(2, dim=-1)
                keep(expert, rows, up * torch.nn.functional.silu(gate))

        def keep(expert: int, rows: torch.Tensor, inner: torch.Tensor) -> None:
            found.setdefault(f"{name}.gate_up_proj", {})[expert] = rows.detach().numpy()
            found.setdefault(f"{name}.down_proj", {})[expert] = inner.detach().numpy()

        if "GptOss" in type(module).__name__:
            module.register_forward_pre_hook(gpt_oss, with_kwargs=True)
        else:
            module.register_forward_pre_hook(llama4)

    for name, module in model.named_modules():
        if type(module).__name__.endswith("Experts"):
            note(name, module)
    with torch.no_grad():
        model(input_ids=torch.from_numpy(tokens), use_cache=False)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_each_expert_reads(name: str, models: dict[str, Path]) -> None:
    expected = by_hand(models[name])
    skeleton = Skeleton.open(Checkpoint.open(models[name]))
    tracer, checked = Tracer(stacked=True), 0
    with Workers(2) as workers:
        stream = skeleton.embed(TOKENS, 80)
        for index in range(skeleton.count):
            block = skeleton.block(index)
            sites = [site for site in tracer.sites(block, stream).sites if site.stacked]
            stats = collect(block, stream, sites, {"gram", "square"}, workers)
            for site in sites:
                assert site.expert is not None and site.matrix.transposed
                rows = expected[site.names[0]][site.expert]
                own = stats[site.id]
                assert own.count == len(rows) and own.gram is not None and own.square is not None
                gram = rows.T @ rows
                near = {"rtol": 2e-4, "atol": 2e-5 * float(np.abs(gram).max(initial=0.0))}
                np.testing.assert_allclose(own.gram, gram, **near)
                np.testing.assert_allclose(own.square, gram.diagonal(), **near)
                checked += 1
            skeleton.advance(block, stream, workers)
    assert checked == sum(map(len, expected.values())) > 0


def test_a_product_of_all_experts_is_taken_apart() -> None:
    """As a gradient would have it, too; of rows that are zero nothing is told."""
    module = torch.nn.Module()
    module.register_parameter("w", torch.nn.Parameter(torch.randn(3, 5, 4)))
    module.register_parameter("flat", torch.nn.Parameter(torch.randn(4, 5)))
    weights: Any = module.get_parameter("w").detach()
    x = torch.randn(3, 6, 5)
    x[0, 1:] = 0
    x[2] = 0
    seen: list[tuple[Matrix, int]] = []
    made: list[torch.Tensor] = []
    watch = ObserveLinears(
        WeightIndex(module),
        lambda matrix, rows, _: seen.append((matrix, len(rows))),
        lambda _, output, rows: made.append(output[rows]),
    )
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    with watch:
        found = torch.bmm(one, module.get_parameter("w"))
        torch.bmm(one.mT, torch.randn(3, 6, 2))  # of no parameter
        torch.matmul(x, weights)
        out = torch.empty(3, 6, 4)
        torch.bmm(x, weights, out=out)  # as it was
        torch.matmul(x[:1], weights)
    assert torch.equal(out, torch.bmm(x, weights))
    assert [count for _, count in seen] == [1, 6, 0] * 2
    assert [matrix for matrix, _ in seen[:3]] == [Matrix("w", e, True) for e in range(3)]
    assert [tuple(output.shape) for output in made[:3]] == [(1, 4), (6, 4), (0, 4)]
    expected = torch.bmm(other, weights)
    torch.testing.assert_close(found, expected)
    down = torch.randn(3, 6, 4)
    gradients = (
        torch.autograd.grad(found, one, down)[0],
        torch.autograd.grad(expected, other, down)[0],
    )
    routed = x.any(-1)
    torch.testing.assert_close(gradients[0][routed], gradients[1][routed])
    assert matrix_of(module, weights) == [Matrix("w", e, True) for e in range(3)]
    assert matrix_of(module, weights[:2]) == []


def matrix_of(module: torch.nn.Module, weights: torch.Tensor) -> list[Matrix]:
    return WeightIndex(module).matrices(weights.mT)


def settings(folder: Path) -> list[str]:
    text = quantizing.text_file(folder / "text.txt", 20_000)
    return [f"calibration.source={text}", "calibration.samples=16", "calibration.length=64"]


@pytest.mark.usefixtures("without_tokenizers")
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        pytest.param("gpt-oss", "q4_0", marks=pytest.mark.slow),
        ("gpt-oss", "mxfp4_moe"),
        ("llama4", "q4_0"),
    ],
)
def test_gptq_into_gguf(
    name: str, recipe: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later blocks are fed by the experts that the file has, which lose less than rounded ones."""
    fed = fed_blocks(monkeypatch)
    model = quantizing.add_tokenizer(models[name])
    sets = settings(tmp_path)
    out, plain = tmp_path / "swept.gguf", tmp_path / "plain.gguf"
    made = write(model, out, recipe, "method=gptq", *sets)
    write(model, plain, recipe, "importance=true", *sets)
    outputs = {one.name for one in made.layers if one.of == OUTPUTS}
    files = {
        path: {tensor.name: tensor for tensor in open_source(path).tensors} for path in (out, plain)
    }
    source = {tensor.name: tensor for tensor in hf_source(Checkpoint.open(model)).tensors}
    read = by_hand(model, calibration_tokens(load(recipe, sets).calibration, model).tokens)
    inner = "mlp" if name == "gpt-oss" else "feed_forward"
    for part in ("gate", "up", "down"):
        key = f"blk.1.ffn_{part}_exps.weight"
        assert key in outputs
        swept, rounded, exact = (
            as_floats(t, np.ascontiguousarray(t.read(0, t.rows))).reshape(t.shape)
            for t in (files[out][key], files[plain][key], source[key])
        )
        where = f"model.layers.1.{inner}.experts.{'down' if part == 'down' else 'gate_up'}_proj"
        stored, columns = fed[where], slice(None)
        if part != "down":
            odd, half = int(part == "up"), stored.shape[-1] // 2
            columns = slice(odd, None, 2)
            if name == "llama4":
                columns = slice(odd * half, odd * half + half)
        np.testing.assert_array_equal(stored[..., columns].mT.numpy(), swept)
        lost = [
            sum(np.square(rows @ off[expert].T).sum() for expert, rows in read[where].items())
            for off in (swept - exact, rounded - exact)
        ]
        assert lost[0] < 0.9 * lost[1], part


def gradients_by_hand(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[np.ndarray[Any, Any]]]:
    """Of each expert, by the parameter's name: sums over tokens of the squares of gradients by what
    the matrix gives, of the log-likelihood of the likeliest tokens."""
    kept: list[list[torch.Tensor]] = []  # of gate and up, then of down, for each layer of experts

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        kept[-1].append(x @ weight)
        kept[-1][-1].retain_grad()
        return kept[-1][-1]

    def gpt_oss(self: Any, hidden: Any, router_indices: Any, routing_weights: Any) -> Any:
        total = torch.zeros_like(hidden)
        kept.append([])
        for expert in range(self.num_experts):
            token, place = torch.where(router_indices == expert)
            gate_up = product(hidden[token], self.gate_up_proj[expert])
            inner = self._apply_gate(gate_up + self.gate_up_proj_bias[expert])
            out = product(inner, self.down_proj[expert]) + self.down_proj_bias[expert]
            total = total.index_add(0, token, out * routing_weights[token, place, None])
        return total

    def llama4(self: Any, hidden: Any) -> Any:
        kept.append([])
        found = []
        for expert, every in enumerate(hidden.view(self.num_experts, -1, self.hidden_size)):
            (routed,) = torch.where(every.abs().sum(-1) > 0)
            gate, up = product(every[routed], self.gate_up_proj[expert]).chunk(2, dim=-1)
            out = product(up * self.act_fn(gate), self.down_proj[expert])
            found.append(torch.zeros_like(every).index_add(0, routed, out))
        return torch.cat(found)

    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    monkeypatch.setattr(GptOssExperts, "forward", gpt_oss)
    monkeypatch.setattr(Llama4TextExperts, "forward", llama4)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    told = model(input_ids=torch.from_numpy(TOKENS), use_cache=False).logits.log_softmax(-1)
    told.max(-1).values.sum().backward()
    names = [n for n, m in model.named_modules() if type(m).__name__.endswith("Experts")]
    assert len(names) == len(kept)
    return {
        f"{name}.{kind}_proj": [
            one.grad.double().square().sum(0).numpy()  # type: ignore[union-attr]
            for one in made[first::2]
        ]
        for name, made in zip(names, kept, strict=True)
        for first, kind in enumerate(("gate_up", "down"))
    }


@pytest.mark.usefixtures("likeliest")
@pytest.mark.parametrize("name", NAMES)
def test_what_errors_in_experts_cost(
    name: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantizing.add_tokenizer(models[name])
    sensitivities = measured(model, tmp_path / "out", tokens=TOKENS)
    read = by_hand(model)
    with monkeypatch.context() as patched:
        gradients = gradients_by_hand(model, patched)
    assert gradients.keys() == read.keys()
    for key, experts in gradients.items():
        for expert, rows in enumerate(experts):
            sensitivity, x = sensitivities.matrices[key][expert], read[key][expert]
            assert sensitivity.count == len(x)
            expected = rows / TOKENS.size
            near = {"rtol": 3e-3, "atol": 1e-4 * float(expected.max())}
            np.testing.assert_allclose(sensitivity.rows, expected, **near)
            if len(x):
                np.testing.assert_allclose(sensitivity.columns, np.square(x).mean(0), rtol=1e-3)


@pytest.mark.usefixtures("without_tokenizers")
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_experts_are_theirs(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Gate and up have their own rows of the gradients, in turns or one below the other."""
    (gate,), sensitivities = ways_of(models[name], tmp_path, "blk.1.ffn_gate_exps.weight")
    (key,) = gate.tensor.source.origin
    rows = np.stack(
        [sensitivities.matrices[key][e].rows for e in sorted(sensitivities.matrices[key])]
    )
    expected = rows[:, ::2] if name == "gpt-oss" else rows[:, : rows.shape[1] // 2]
    assert np.array_equal(gate.rows, expected.ravel())
    assert len(set(gate.rows)) > 1


def test_sites_of_experts_apart_are_those_of_the_fused(tmp_path: Path) -> None:
    """Where all are multiplied at once, gate and up have their own rows of what comes out."""
    folder, _ = transposed("llama4", tmp_path / "llama4")
    tokens = np.random.default_rng(3).integers(3, 90, (4, 32), dtype=np.int64)
    whole = Checkpoint.open(folder)
    found = [
        sensitivities_of(one, tmp_path / str(n), tokens)
        for n, one in enumerate((whole, apart(whole)))
    ]
    fused, single = (one.matrices for one in found)
    stacks = [name for name in fused if name.endswith("experts.gate_up_proj")]
    assert len(stacks) == 2
    for stack in stacks:
        for expert, sensitivity in fused[stack].items():
            layer = stack.removesuffix("gate_up_proj")
            names = [f"{layer}{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
            gate, up, down = (single[one][-1] for one in names)
            assert np.array_equal(np.concatenate([gate.rows, up.rows]), sensitivity.rows)
            assert np.array_equal(gate.columns, sensitivity.columns)
            assert np.array_equal(down.rows, fused[f"{layer}down_proj"][expert].rows)


def sensitivities_of(checkpoint: Checkpoint, out: Path, tokens: Any) -> Sensitivities:
    with workspace(out, is_folder=False, nbytes=0, fresh=False) as space:
        skeleton = Skeleton.open(checkpoint)
        found = measure(skeleton, tokens, 0, space, 2, Progress(quiet=True))
        space.artifact.write_bytes(b"")
    return found


def test_experts_that_a_small_input_does_not_reach(tmp_path: Path) -> None:
    """Each matrix has an input of its own, though widths are alike."""
    from transformers import Llama4TextConfig

    torch.manual_seed(0)
    config: Any = Llama4TextConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, intermediate_size_mlp=64,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_local_experts=64, num_experts_per_tok=1, interleave_moe_layer_step=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 3:
                parameter.normal_(0, 0.1)
    model.save_pretrained(tmp_path / "model")
    skeleton = Skeleton.open(Checkpoint.open(tmp_path / "model"))
    stream = skeleton.embed(np.full((2, 32), 7))
    sites = Tracer(stacked=True).sites(skeleton.block(0), stream).sites
    experts = [site for site in sites if site.expert is not None]
    assert len(experts) == 2 * 64 and all(len(site.readers) == 1 for site in experts)
    assert sum(site.calls == 0 for site in experts) > 64
    assert {site.names[0] for site in experts if site.matrix.parameter.endswith("down_proj")} == {
        "model.layers.0.feed_forward.experts.down_proj"
    }
