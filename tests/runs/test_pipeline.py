"""Whole runs: what is on disk is what was in memory, on every architecture and recipe."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

import qtool
from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.planning.plan import make_plan
from qtool.recipe import recipe as recipes
from qtool.scheme import Dense
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.workers import Workers
from qtool.verification.run import verify_artifact
from support.models import arch_models
from support.models.pipeline_models import Models, models
from support.runs import quantizing
from support.runs.quantizing import Call, Run

__all__ = ["models"]

KEYS = {"artifact", "format", "recipe", "seconds", "peak_rss_bytes", "size_bytes",
        "bits_per_weight", "tensors", "layers"}  # fmt: skip


SECONDS = {"download", "calibrate", "transform", "quantize", "pack", "export", "verify", "total"}


EXTRA = {
    # A block that the model class does not run, and a head that it does not know.
    "model.layers.3.self_attn.q_proj.weight": (32, 64),
    "model.layers.3.eh_proj.weight": (64, 128),
    "medusa_head.0.linear.weight": (64, 64),
}


Make = Callable[..., Run]


def recorded_logits(skeleton: Skeleton, weights: dict[str, Any], tokens: Any) -> torch.Tensor:
    """Logits of the source model with the blocks' weights as they were in memory."""
    with Workers(1) as workers:
        stream = skeleton.embed(tokens)
        for index in range(skeleton.count):
            block = skeleton.block(index)
            for name, view in block.weights.items():
                view.copy_(torch.from_numpy(weights[name]))
            skeleton.advance(block, stream, workers)
        return torch.cat([skeleton.head(hidden) for hidden in stream.hidden])


AWQ, GPTQ = ("w4g128-awq", 32, "bfloat16"), ("w4g128-gptq", 16, "float32")
BOTH = ("w4g128-awq-gptq", 32, "float32")


@pytest.mark.parametrize(
    ("name", "recipe", "group", "dtype"),
    [
        pytest.param(name, *one, marks=[] if (at + number) % 2 == 0 else pytest.mark.slow)
        for at, name in enumerate(arch_models.ARCHITECTURES)
        for number, one in enumerate((AWQ, GPTQ))
    ]
    # Norms of 1 + weight, fused matrices, experts, and none of these.
    + [(name, *BOTH) for name in ("llama", "qwen3_moe")]
    + [pytest.param(name, *BOTH, marks=pytest.mark.slow) for name in ("gemma3", "phi3")],
)
def test_artifact_is_the_model_in_memory(
    name: str, recipe: str, group: int, dtype: str, models: Models, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    source = models(name, dtype)
    run = quantizing.quantize(source, recipe, tmp_path / "out", *models.settings(group))
    quantizing.assert_reads_back(run)
    found = dict(Artifact.open(run.out).dequantized())
    assert found.keys() == Checkpoint.open(source).tensors.keys()
    assert run.quants.keys() < run.weights.keys() < found.keys()
    for key, value in run.weights.items():
        assert np.array_equal(value, found[key]), key
    # At least one matrix of every block was changed, or equality would prove nothing.
    original = Checkpoint.open(source)
    assert all(not np.array_equal(found[key], original.float32(key)) for key in run.quants)

    dense = quantizing.write_dense(run.out, tmp_path / "dense")
    tokens = np.random.default_rng(1).integers(3, arch_models.VOCABULARY, (2, 40), dtype=np.int64)
    with Workers(1) as workers:
        stored = Skeleton.open(Checkpoint.open(dense)).logits(tokens, workers)
    memory = recorded_logits(Skeleton.open(Checkpoint.open(source)), run.weights, tokens)
    assert torch.equal(stored, memory)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(input_ids=torch.from_numpy(tokens)).logits
    assert float((theirs - stored).abs().max()) <= 1e-5 * float(theirs.abs().max())


def test_folds_change_no_logits(models: Models, tmp_path: Path) -> None:
    """AWQ's transform alone, nothing rounded: another checkpoint, the same function."""
    source = models("llama")
    recipe = tmp_path / "folds.yaml"
    recipe.write_text("method: none\nformat: dense\ntransforms: [awq]\n")
    sets = ["weights={bits: 4, group_size: 32, symmetric: false}", *models.settings()]
    sets += ["awq.grid=20"]  # of these there is a scale for every input
    run = quantizing.quantize(source, str(recipe), tmp_path / "out", *sets)
    assert run.summary.tensors == {"quantized": 0, "dense": 30, "dropped": 0}
    assert "quantization_config" not in json.loads((run.out / "config.json").read_text())
    original, changed = (Checkpoint.open(path) for path in (source, run.out))
    name = "model.layers.1.mlp.down_proj.weight"
    assert not np.array_equal(original.float32(name), changed.float32(name))
    tokens = np.random.default_rng(1).integers(3, arch_models.VOCABULARY, (2, 40), dtype=np.int64)
    with Workers(1) as workers:
        before, after = (Skeleton.open(c).logits(tokens, workers) for c in (original, changed))
    assert float((before - after).abs().max()) <= 1e-4 * float(before.abs().max())


@pytest.fixture(scope="module")
def odd(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a block beyond the last one and a head that no model class knows."""
    folder = quantizing.build("llama", tmp_path_factory.mktemp("odd"))
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(3)
    for name, shape in EXTRA.items():
        tensors[name] = rng.standard_normal(shape).astype(np.float16)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("recipe", ["w4g128-awq", "w4g128-gptq", "w4g128-rtn"])
def test_every_source_tensor_is_accounted_for(
    recipe: str, odd: Path, models: Models, tmp_path: Path
) -> None:
    run = quantizing.quantize(odd, recipe, tmp_path / "out", *models.settings())
    source, artifact = Checkpoint.open(odd), Artifact.open(run.out)
    assert artifact.entries.keys() == source.tensors.keys()
    counts = run.summary.tensors
    assert sum(counts.values()) == len(source.tensors)
    assert counts == {
        "quantized": 21,
        "dense": len(source.tensors) - 21,
        "dropped": 0,
    }
    for name in EXTRA:
        assert artifact.entries[name].dtype == "F16"
        assert np.array_equal(artifact.checkpoint.raw(name), source.raw(name)), name


INDEXER = "model.layers.0.self_attn.chooser.weight"


@pytest.fixture(scope="module")
def indexed(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a matrix inside a block that its class has no place for."""
    folder = quantizing.build("llama", tmp_path_factory.mktemp("indexed"))
    tensors = load_file(folder / "model.safetensors")
    tensors[INDEXER] = np.random.default_rng(4).standard_normal((32, 64)).astype(np.float16)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_plan_copies_what_the_class_does_not_know(indexed: Path) -> None:
    recipe = recipes.load("w4g128-gptq", ["weights.group_size=32"])
    checkpoint = Checkpoint.open(indexed)
    unknown = Skeleton.open(checkpoint).unknown
    assert unknown == (INDEXER,)
    planned = make_plan(recipe, checkpoint, unknown=unknown).by_name
    assert planned[INDEXER].action == Dense("unknown to the model class")
    assert [spec.name for spec in planned[INDEXER].outputs] == [INDEXER]
    # Headers alone do not show it.
    assert make_plan(recipe, checkpoint).by_name[INDEXER].scheme is not None


@pytest.mark.parametrize("recipe", ["w4g128-awq", "w4g128-gptq"])
def test_what_the_class_does_not_know_is_copied(
    recipe: str, indexed: Path, models: Models, tmp_path: Path
) -> None:
    run = quantizing.quantize(indexed, recipe, tmp_path / "out", *models.settings())
    assert run.summary.tensors == {"quantized": 21, "dense": 10, "dropped": 0}
    source, artifact = Checkpoint.open(indexed), Artifact.open(run.out)
    assert np.array_equal(artifact.checkpoint.raw(INDEXER), source.raw(INDEXER))


def test_tied_head_stays_tied(models: Models, tmp_path: Path) -> None:
    run = quantizing.quantize(models("qwen3"), "w4g128-awq", tmp_path / "out", *models.settings())
    assert "lm_head.weight" not in Artifact.open(run.out).entries
    assert json.loads((run.out / "config.json").read_text())["tie_word_embeddings"] is True


def test_copy_of_a_tied_head_is_dropped(models: Models, tmp_path: Path) -> None:
    source = models("qwen3")
    folder = tmp_path / "copy"
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    run = quantizing.quantize(folder, "w4g128-gptq", tmp_path / "out", *models.settings())
    assert run.summary.tensors["dropped"] == 1
    assert [item["name"] for item in run.summary.dropped] == ["lm_head.weight"]
    assert "lm_head.weight" not in Artifact.open(run.out).entries
    plain = quantizing.quantize(source, "w4g128-gptq", tmp_path / "plain", *models.settings())
    weights = [quantizing.files(r.out)["model.safetensors"] for r in (run, plain)]
    assert weights[0] == weights[1]


def test_a_head_unlike_the_embedding_is_untied(models: Models, tmp_path: Path) -> None:
    """transformers takes the head that is stored, vLLM and SGLang the embedding, unless told."""
    source, folder = models("qwen3"), tmp_path / "other"
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    run = quantizing.quantize(folder, "w8-rtn", tmp_path / "out")
    assert any("says tie_word_embeddings false" in said for said in run.summary.warnings)
    assert json.loads((run.out / "config.json").read_text())["tie_word_embeddings"] is False
    artifact = Artifact.open(run.out)
    assert np.array_equal(artifact.checkpoint.raw("lm_head.weight"),
                          Checkpoint.open(folder).raw("lm_head.weight"))  # fmt: skip
    verdict = verify_artifact(run.out, against=folder, engine="vllm")
    assert [one for one in verdict.findings if one.severity == "error"] == []


@pytest.mark.parametrize("recipe", ["w4g128-awq", "w4g128-rtn"])
def test_sharded_output_reads_back(recipe: str, models: Models, tmp_path: Path) -> None:
    settings = models.settings()
    run = quantizing.quantize(
        models("llama"), recipe, tmp_path / "out", *settings, max_shard_bytes=40_000
    )
    index = json.loads((run.out / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in run.out.glob("*.safetensors"))
    assert len(shards) >= 3 and set(index["weight_map"].values()) == set(shards)
    assert not (run.out / "model.safetensors").exists()
    quantizing.assert_reads_back(run)
    whole = quantizing.quantize(models("llama"), recipe, tmp_path / "whole", *settings)
    pieces, one = (dict(Artifact.open(r.out).dequantized()) for r in (run, whole))
    assert pieces.keys() == one.keys()
    assert all(np.array_equal(pieces[name], one[name]) for name in one)


def test_shards_from_the_command_line(models: Models, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "out"
    said = call("quantize", models("llama"), "--recipe", "w4g128-rtn", "--set",
                "weights.group_size=32", "--max-shard-size", "40KB", "-o", out)  # fmt: skip
    assert said.status == 0
    assert all(path.stat().st_size < 50_000 for path in out.glob("*.safetensors"))
    assert len(list(out.glob("*.safetensors"))) >= 3
    assert Artifact.open(out).entries.keys() == Checkpoint.open(models("llama")).tensors.keys()


def test_json_has_the_keys_of_the_contract(models: Models, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "out"
    said = call("quantize", models("llama"), "--recipe", "w4g128-gptq", "--json", "-o", out,
                "--calibration", models.text, "--samples", 4, "--length", 64, "--seed", 1,
                "--threads", 1, "--set", "weights.group_size=32")  # fmt: skip
    assert said.status == 0 and said.err == ""
    found = json.loads(said.out)
    assert found.keys() == KEYS | {"warnings", "notes", "experts", "unquantized_share", "dropped",
                                    "memory", "outliers"}  # fmt: skip
    assert found["seconds"].keys() == SECONDS
    assert found["seconds"]["total"] >= max(found["seconds"].values())
    assert found["tensors"] == {"quantized": 21, "dense": 9, "dropped": 0}
    assert len(found["layers"]) == 21
    keys = {"name", "scheme", "relative_error", "of", "coarseness"}
    assert all(layer.keys() == keys for layer in found["layers"])
    assert (found["artifact"], found["format"], found["recipe"]) == (
        str(out), "gptq", "w4g128-gptq",
    )  # fmt: skip
    assert found["size_bytes"] == (out / "model.safetensors").stat().st_size
    assert found["peak_rss_bytes"] > 50_000_000 and 4 < found["bits_per_weight"] < 33
    record = json.loads((out / "qtool.json").read_text())
    assert record["calibration"]["samples"] == 4 and record["calibration"]["seed"] == 1
    assert record["calibration"]["error_aware"] is True


def test_what_a_person_sees(models: Models, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "out"
    said = call("quantize", models("llama"), "--recipe", "w4g128-awq", "-o", out,
                "--calibration", models.text, "--samples", 4, "--length", 64,
                "--set", "weights.group_size=32")  # fmt: skip
    assert said.status == 0
    for stage in ("download", "calibrate", "smooth/rotate", "quantize", "pack", "export"):
        assert f"{stage}  " in said.err, stage
    assert said.out.startswith(f"{out}: awq, ") and "21 quantized, 9 dense, 0 dropped" in said.out
    assert {path.name for path in out.iterdir()} >= {
        "README.md", "config.json", "model.safetensors", "qtool.json", "tokenizer.json",
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == [out]


def test_default_name_is_model_and_recipe(
    models: Models, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = call("quantize", models("qwen3"), "--recipe", "w8-rtn")
    assert said.status == 0 and (tmp_path / "qwen3-w8-rtn" / "model.safetensors").is_file()


def test_set_changes_what_is_made(models: Models, tmp_path: Path) -> None:
    run = quantizing.quantize(
        models("llama"), "w4g128-gptq", tmp_path / "out", *models.settings(),
        "weights.symmetric=false", "gptq.static_groups=false",
        "overrides=[{match: '*.down_proj', weights: {bits: 8}}, {match: '*.0.*', dense: true}]",
    )  # fmt: skip
    quantizing.assert_reads_back(run)
    schemes = {name: str(quant.scheme) for name, quant in run.quants.items()}
    assert len(schemes) == 14 and not any(".layers.0." in name for name in schemes)
    assert schemes["model.layers.1.mlp.down_proj.weight"] == "w8 g32 asym"
    assert schemes["model.layers.1.mlp.up_proj.weight"] == "w4 g32 asym"
    # act_order without static groups: columns of a group are no neighbours.
    quant = run.quants["model.layers.2.self_attn.q_proj.weight"]
    assert not np.array_equal(quant.group_index(), np.arange(64) // 32)
    assert json.loads((run.out / "qtool.json").read_text())["recipe"]["gptq"]["static_groups"] is (
        False
    )


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_method_none_is_the_source(name: str, models: Models, tmp_path: Path) -> None:
    recipe = tmp_path / "none.yaml"
    recipe.write_text("method: none\nformat: dense\n")
    run = quantizing.quantize(models(name), str(recipe), tmp_path / "out")
    source, copy = Checkpoint.open(models(name)), Checkpoint.open(run.out)
    assert copy.tensors.keys() == source.tensors.keys() and not run.quants
    for key in source.tensors:
        assert source.tensors[key].dtype == copy.tensors[key].dtype
        assert np.array_equal(source.raw(key), copy.raw(key)), key
    assert json.loads((run.out / "config.json").read_text()) == source.config


def test_plan_and_run_agree(models: Models, tmp_path: Path, call: Call) -> None:
    """Size, counts and schemes that `plan` promises are those of the artifact."""
    arguments = (models("mixtral"), "--recipe", "w4g128-rtn", "--set", "weights.group_size=32")
    planned = json.loads(call("plan", *arguments, "--json").out)
    made = json.loads(call("quantize", *arguments, "--json", "-o", tmp_path / "out").out)
    assert planned["size_bytes"] == made["size_bytes"]
    assert planned["bits_per_weight"] == made["bits_per_weight"]
    schemes = {t["name"]: t["scheme"] for t in planned["tensors"] if t["scheme"]}
    assert schemes == {layer["name"]: layer["scheme"] for layer in made["layers"]}


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "w4g128-awq", "w4-gptq-rotated", "q4_k_m"])
def test_float64_is_made_what_float32_is(recipe: str, tmp_path: Path) -> None:
    """No engine computes in it: what of it stays unquantized is written as F32, and that is said.
    llama.cpp's converter reads it as F32, too."""
    wide = quantizing.first_blocks_of_tiny(tmp_path / "wide", 1)
    config = json.loads((wide / "config.json").read_text())
    weights = wide / "model.safetensors"
    whole = load_torch(weights)
    made: list[Path] = []
    for dtype, name in ((torch.float32, "float32"), (torch.float64, "float64")):
        save_torch({n: t.to(dtype) for n, t in whole.items()}, weights, {"format": "pt"})
        (wide / "config.json").write_text(json.dumps({**config, "dtype": name}))
        out = tmp_path / f"{name}{'.gguf' if recipe == 'q4_k_m' else ''}"
        found = qtool.quantize(
            wide, recipe, out, samples=4, length=32, changes=["calibration.seed=1"]
        )
        made.append(out)
        notes = [note for note in (*found.warnings, *found.notes) if "F64" in note]
        assert bool(notes) == (name == "float64"), found.warnings
    if recipe == "q4_k_m":
        assert "11 tensors are F64 and are read as F32, as convert_hf_to_gguf.py does" in notes[0]
        one, other = map(qtool.open, made)
        assert [*one.tensors] == [*other.tensors]
        for key in one.tensors:
            np.testing.assert_array_equal(one.float32(key), other.float32(key))
        return
    first, second = (load_file(one / "model.safetensors") for one in made)
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert tensor.dtype == second[key].dtype != np.float64
        np.testing.assert_array_equal(tensor, second[key])
    assert (made[0] / "config.json").read_bytes() == (made[1] / "config.json").read_bytes()
    assert verify_artifact(made[1], against=wide).ok
