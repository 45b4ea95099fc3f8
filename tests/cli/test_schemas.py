"""Every command with --json, beside the schema that the package has of it.

Each schema allows no key that it does not name, so that one which is renamed or added fails here.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator, ValidationError
from typer.main import get_command
from typer.testing import CliRunner

from qtool import schemas
from qtool.cli.main import app
from qtool.converting.targets import TARGETS
from qtool.gguf.importance.imatrix import write_importance
from qtool.hub import tiny_folder
from qtool.recipe.recipe import Recipe
from qtool.verification.engines.rules import ENGINES
from support.gguf import gguf_files

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on in the sun. " * 30


def run(*arguments: object, status: int = 0) -> dict[str, Any]:
    """What a command prints, which is one JSON object that every reader of JSON understands."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    result = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == status, result.output
    found = json.loads(result.stdout, parse_constant=refuse)
    assert isinstance(found, dict)
    return found


def schema(name: str) -> dict[str, Any]:
    found = json.loads(schemas.text(name))
    assert isinstance(found, dict)
    return found


def check(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Valid; and not with one key more, or without one that is asked for."""
    validator = Draft202012Validator(schema(name))
    validator.validate(found)
    with pytest.raises(ValidationError):
        validator.validate({})
    if name != "recipes":
        with pytest.raises(ValidationError):
            validator.validate(found | {"a key of tomorrow": 1})
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and tiny in two formats, made with what the commands say of it."""
    folder = tmp_path_factory.mktemp("schemas")
    (folder / "text.txt").write_text(TEXT)
    rtn = run("quantize", "tiny", "--recipe", "w4g128-rtn", "-o", folder / "awq")
    gguf = run("quantize", "tiny", "--recipe", "q4_k_m", "-o", folder / "q4.gguf")
    (folder / "said.json").write_text(json.dumps({"awq": rtn, "gguf": gguf}))
    return folder


def test_generate() -> None:
    check("generate", run("generate", "tiny", "--tokens", "2"))


def test_sample(tmp_path: Path) -> None:
    out = str(tmp_path / "own.jsonl")
    check("sample", run("sample", "tiny", "-o", out, "--samples", "1", "--length", "8"))


def test_every_command_has_a_schema() -> None:
    command = get_command(app)
    commands: dict[str, Any] = command.commands  # type: ignore[attr-defined]
    with_json = {
        name for name, one in commands.items() if any("--json" in p.opts for p in one.params)
    }
    assert {"quantize", "plan", "inspect", "diff", "eval", "bench"} <= with_json
    assert set(schemas.names()) == with_json | {"inspect-tensor"}


def objects(node: Any) -> Iterator[dict[str, Any]]:
    """Every subschema of objects."""
    if isinstance(node, dict):
        if node.get("type") == "object":
            yield node
        for value in node.values():
            yield from objects(value)
    elif isinstance(node, list):
        for value in node:
            yield from objects(value)


@pytest.mark.parametrize("name", schemas.names())
def test_schemas_are_schemas(name: str) -> None:
    found = schema(name)
    Draft202012Validator.check_schema(found)
    command = name.replace("inspect-tensor", "inspect --tensor")
    assert found["title"] == f"qtool {command} --json" and found["description"]
    named = [one for one in objects(found) if "properties" in one]
    assert named
    for one in named:
        closed = one.get("additionalProperties") is False
        # A recipe's own keys are in the schema of recipe files.
        assert closed or (name == "recipes" and "recipe files" in one["description"])
        assert set(one.get("required", ())) <= set(one["properties"])


def test_printing_them() -> None:
    listed = CliRunner().invoke(app, ["schema"])
    assert listed.exit_code == 0 and listed.stdout.split() == schemas.names()
    printed = CliRunner().invoke(app, ["schema", "diff"])
    assert json.loads(printed.stdout) == schema("diff")
    wrong = CliRunner().invoke(app, ["schema", "../schemas/diff"])
    assert "no schema of that name; there are bench, calibrate" in str(wrong.exception)


def test_they_have_all_formats_and_engines() -> None:
    recipes = set(get_args(Recipe.model_fields["format"].annotation)) | {"gguf"}
    assert set(schema("quantize")["properties"]["format"]["enum"]) == recipes
    targets = {target.format for target in TARGETS.values()}
    assert set(schema("convert")["properties"]["format"]["enum"]) == targets
    assert set(schema("verify")["properties"]["engine"]["enum"]) == {*ENGINES, None}


def test_quantize(root: Path) -> None:
    said = json.loads((root / "said.json").read_text())
    assert check("quantize", said["awq"])["layers"]
    assert check("quantize", said["gguf"])["format"] == "gguf"


def test_plan() -> None:
    check("plan", run("plan", "tiny", "--recipe", "w4g128-awq"))
    check("plan", run("plan", "tiny", "--recipe", "q4_k_m"))
    asked = ("--engine", "vllm", "--tp", 4)
    found = check("plan", run("plan", "tiny", "--recipe", "w4g128-awq", *asked, status=1))
    assert found["findings"] and found["tp"] == 4
    check("plan", run("plan", "tiny", "--recipe", "q4_k_m", "--engine", "llama.cpp"))


def test_inspect(root: Path) -> None:
    for path in (tiny_folder(), root / "awq"):
        assert check("inspect", run("inspect", path))["format"] != "gguf"
    assert check("inspect", run("inspect", root / "q4.gguf"))["tokenizer"]["special"]


def test_inspect_of_other_gguf_files(tmp_path: Path) -> None:
    model = gguf_files.model(tmp_path / "m.gguf", layers=1)
    check("inspect", run("inspect", model))
    write_importance(tmp_path / "im.gguf", gguf_files.importance(model))
    assert check("inspect", run("inspect", tmp_path / "im.gguf"))["entries"]
    assert len(check("inspect", run("inspect", tmp_path))["models"]) == 2


def test_inspect_tensor(root: Path) -> None:
    matrix, norm = "model.layers.0.mlp.up_proj", "model.norm.weight"
    for path, name in ((root / "awq", matrix), (root / "awq", norm), ("tiny", matrix)):
        check("inspect-tensor", run("inspect", path, "--tensor", name))
    for name in ("blk.0.ffn_up.weight", "output_norm.weight"):
        check("inspect-tensor", run("inspect", root / "q4.gguf", "--tensor", name))


def test_calibrate(root: Path, tmp_path: Path) -> None:
    asked = ("tiny", "--calibration", root / "text.txt", "--samples", 1, "--length", 16)
    both = ("-o", tmp_path / "s.safetensors", "--imatrix", tmp_path / "im.gguf")
    assert check("calibrate", run("calibrate", *asked, *both))["imatrix"]["entries"]
    check("calibrate", run("calibrate", *asked, "-o", tmp_path / "t.safetensors"))


def test_recipes() -> None:
    assert check("recipes", run("recipes"))["recipes"]
    for name in ("w4g128-awq-gptq", "q4_k_m"):
        assert check("recipes", run("recipes", name))["name"] == name


def test_eval_and_compare(root: Path) -> None:
    asked = ("--text", root / "text.txt", "--windows", 2, "--length", 16, "--no-cache")
    check("eval", run("eval", root / "awq", *asked))
    against = ("--against", "tiny", "--fail-if", "perplexity>1")
    found = check("eval", run("eval", root / "q4.gguf", *asked, *against, status=1))
    assert found["failed"] and found["kld"]["mean"] > 0
    with pytest.raises(ValidationError, match="acceptance"):
        Draft202012Validator(schema("eval")).validate(
            {key: value for key, value in found.items() if key != "acceptance"}
        )
    both = (root / "awq", root / "q4.gguf", "--against", "tiny")
    assert len(check("compare", run("compare", *both, *asked))["artifacts"]) == 2


def test_convert(root: Path, tmp_path: Path) -> None:
    check("convert", run("convert", root / "awq", "--to", "gptq-v2", "-o", tmp_path / "v2"))
    check("convert", run("convert", root / "q4.gguf", "--to", "hf", "-o", tmp_path / "hf"))


def test_diff(root: Path) -> None:
    assert check("diff", run("diff", "tiny", root / "awq"))["metadata"]
    assert check("diff", run("diff", root / "awq", root / "q4.gguf"))["different"]
    assert not check("diff", run("diff", root / "awq", root / "awq"))["different"]


def test_verify(root: Path) -> None:
    assert check("verify", run("verify", root / "awq", "--against", "tiny"))["layers"]
    check("verify", run("verify", root / "q4.gguf"))


def test_report(root: Path) -> None:
    check("report", run("report", root / "awq", root / "q4.gguf"))


def test_bench() -> None:
    found = check("bench", run("bench", "--quick", "--kernels", "q8_0"))
    assert found["results"]
