"""Experts that a checkpoint keeps in 3-D tensors, quantized as those kept one by one.

The oracle is the same model with its experts apart: what comes of both must be the same bytes.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints import fused_experts
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.fused_experts import apart, apart_as
from qtool.diff.diff import diff
from qtool.errors import SourceError
from qtool.messages.progress import Progress
from qtool.messages.summary import OUTPUTS, WEIGHTS
from qtool.planning.experts import as_quantized
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import load
from qtool.streaming.skeleton import Skeleton
from qtool.verification.run import verify_artifact
from support.gguf import gguf_models
from support.models import arch_models, header_files
from support.models.transposed_experts import transposed
from support.runs import quantizing

GROUPS = "weights.group_size=32"
LAYER = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One model with its experts apart, as Qwen3-MoE has them, and fused."""
    root = tmp_path_factory.mktemp("experts")
    one = quantizing.add_tokenizer(gguf_models.build("qwen3-moe", root / "apart"))
    return one, gguf_models.fuse_experts(one, root / "fused")


def headers(folder: Path, **shapes: tuple[int, ...]) -> Checkpoint:
    """A block with experts of the given shapes, in tensors by the last part of their names."""
    block = {"model.layers.0.self_attn.q_proj.weight": (64, 64)}
    experts = {f"{LAYER}.{name}": shape for name, shape in shapes.items()}
    header_files.write(folder, {**block, **experts}, {})
    return Checkpoint.open(folder)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_matrix_is_read_from_where_it_lies(
    transposed: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_experts, "_BAND_BYTES", 100)  # of a few stored rows
    draw = torch.Generator().manual_seed(0)
    gate_up = torch.randn(3, 10, 4, generator=draw).to(dtype)
    down = torch.randn(3, 4, 5, generator=draw).to(dtype)
    both = {f"{LAYER}.gate_up_proj": gate_up, f"{LAYER}.down_proj": down}
    state = {n: (t.mT if transposed else t).contiguous() for n, t in both.items()}
    save_file(state, tmp_path / "model.safetensors")
    found = apart(Checkpoint.open(tmp_path))
    expected = {
        f"{LAYER}.{expert}.{part}.weight": matrix
        for expert in range(3)
        for part, matrix in (
            ("gate_proj", gate_up[expert, :5]),
            ("up_proj", gate_up[expert, 5:]),
            ("down_proj", down[expert]),
        )
    }
    assert set(found.tensors) == set(expected)
    for name, matrix in expected.items():
        assert found.tensors[name].shape == tuple(matrix.shape)
        assert np.array_equal(found.float32(name), matrix.float().numpy())
        stored = matrix.contiguous().view(torch.uint8).numpy().reshape(-1)
        assert np.array_equal(found.raw(name), stored)
        row = stored.size // len(matrix)
        assert np.array_equal(found.part(name, 1, 3), stored[row : 3 * row])
        for start, stop in ((0, 0), (0, 1), (row - 1, row + 3), (5, stored.size)):
            assert np.array_equal(found.stretch(name, start, stop), stored[start:stop])
    nbytes = gate_up.nbytes + down.nbytes
    assert sum(info.nbytes for info in found.tensors.values()) == nbytes


@pytest.mark.parametrize(
    "shapes",
    [
        # Gate and up interleaved, as in gpt-oss.
        {"gate_up_proj": (4, 128, 64), "down_proj": (4, 64, 64), "gate_up_proj_bias": (4, 128)},
        {"gate_up_proj": (4, 128, 64)},
        {"gate_up_proj": (4, 128, 64), "down_proj": (3, 64, 64)},
        {"gate_up_proj": (4, 128, 64), "down_proj": (64, 64)},
        {"gate_up_proj": (4, 128, 64), "down_proj": (4, 64, 48)},
        {"gate_up_proj": (4, 128, 64), "down_proj": (4, 128, 64)},
    ],
)
def test_what_is_kept_in_another_way_stays(shapes: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = headers(tmp_path, **shapes)
    assert apart(checkpoint) is checkpoint


def test_layers_are_taken_apart_by_name(pair: tuple[Path, Path]) -> None:
    one, fused = map(Checkpoint.open, pair)
    assert apart(fused).tensors.keys() == one.tensors.keys()
    first = apart_as(fused, [f"{LAYER}.7.up_proj.qweight", "model.layers.1.mlp.gate.weight"])
    assert f"{LAYER}.0.gate_proj.weight" in first.tensors
    assert "model.layers.1.mlp.experts.gate_up_proj" in first.tensors
    assert apart_as(fused, fused.tensors) is fused
    assert apart(fused).digest() == fused.digest()


@pytest.mark.parametrize("recipe", ["w4g64-rtn", "w4g64-gptq", "w4g64-awq"])
def test_artifacts_are_the_same(recipe: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    quantizing.text_file(tmp_path / "text.txt")
    text = f"calibration.source={tmp_path / 'text.txt'}"
    sets = [GROUPS, text, "calibration.samples=4", "calibration.length=64"]
    sets += ["awq.grid=4"] if "awq" in recipe else []
    states = []
    for source in pair:
        run = quantizing.quantize(source, recipe, tmp_path / source.name, *sets)
        assert sum(".experts." in name for name in run.quants) == 2 * 8 * 3
        states.append(load_file(run.out / "model.safetensors"))
        verdict = verify_artifact(run.out, against=source)
        assert verdict.ok and len(verdict.layers) == len(run.quants)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_layers_that_stay_dense_stay_fused(pair: tuple[Path, Path]) -> None:
    fused = Checkpoint.open(pair[1])
    sets = (GROUPS, "overrides=[{match: '*.layers.1.mlp.experts.*', dense: true}]")
    found = as_quantized(load("w4g64-rtn", sets), fused)
    assert f"{LAYER}.0.gate_proj.weight" in found.tensors
    assert "model.layers.1.mlp.experts.down_proj" in found.tensors
    assert as_quantized(load("kv-fp8"), fused) is fused
    plan = make_plan(load("w4g64-rtn", sets), found)
    assert sum(".experts." in tensor.name for tensor in plan.quantized) == 8 * 3


def test_a_config_names_those_that_stay_fused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    entry = "overrides=[{match: '*.layers.1.mlp.experts.*', dense: true}]"
    run = quantizing.quantize(pair[1], "w8a16-ct", tmp_path / "out", entry)
    config = Artifact.open(run.out).checkpoint.config["quantization_config"]
    assert "model.layers.1.mlp.experts" in config["ignore"]
    assert verify_artifact(run.out, against=pair[1], engine="vllm").ok


def test_the_source_is_compared_expert_by_expert(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = quantizing.quantize(pair[1], "w4g64-rtn", tmp_path / "out", GROUPS).out
    changed = Path(shutil.copytree(pair[1], tmp_path / "changed"))
    state = load_file(changed / "model.safetensors")
    state[f"{LAYER}.down_proj"][3] = state[f"{LAYER}.down_proj"][4].clone()
    save_file(state, changed / "model.safetensors", {"format": "pt"})
    told = {f.name for f in verify_artifact(out, against=changed).findings if f.severity == "error"}
    assert told == {f"{LAYER}.3.down_proj.weight"}
    found = diff(pair[0], changed, Progress(quiet=True))
    assert [tensor.name for tensor in found.tensors] == [f"{LAYER}.3.down_proj.weight"]


def gemma4(folder: Path) -> Path:
    """Its class has fused experts only, as its checkpoints have."""
    from transformers import AutoModelForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        vocab_size=arch_models.VOCABULARY, hidden_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, num_experts=4,
        top_k_experts=2, moe_intermediate_size=32, enable_moe_block=True,
        hidden_size_per_layer_input=0, global_head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return quantizing.add_tokenizer(folder)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gemma4(tmp_path_factory.mktemp("gemma4") / "model")


def test_a_class_that_knows_fused_experts_only_runs_them_apart(gemma: Path) -> None:
    fused = Checkpoint.open(gemma)
    view = apart(fused)
    assert len(view.tensors) == len(fused.tensors) + 2 * (3 * 4 - 2)
    one, other = Skeleton.open(fused).block(1), Skeleton.open(view).block(1)
    for (name, a), (_, b) in zip(
        one.module.named_parameters(), other.module.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
    weight = other.weights["model.layers.1.experts.2.up_proj.weight"]
    assert torch.equal(weight, one.weights["model.layers.1.experts.gate_up_proj"][2, 32:])
    weight.zero_()  # a view: what is written there is what the block computes with
    assert not other.module.get_parameter("experts.gate_up_proj")[2, 32:].any()


def test_a_class_that_knows_fused_experts_only_is_calibrated(gemma: Path, tmp_path: Path) -> None:
    quantizing.text_file(tmp_path / "text.txt")
    text = f"calibration.source={tmp_path / 'text.txt'}"
    sets = (GROUPS, text, "calibration.samples=4", "calibration.length=64")
    run = quantizing.quantize(gemma, "w4g64-gptq", tmp_path / "out", *sets)
    assert sum(".experts." in name for name in run.quants) == 2 * 4 * 3
    (report,) = [note for note in run.summary.notes if note.startswith("tokens per expert")]
    assert "over 8 experts" in report
    # What the blocks went on with is what the artifact holds.
    name = "model.layers.1.experts.3.gate_proj.weight"
    assert np.array_equal(run.weights[name], run.quants[name].dequantize())
    entries = Artifact.open(run.out).entries
    assert entries[name].scheme is not None and entries[name].shape == (32, 64)
    assert verify_artifact(run.out, against=gemma).ok


def test_experts_that_are_missing_or_of_another_size(gemma: Path) -> None:
    view = apart(Checkpoint.open(gemma))
    name = "model.layers.1.experts.2.up_proj.weight"
    lost = {n: info for n, info in view.tensors.items() if n != name}
    with pytest.raises(SourceError, match=f"no tensor '{name}', which is a part of"):
        Skeleton.open(replace(view, tensors=lost))
    name = "model.layers.0.experts.0.down_proj.weight"
    wrong = {n: view.tensors["model.layers.0.mlp.up_proj.weight"] if n == name else i
             for n, i in view.tensors.items()}  # fmt: skip
    with pytest.raises(SourceError, match=f"'{name}': shape"):
        Skeleton.open(replace(view, tensors=wrong))


@pytest.mark.parametrize("name", ["granite-moe", "granite-moe-hybrid"])
def test_granites_experts(name: str, tmp_path: Path) -> None:
    """Its checkpoints have names of their own for them; engines ask for the usual ones."""
    if name == "granite-moe":
        folder = gguf_models.build(name, tmp_path / name, dtype="float32")
        experts, inner = 6, 96
    else:
        folder, experts, inner = granite_hybrid(tmp_path / name), 4, 32
    quantizing.add_tokenizer(folder)
    fused = Checkpoint.open(folder)
    layer = "model.layers.1.block_sparse_moe"
    stored = load_file(folder / "model.safetensors")
    view = apart(fused)
    halves = stored[f"{layer}.input_linear.weight"][2].chunk(2)
    for kind, expected in zip(("gate_proj", "up_proj"), halves, strict=True):
        found = view.float32(f"{layer}.experts.2.{kind}.weight")
        assert found.shape == (inner, 64) and np.array_equal(found, expected.numpy())
    assert np.array_equal(
        view.float32(f"{layer}.experts.2.down_proj.weight"),
        stored[f"{layer}.output_linear.weight"][2].numpy(),
    )
    one, other = Skeleton.open(fused).block(1), Skeleton.open(view).block(1)
    for (key, a), (_, b) in zip(
        one.module.named_parameters(), other.module.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), key
    quantizing.text_file(tmp_path / "text.txt")
    sets = ("weights.group_size=16", f"calibration.source={tmp_path / 'text.txt'}",
            "calibration.samples=8", "calibration.length=64", "indivisible=dense")  # fmt: skip
    for recipe in ("w4g64-rtn", "w4g64-gptq"):
        run = quantizing.quantize(folder, recipe, tmp_path / recipe, *sets)
        count = len({n.split(".")[2] for n in stored if n.startswith("model.layers.")})
        assert sum(".experts." in key for key in run.quants) == count * experts * 3
        report = verify_artifact(run.out, against=folder)
        assert report.ok and not report.findings, report.findings


def granite_hybrid(folder: Path) -> Path:
    from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

    config = GraniteMoeHybridConfig(
        vocab_size=arch_models.VOCABULARY, hidden_size=64, intermediate_size=32,
        shared_intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["mamba", "attention"], mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1,
        mamba_d_state=16, mamba_expand=2, mamba_chunk_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["llama4", "qwen3_vl_moe"])
def test_transposed_experts(name: str, tmp_path: Path) -> None:
    """Read as transformers reads them, fused and apart; and quantized, calibrated or not."""
    folder, model = transposed(name, tmp_path / name)
    (kept,) = {i.shape for n, i in Checkpoint.open(folder).tensors.items() if "gate_up" in n}
    assert kept == (4, 64, 96)
    for checkpoint in (Checkpoint.open(folder), apart(Checkpoint.open(folder))):
        skeleton = Skeleton.open(checkpoint)
        block = skeleton.block(1).module
        for key, parameter in block.named_parameters():
            expected = model.get_parameter(f"{skeleton.prefix}1.{key}")
            assert torch.equal(parameter, expected), key
    quantizing.text_file(tmp_path / "text.txt")
    text = f"calibration.source={tmp_path / 'text.txt'}"
    sets = ("weights.group_size=16", text, "calibration.samples=24", "calibration.length=64")
    for recipe in ("w4g64-rtn", "w4g64-gptq"):
        run = quantizing.quantize(folder, recipe, tmp_path / recipe, *sets)
        assert sum(".experts." in key for key in run.quants) == 2 * 4 * 3
        assert verify_artifact(run.out, against=folder).ok
        swept = [one for one in run.summary.layers if ".experts." in one.name]
        assert len(swept) == 2 * 4 * 3
        assert {one.of for one in swept} == {OUTPUTS if recipe == "w4g64-gptq" else WEIGHTS}
        assert not any("no linear layer was seen" in note for note in run.summary.notes)
        for key, quant in run.quants.items():
            if ".experts." in key and recipe == "w4g64-rtn":
                source = apart(Checkpoint.open(folder)).float32(key)
                far = np.linalg.norm(quant.dequantize() - source) / np.linalg.norm(source)
                assert far < 0.15, key


def test_diff_reads_experts_that_lie_transposed(tmp_path: Path) -> None:
    """Qwen3-VL-MoE's: its matrices are columns of what is stored."""
    source = quantizing.add_tokenizer(gguf_models.build("qwen3-vl-moe", tmp_path / "source"))
    made = quantizing.quantize(source, "w8-rtn", tmp_path / "out", "weights.group_size=16")
    found = diff(source, made.out, Progress(quiet=True))
    experts = [one.numbers for one in found.tensors if ".experts." in one.name]
    assert experts and all(one is not None and one.relative < 0.01 for one in experts)


FUSED_TENSORS = {"gate_up_proj": (4, 128, 64), "down_proj": (4, 64, 64)}
GRANITE = {"input_linear.weight": (4, 128, 64), "output_linear.weight": (4, 64, 64)}
EACH = ["*.experts.*.gate_proj", "*.up_proj", "*.experts.*.down_proj"]


@pytest.mark.parametrize(
    ("layer", "names", "patterns", "reason"),
    [
        ("mlp.experts", FUSED_TENSORS, ["*.experts.*"], "override '*.experts.*'"),
        ("mlp.experts", FUSED_TENSORS, ["*.experts.*_proj.weight"], "'*.experts.*_proj.weight'"),
        ("mlp.experts", FUSED_TENSORS, EACH, "override '*.experts.*.down_proj'"),
        ("block_sparse_moe", GRANITE, ["*.experts.*"], "override '*.experts.*'"),
        ("block_sparse_moe", GRANITE, EACH, "override '*.experts.*.down_proj'"),
    ],
)
def test_an_override_leaves_them_fused(
    layer: str, names: header_files.Shapes, patterns: list[str], reason: str, tmp_path: Path
) -> None:
    """It means them by the names of their matrices, and the plan says that it was the override."""
    block = {f"model.layers.0.{layer}.{name}": shape for name, shape in names.items()}
    header_files.write(tmp_path, {"model.layers.0.self_attn.q_proj.weight": (64, 64), **block}, {})
    entries = ", ".join(f'{{match: "{pattern}", dense: true}}' for pattern in patterns)
    recipe = load("w4g64-rtn", ["format=compressed-tensors", f"overrides=[{entries}]"])
    plan = make_plan(recipe, as_quantized(recipe, Checkpoint.open(tmp_path)))
    assert [tensor.name for tensor in plan.tensors if tensor.fused] == list(block)
    told = [str(plan.by_name[name].reason) for name in block]
    assert reason in told[-1] and all(one.startswith("override '*.") for one in told)
    assert not [one for one in plan.warnings if "matches no" in one]
    (said,) = [one for one in plan.warnings if "of fused experts stay dense" in one]
    assert said.startswith("2 tensors")


def test_why_they_stay_fused_without_an_override(tmp_path: Path) -> None:
    recipe = load("w4g64-rtn", ["weights.group_size=48", "indivisible=dense"])
    shapes = {"model.layers.0.self_attn.q_proj.weight": (96, 96)}
    shapes |= {f"{LAYER}.{name}": shape for name, shape in FUSED_TENSORS.items()}
    header_files.write(tmp_path, shapes, {})
    plan = make_plan(recipe, as_quantized(recipe, Checkpoint.open(tmp_path)))
    told = {plan.by_name[f"{LAYER}.{name}"].reason for name in FUSED_TENSORS}
    assert told == {"experts fused in one tensor, of which the recipe quantizes none"}
