"""Experts that transformers has in one tensor: what it loads, and who says so before."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from qtool.api import convert
from qtool.cards import serve
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cli.main import app
from qtool.errors import SourceError
from qtool.recipe.recipe import load
from qtool.streaming.meta_model import meta_model
from qtool.verification.run import verify_artifact
from support.gguf import gguf_from_hf, gguf_models
from support.models.unusual_decoders import SMALL, built
from support.runs import quantizing
from support.verification.verifying import errors_of


def sparse(name: str, folder: Path) -> Path:
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_experts": 4,
            "moe_intermediate_size": 32, "head_dim": 16}  # fmt: skip
    built(name, folder, **{**SMALL, **more})
    return quantizing.add_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "recipe", "check"),
    [
        ("granitemoe", "w8a16-ct", "takes the experts of a block in one tensor alone"),
        ("granitemoe", "w4g32-gptq", "codes of gptq have no place"),
        ("qwen3_moe", "w8a16-ct", None),
        ("qwen3_moe", "fp8-block-hf", None),
        ("qwen3_moe", "w4g32-gptq", "codes of gptq have no place"),
        ("qwen3_moe", "w4g64-rtn", "codes of awq have no place"),
        ("mixtral", "int8-llmint8", "codes of bitsandbytes have no place"),
    ],
)
def test_experts_that_transformers_does_not_load(
    name: str, recipe: str, check: str | None, tmp_path: Path
) -> None:
    """Which of these it does was seen in transformers 5.23 with each of the packages."""
    source, out = sparse(name, tmp_path / "source"), tmp_path / "out"
    sets = ["method=rtn"] if "gptq" in recipe else []
    sets += ["weights.group_size=32"] if recipe == "w4g64-rtn" else []
    sets += ["calibration.samples=2"] if load(recipe).calibrates else []
    quantizing.quantize(source, recipe, out, *sets)
    errors = errors_of(out)
    assert [f.check for f in errors] == ([] if check is None else ["engine-experts"])
    assert check is None or check in errors[0].message


def test_a_plan_says_it_before_any_work(tmp_path: Path) -> None:
    source = sparse("granitemoe", tmp_path / "source")
    command = ["plan", str(source), "--recipe", "w8a16-ct", "--engine"]
    said = CliRunner().invoke(app, [*command, "transformers", "--json"])
    (error,) = [f for f in json.loads(said.stdout)["findings"] if f["severity"] == "error"]
    assert error["check"] == "engine-experts" and said.exit_code == 1
    assert CliRunner().invoke(app, [*command, "vllm"]).exit_code == 0


def test_a_plan_from_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_from_hf.no_vocabulary(monkeypatch)
    folder = gguf_models.build("granite-moe", tmp_path / "source")
    gguf_from_hf.write(folder, tmp_path / "model.gguf", "f16").close()
    command = ["plan", str(tmp_path / "model.gguf"), "--recipe", "w8a16-ct", "--engine"]
    said = CliRunner().invoke(app, [*command, "transformers", "--json"])
    found = json.loads(said.stdout)["findings"]
    assert [f["check"] for f in found if f["severity"] == "error"] == ["engine-experts"]


def test_experts_one_by_one_in_a_checkpoint(tmp_path: Path) -> None:
    """As `convert --to hf` wrote them once, of a class that takes them all in one."""
    source = sparse("granitemoe", tmp_path / "source")
    assert verify_artifact(source, engine="transformers").ok
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if "_linear." in name]:
        layer, _, kind = name.partition("block_sparse_moe.")
        for number, matrix in enumerate(tensors.pop(name)):
            parts = {"gate_proj": matrix[:96], "up_proj": matrix[96:]}
            if kind == "output_linear.weight":
                parts = {"down_proj": matrix}
            for part, values in parts.items():
                name = f"{layer}block_sparse_moe.experts.{number}.{part}.weight"
                tensors[name] = values.contiguous()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (error,) = errors_of(source)
    assert error.check == "engine-experts" and "one by one" in error.message
    assert verify_artifact(source).ok  # it is whole: vLLM loads it


def test_more_experts_than_any_model_has(tmp_path: Path) -> None:
    source = sparse("granitemoe", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_local_experts": 10**12}))
    with pytest.raises(SourceError, match="num_local_experts is 1000000000000"):
        meta_model(Checkpoint.open(source))


def test_what_a_model_card_says_of_experts(tmp_path: Path) -> None:
    source = sparse("granitemoe", tmp_path / "source")
    for recipe, words in (
        (
            "w8a16-ct",
            "and accelerate, only where its class takes experts one by one",
        ),
        ("w4g64-rtn", "Not with transformers: transformers 5 has the experts"),
    ):
        quantizing.quantize(source, recipe, tmp_path / recipe, "weights.group_size=32")
        assert words in (tmp_path / recipe / "README.md").read_text()


def test_convert_says_where_no_class_can_be_asked(tmp_path: Path) -> None:
    source, out = sparse("granitemoe", tmp_path / "source"), tmp_path / "out"
    quantizing.quantize(source, "w8a16-ct", out)
    made = convert(out, to="hf", out=tmp_path / "plain")
    record = json.loads((tmp_path / "plain" / "qtool.json").read_text())["conversions"][-1]
    assert record["experts_by"].startswith("transformers 5") and not made.warnings
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"hidden_act": "zzz"}))
    made = convert(out, to="hf", out=tmp_path / "apart")
    assert [w.startswith("experts are written one by one") for w in made.warnings] == [True]
    record = json.loads((tmp_path / "apart" / "qtool.json").read_text())["conversions"][-1]
    assert "experts_by" not in record


def test_what_is_next_is_what_loads(tmp_path: Path) -> None:
    """vLLM takes no such blocks of FP8, and transformers no such experts."""
    for name, engine in (("granitemoe", None), ("qwen3_moe", "transformers")):
        source, out = sparse(name, tmp_path / name), tmp_path / f"{name}-fp8"
        quantizing.quantize(source, "fp8-block-hf", out)
        assert serve.loads(out) == engine
