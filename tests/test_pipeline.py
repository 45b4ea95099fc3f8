"""Whole runs: what is on disk is what was in memory, on every architecture and recipe."""

import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arch_models
import numpy as np
import pytest
import quantizing
import torch
from quantizing import Call, Run
from safetensors.numpy import load_file, save_file

from qtool.artifact import Artifact
from qtool.calibrating import blockwise
from qtool.calibrating.skeleton import Skeleton
from qtool.calibrating.stats import SiteStats
from qtool.calibrating.workers import Workers
from qtool.checkpoint import Checkpoint
from qtool.errors import FormatError
from qtool.plan.plan import make_plan
from qtool.recipe import recipe as recipes
from qtool.scheme import Dense, GroupQuant

TINY = Path(quantizing.pipeline.__file__).parent / "tiny"
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


@dataclass(frozen=True)
class Models:
    """Checkpoints by architecture, built when first asked for, and one calibration text."""

    root: Path
    text: Path

    def __call__(self, name: str, dtype: str = "float32") -> Path:
        folder = self.root / dtype / name
        if not folder.exists():
            quantizing.add_tokenizer(arch_models.build(name, folder, dtype=dtype))
        return folder

    def settings(self, group: int = 32, samples: int = 6) -> list[str]:
        """A small calibration, and groups that small matrices divide into."""
        return [
            f"weights.group_size={group}",
            f"calibration.source={self.text}",
            f"calibration.samples={samples}",
            "calibration.length=64",
        ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    return Models(root, quantizing.text_file(root / "text.txt"))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    return quantizing.caller(monkeypatch, capfd)


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


@pytest.mark.parametrize(
    ("recipe", "group", "dtype"),
    [
        ("w4g128-awq", 32, "bfloat16"),
        ("w4g128-gptq", 16, "float32"),
        ("w4g128-awq-gptq", 32, "float32"),
    ],
)
@pytest.mark.parametrize("name", arch_models.ARCHITECTURES)
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


INDEXER = "model.layers.0.self_attn.indexer.weight"


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


def errors(run: Run) -> np.ndarray[Any, Any]:
    return np.array([layer.relative_error for layer in run.summary.layers])


def test_errors_are_ordered_as_they_should_be(models: Models, tmp_path: Path) -> None:
    """On the inputs' own metric GPTQ loses less than rounding does, and 8 bits less than 4.

    Random weights have no outlier channels, so AWQ's scales give GPTQ nothing to gain here.
    """
    settings = [*models.settings(32, 16), "weights.symmetric=false"]
    runs = {
        recipe: quantizing.quantize(models("llama"), recipe, tmp_path / recipe, *settings)
        for recipe in ("w4g128-gptq", "w4g128-awq", "w4g128-awq-gptq", "w4g128-rtn")
    }
    runs["w8"] = quantizing.quantize(
        models("llama"), "w4g128-gptq", tmp_path / "w8", *settings, "weights.bits=8"
    )
    typical = {name: float(np.median(errors(run))) for name, run in runs.items()}
    assert all(np.isfinite(errors(run)).all() and (errors(run) > 0).all() for run in runs.values())
    assert typical["w4g128-gptq"] < 0.8 * typical["w4g128-rtn"]
    assert typical["w4g128-awq"] < typical["w4g128-rtn"]
    assert typical["w4g128-awq-gptq"] < 0.8 * typical["w4g128-rtn"]
    assert typical["w8"] < 0.1 * typical["w4g128-gptq"]


def test_rare_experts_are_rounded_to_nearest_and_counted(models: Models, tmp_path: Path) -> None:
    """Exactly those that fewer than 64 tokens reached."""
    settings = models.settings(32, 4)
    run = quantizing.quantize(models("qwen3_moe"), "w4g128-gptq", tmp_path / "a", *settings)
    plain = quantizing.quantize(
        models("qwen3_moe"), "w4g128-rtn", tmp_path / "b", *settings,
        "weights.symmetric=true", "format=gptq",
    )  # fmt: skip
    rare = {
        f"{report.name}.{expert}."
        for report in run.summary.experts
        for expert, tokens in enumerate(report.tokens)
        if tokens < 64
    }
    total = sum(len(report.tokens) for report in run.summary.experts)
    assert 0 < len(rare) < total == 16
    (note,) = [note for note in run.summary.notes if "expert" in note]
    assert f"{len(rare)} saw fewer than 64 and are rounded to nearest" in note
    for name, quant in run.quants.items():
        same = np.array_equal(quant.codes, plain.quants[name].codes)
        assert same == any(name.startswith(expert) for expert in rare), name


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen3_moe"])
def test_sites_measured_apart_give_the_same(
    name: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Gram matrices are large a block's inputs are measured in turns, the last ones first."""
    settings = models.settings(16, 4)
    together = quantizing.quantize(models(name), "w4g128-gptq", tmp_path / "a", *settings)
    sizes: list[int] = []
    collect = blockwise.collect

    def counted(block: Any, stream: Any, sites: Any, *rest: Any) -> Any:
        sizes.append(len(sites))
        return collect(block, stream, sites, *rest)

    monkeypatch.setattr(blockwise, "collect", counted)
    groups = blockwise._groups
    few = 64 * 64 * 9
    monkeypatch.setattr(blockwise, "_groups", lambda sites, recipe, _: groups(sites, recipe, few))
    apart = quantizing.quantize(models(name), "w4g128-gptq", tmp_path / "b", *settings)
    assert 1 in sizes and 2 in sizes and max(sizes) < 20
    assert together.quants.keys() == apart.quants.keys()
    for key, quant in together.quants.items():
        assert np.array_equal(quant.codes, apart.quants[key].codes), key
        assert np.array_equal(quant.scale, apart.quants[key].scale), key
    assert together.summary.experts == apart.summary.experts
    assert together.summary.notes == apart.summary.notes
    assert together.summary.layers == apart.summary.layers


def test_statistics_are_freed_as_they_are_used(models: Models, tmp_path: Path) -> None:
    alive: list[weakref.ref[Any]] = []
    left: list[int] = []
    collect, give = blockwise.collect, quantizing.Sink.quantized

    def watched(*given: Any) -> Any:
        found = collect(*given)
        alive[:] = [weakref.ref(stats.gram) for stats in found.values()]
        return found

    def count(sink: Any, planned: Any, quant: GroupQuant, *rest: Any) -> None:
        left.append(sum(ref() is not None for ref in alive))
        give(sink, planned, quant, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "collect", watched)
        patch.setattr(quantizing.Sink, "quantized", count)
        quantizing.quantize(
            models("llama"), "w4g128-gptq", tmp_path / "out", *models.settings(), threads=1
        )
    # The costliest first: down; gate and up; q, k and v; o.
    assert left == [4, 3, 3, 2, 2, 2, 1] * 3


def test_an_input_without_statistics_is_said(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = blockwise.collect

    def without(block: Any, *rest: Any) -> Any:
        return {
            name: SiteStats(0) if "o_proj" in name else stats
            for name, stats in collect(block, *rest).items()
        }

    monkeypatch.setattr(blockwise, "collect", without)
    run = quantizing.quantize(models("llama"), "w4g128-gptq", tmp_path / "out", *models.settings())
    assert run.summary.notes == [
        "the input of self_attn.o_proj.weight was never seen; rounded to nearest (3 times)"
    ]


def test_a_damaged_write_is_found(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading back stops a run whose disk did not keep what was written."""
    write = quantizing.Sink.close

    def close(sink: Any, *rest: Any) -> None:
        write(sink, *rest)
        with (sink.folder / "model.safetensors").open("r+b") as file:
            file.seek(-5, 2)
            byte = file.read(1)
            file.seek(-5, 2)
            file.write(bytes([byte[0] ^ 1]))

    monkeypatch.setattr(quantizing.Sink, "close", close)
    with pytest.raises(FormatError, match="other bytes than were written"):
        quantizing.quantize(models("llama"), "w4g128-rtn", tmp_path / "out", *models.settings())
    assert not list(tmp_path.iterdir())


tiny_is_there = pytest.mark.skipif(
    not (TINY / "model.safetensors").is_file(),
    reason="qtool/tiny/model.safetensors is not in this checkout; qtool/tiny/train.py makes it",
)
SPREAD = ("w4g128-awq", "w3g128-awq-gptq", "w4g32-gptq", "w8-rtn", "w2g64-gptq")


@tiny_is_there
@pytest.mark.parametrize(
    "recipe",
    [
        name if name in SPREAD else pytest.param(name, marks=pytest.mark.slow)
        for name in recipes.shipped()
        if recipes.load(name).format != "gguf"
    ],
)
def test_recipes_read_back_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    sets = ["calibration.samples=8", "calibration.length=64"]
    run = quantizing.quantize(TINY, recipe, tmp_path / "out", *sets, name="tiny")
    quantizing.assert_reads_back(run)
    assert len(run.quants) == 28
    artifact = Artifact.open(run.out)
    assert artifact.entries.keys() == Checkpoint.open(TINY).tensors.keys()
    for name, value in run.weights.items():
        found = artifact.read(name)
        # A norm that took a scale was rounded to bfloat16 first, and the scale made to fit that.
        dense = found.dequantize() if isinstance(found, GroupQuant) else found
        assert np.array_equal(dense, value), name


@tiny_is_there
def test_gptq_beats_rounding_on_a_trained_model(tmp_path: Path) -> None:
    sets = ["calibration.samples=8", "calibration.length=128", "weights.bits=3"]
    better = quantizing.quantize(TINY, "w4g128-gptq", tmp_path / "a", *sets)
    plain = quantizing.quantize(TINY, "w8-rtn", tmp_path / "b", "weights.bits=3",
                                "weights.group_size=128", "format=gptq",
                                "weights.symmetric=true")  # fmt: skip
    assert np.median(errors(better)) < 0.8 * np.median(errors(plain))


def test_plan_and_run_agree(models: Models, tmp_path: Path, call: Call) -> None:
    """Size, counts and schemes that `plan` promises are those of the artifact."""
    arguments = (models("mixtral"), "--recipe", "w4g128-rtn", "--set", "weights.group_size=32")
    planned = json.loads(call("plan", *arguments, "--json").out)
    made = json.loads(call("quantize", *arguments, "--json", "-o", tmp_path / "out").out)
    assert planned["size_bytes"] == made["size_bytes"]
    assert planned["bits_per_weight"] == made["bits_per_weight"]
    schemes = {t["name"]: t["scheme"] for t in planned["tensors"] if t["scheme"]}
    assert schemes == {layer["name"]: layer["scheme"] for layer in made["layers"]}
