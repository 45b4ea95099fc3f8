"""Matrices that a checkpoint keeps in one tensor are to every method what they are in several."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import conversion_mapping, core_model_loading
from transformers.core_model_loading import Concatenate, Split

from qtool.blockwise.row_feedback import Feedback
from qtool.calibrating.placed import Passage, placed_block
from qtool.calibrating.sites import Tracer
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cuda.device import Device
from qtool.errors import UnsupportedError
from qtool.generating.ready import ready
from qtool.gradients.measure import _named
from qtool.gradients.sums import Seen, Sums
from qtool.messages.progress import Progress
from qtool.quality.engine_inputs import activations
from qtool.quality.forward import forward
from qtool.quality.weights import open_weights
from qtool.streaming.joined_rows import Joined, RowsOf
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.workers import Workers
from qtool.transforms import learned_rows
from support.cuda.cuda_device import device, emulator
from support.fitting.gradients_of_outputs import measured as ends_of
from support.fitting.sensitivities_by_hand import measured
from support.models.unusual_decoders import SMALL, built
from support.runs import quantizing

__all__ = ["device", "emulator"]

ROWS = {"q": (0, 64), "k": (64, 96), "v": (96, 128)}
QUIET = Progress(quiet=True)


@dataclass(frozen=True)
class Pair:
    """A model, and the same with a tensor for each module."""

    one: Path
    apart: Path
    parts: dict[str, tuple[str, ...]]  # what tensors of the one are called apart, in their order

    def of(self, name: str) -> tuple[str, ...]:
        return self.parts.get(name, (name,))


@pytest.fixture(scope="module")
def sarvam(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Its small mixture of experts."""
    folder = tmp_path_factory.mktemp("sarvam")
    one, apart = quantizing.build("sarvam_moe", folder / "one"), folder / "apart"
    tensors: dict[str, torch.Tensor] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for name, tensor in load_file(one / "model.safetensors").items():
        if "query_key_value" not in name:
            tensors[name] = tensor
            continue
        named = name.replace("attention.query_key_value", "self_attn.{}_proj")
        parts[name] = tuple(named.format(letter) for letter in ROWS)
        for own, (first, last) in zip(parts[name], ROWS.values(), strict=True):
            tensors[own] = tensor[first:last].contiguous()
    apart.mkdir()
    save_file(tensors, apart / "model.safetensors")
    (apart / "config.json").write_bytes((one / "config.json").read_bytes())
    quantizing.add_tokenizer(apart)
    return Pair(one, apart, parts)


JOINED = {
    "self_attn.vkq": ("self_attn.v_proj", "self_attn.k_proj", "self_attn.q_proj"),
    "mlp.up_gate": ("mlp.up_proj", "mlp.gate_proj"),
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Qwen 2, as if its checkpoints had such tensors, with parts in another order than they are
    called in, and words above words added later."""
    real, make = conversion_mapping.get_model_conversion_mapping, core_model_loading.WeightConverter
    converters = [
        *(make(name, [*parts], operations=[Split(0)]) for name, parts in JOINED.items()),
        make(["wte.old", "wte.new"], "embed_tokens.weight", operations=[Concatenate(0)]),
    ]

    def mapping(model: Any, *more: Any, **options: Any) -> Any:
        found = real(model, *more, **options)
        return [*found, *converters] if type(model).__name__ == "Qwen2ForCausalLM" else found

    folder = tmp_path_factory.mktemp("qwen")
    one, apart = folder / "one", folder / "apart"
    model = built("qwen2", apart, **SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
    model.save_pretrained(apart)
    left = load_file(apart / "model.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    named: dict[str, tuple[str, ...]] = {}
    for name in sorted(left):
        for joined, layers in JOINED.items():
            if layers[0] in name:
                whole = name.replace(layers[0], joined)
                named[whole] = tuple(name.replace(layers[0], layer) for layer in layers)
                tensors[whole] = torch.cat([left[own] for own in named[whole]])
    words = left["model.embed_tokens.weight"]
    tensors |= {"model.wte.old": words[:70].clone(), "model.wte.new": words[70:].clone()}
    gone = {own for every in named.values() for own in every} | {"model.embed_tokens.weight"}
    one.mkdir()
    save_file(tensors | {n: t for n, t in left.items() if n not in gone}, one / "model.safetensors")
    (one / "config.json").write_bytes((apart / "config.json").read_bytes())
    for made in (one, apart):
        quantizing.add_tokenizer(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion_mapping, "get_model_conversion_mapping", mapping)
        patch.setattr("qtool.verification.tensors.row_of", lambda *_: None)  # of published names
        yield Pair(one, apart, named)


@pytest.fixture(params=["sarvam", "qwen"])
def pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair = request.getfixturevalue(request.param)
    return found


def test_modules_have_rows_of_a_parameter(sarvam: Pair) -> None:
    """A copy's have rows of its own, wherever it is."""
    skeleton = Skeleton.open(Checkpoint.open(sarvam.one))
    block = skeleton.block(1)
    name = "model.layers.1.attention.query_key_value.weight"
    for own in (block.module, placed_block(block, torch.device("cpu")).module):
        whole = own.get_submodule("self_attn.query_key_value")
        assert isinstance(whole, Joined)
        assert torch.equal(whole.weight, block.weights[name])
        for letter, (first, last) in ROWS.items():
            layer = own.get_submodule(f"self_attn.{letter}_proj")
            assert isinstance(layer, RowsOf) and layer.joined is whole
            assert layer.out_features == last - first
            assert layer.weight.data_ptr() == whole.weight[first:last].data_ptr()
            assert layer.bias is not None and torch.equal(layer.bias, whole.bias[first:last])
    there = placed_block(block, torch.device("meta")).module
    assert there.get_submodule("self_attn.k_proj").weight.is_meta


def test_logits_are_the_same(pair: Pair) -> None:
    tokens = np.random.default_rng(0).integers(3, 90, (3, 24), dtype=np.int64)
    with Workers(2) as workers:
        one, apart = (
            Skeleton.open(Checkpoint.open(folder)).logits(tokens, workers)
            for folder in (pair.one, pair.apart)
        )
    assert torch.equal(one, apart)


# Rows of one tensor compensate for each other by one damping, rows of three by one each.
RECIPES = [
    ("sarvam", "w4g32-gptq"),
    ("sarvam", "w4g128-awq-gptq", "gptq.yaqa=0"),
    ("qwen", "w8a8-smoothquant"),
    ("qwen", "w4a8kv4-qserve"),
    ("qwen", "w4g128-gptq-rotated", "gptq.gptaq=0.5"),
    ("qwen", "mxfp4-awq-gptq", "gptq.yaqa=0"),
    ("qwen", "w4g128-awq-gptq-tune", "gptq.yaqa=0"),
]


@pytest.mark.parametrize(("name", "recipe", "more"), [(n, r, m) for n, r, *m in RECIPES])
def test_codes_are_the_same(
    name: str, recipe: str, more: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Those of all tensors, whatever scales were searched, folded, tuned or measured. (Searches
    look at some rows of each tensor: these have few.)"""
    pair: Pair = request.getfixturevalue(name)
    text = quantizing.text_file(tmp_path / "text.txt")
    sets = ("calibration.samples=8", "calibration.length=32", f"calibration.source={text}")
    runs = [
        quantizing.quantize(
            folder, recipe, tmp_path / folder.name, "indivisible=smaller-group", *sets, *more
        )
        for folder in (pair.one, pair.apart)
    ]
    quantizing.assert_reads_back(runs[0])
    one, apart = ({n: q.dequantize() for n, q in run.quants.items()} | run.weights for run in runs)
    assert {*pair.parts} <= one.keys()
    for tensor, value in one.items():
        expected = np.concatenate([apart[own] for own in pair.of(tensor)])
        assert np.array_equal(value, expected), tensor


def test_what_errors_cost_is_the_same(pair: Pair, tmp_path: Path) -> None:
    one, apart = (measured(folder, tmp_path / folder.name) for folder in (pair.one, pair.apart))
    for name, sensitivities in one.matrices.items():
        (sensitivity,) = sensitivities.values()
        own = [apart.matrices[part][-1] for part in pair.of(name)]
        assert np.array_equal(sensitivity.rows, np.concatenate([part.rows for part in own])), name
        assert all(np.array_equal(sensitivity.columns, part.columns) for part in own)
        assert sensitivity.rows.any() or ".experts." in name
    assert {name for name in pair.parts if "bias" not in name} <= one.matrices.keys()
    assert len(apart.tables) == 1
    (table,) = apart.tables.values()
    every = sum(part.columns for part in one.tables.values())
    np.testing.assert_allclose(every, table.columns, rtol=1e-9)
    assert sum(part.rows.size for part in one.tables.values()) == table.rows.size
    assert sum(part.count for part in one.tables.values()) == table.count


def test_a_part_that_no_gradient_passes_leaves_the_tensor_out(sarvam: Pair) -> None:
    skeleton = Skeleton.open(Checkpoint.open(sarvam.one))
    block, stream = skeleton.block(0), skeleton.embed(np.arange(3, 40)[None])
    sites = Tracer().sites(block, stream)
    seen: Seen = {}
    for linear in sites.linears:
        sums = seen[linear.matrix] = Sums()
        sums.read(torch.ones(2, 64))
        if linear.matrix.rows != ROWS["k"]:
            sums.gave(torch.ones(2, linear.out_features))
    names = {name for name, _, _ in _named(block, sites, seen, 2)}
    name = "model.layers.0.attention.query_key_value.weight"
    assert name not in names and "model.layers.0.attention.dense.weight" in names


def test_rows_of_different_matrices_do_not_compensate_for_each_other(
    pair: Pair, tmp_path: Path
) -> None:
    found = []
    for folder in (pair.one, pair.apart):
        skeleton, tokens, ends = ends_of(folder, tmp_path / folder.name)
        with Workers(2) as workers:
            stream = skeleton.embed(tokens)
            block = skeleton.block(0)
            sites = Tracer().sites(block, stream)
            names = {name for site in sites.sites for name in site.names}
            found.append(Feedback(ends).of(block, Passage.of(stream, workers, None), sites, names))
    one, apart = found
    assert len(apart) == 7
    for name, rows in one.items():
        own = [torch.from_numpy(apart[part]) for part in pair.of(name)]
        expected = torch.block_diag(*own).numpy()
        assert np.array_equal(rows, expected) and expected.any(axis=1).all(), name


def test_energies_are_those_of_all_parts(pair: Pair) -> None:
    """Whatever order they are called in."""
    tokens = np.random.default_rng(0).integers(3, 90, (3, 24), dtype=np.int64)
    found = []
    for folder in (pair.one, pair.apart):
        skeleton = Skeleton.open(Checkpoint.open(folder))
        stream = skeleton.embed(tokens)
        found.append(learned_rows._weights(skeleton.block(0), stream, Tracer()).energies)
    one, apart = found
    for name, energy in one.items():
        assert energy == pytest.approx(sum(apart[part] for part in pair.of(name)), rel=1e-6), name


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "w8a8-dynamic"])
def test_artifacts_are_run_alike(recipe: str, pair: Pair, tmp_path: Path, device: Device) -> None:
    """By blocks, with inputs rounded; and token by token, with packed words on a device."""
    ids = np.random.default_rng(0).integers(3, 90, (1, 12), dtype=np.int64)
    blocks, steps, there = [], [], []
    for folder in (pair.one, pair.apart):
        out = tmp_path / folder.name
        quantizing.quantize(folder, recipe, out, "indivisible=smaller-group")
        with open_weights(out) as weights:
            run = forward(
                Skeleton.open(weights), activations(weights, "plain"), ids, 1, QUIET, keep=False
            )
            with run.logits() as head, torch.no_grad():
                blocks.append(head(run.hidden)[0, -1])
            for where, results in ((None, steps), (device, there)):
                model = ready(Skeleton.open(weights), weights, where, QUIET)
                with torch.no_grad(), model.matmuls:
                    results.append(model.step(torch.from_numpy(ids), None)[0][0].cpu())
    assert torch.equal(*blocks)
    torch.testing.assert_close(*steps, rtol=0, atol=1e-5)
    torch.testing.assert_close(*there, rtol=0, atol=1e-5)
    torch.testing.assert_close(steps[0], blocks[0], rtol=0, atol=1e-4)
    assert float(blocks[0].std()) > 0.1


def test_layers_of_which_a_bias_alone_is_a_part_are_left(qwen: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = load_file(qwen.one / "model.safetensors")
    for name in [name for name in tensors if name.endswith("vkq.weight")]:
        whole = tensors.pop(name)
        for part, own in zip(qwen.of(name), whole.split([32, 32, 64]), strict=True):
            tensors[part] = own.contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((qwen.one / "config.json").read_bytes())
    with pytest.raises(UnsupportedError, match=r"vkq\.bias' through the conversion Split"):
        Skeleton.open(Checkpoint.open(folder))


def test_parts_that_read_different_inputs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No one Hessian is that of both."""
    folder = quantizing.build("mixtral", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for block in range(2):
        prefix = f"model.layers.{block}.self_attn"
        both = [tensors.pop(f"{prefix}.{letter}_proj.weight") for letter in "qo"]
        tensors[f"{prefix}.both.weight"] = torch.cat(both)
    save_file(tensors, folder / "model.safetensors")
    converter = core_model_loading.WeightConverter(
        ".both.weight", [".q_proj.weight", ".o_proj.weight"],
        operations=[Split(0)],
    )  # fmt: skip
    real = conversion_mapping.get_model_conversion_mapping
    monkeypatch.setattr(
        conversion_mapping, "get_model_conversion_mapping", lambda one: [*real(one), converter]
    )
    skeleton = Skeleton.open(Checkpoint.open(folder))
    block, stream = skeleton.block(0), skeleton.embed(np.arange(3, 40)[None])
    with pytest.raises(UnsupportedError, match=r"self_attn\.both\.weight: it is several matrices"):
        Tracer().sites(block, stream)
