"""What `qtool convert` refuses, repairs when told how to read it, and says."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from qtool import schemas
from qtool.cli import main
from qtool.converting.targets import TARGETS, target
from qtool.errors import QtoolError, UnsupportedError, UsageError
from qtool.hub import resolve
from support.converting.converting import MATRICES, TENSORS, converted, numbers, run, weights
from support.converting.rounded_artifacts import edit, made, relabel

__all__ = ["made"]


def test_what_is_damaged_or_missing_is_not_passed_on(made: dict[str, Path], tmp_path: Path) -> None:
    """What is made has digests of its own, by which nobody would find it."""

    def refused(said: str) -> None:
        with pytest.raises(QtoolError, match=said):
            run(source, "gptq", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    source = tmp_path / "source"
    shutil.copytree(made["symmetric"], source)
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
    refused(r"model.safetensors is not the file that was written")
    (source / "model.safetensors").write_bytes(whole)
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(
        config.replace('"num_hidden_layers": 1', '"num_hidden_layers": 3')
    )
    refused(r"says 3 blocks, and 2 blocks \(model.layers.1, model.layers.2\) are not there")
    (source / "config.json").unlink()
    refused("has no config.json, which says what model its matrices are of")


def test_what_is_not_finite_is_not_passed_on(made: dict[str, Path], tmp_path: Path) -> None:
    source = relabel(made["eight"], tmp_path / "source", "gptq")

    def damage(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.mlp.up_proj.scales"][0, 0] = float("inf")

    edit(source, damage)
    with pytest.raises(QtoolError, match=r"up_proj.weight: holds numbers that are not finite"):
        run(source, "hf", tmp_path / "out")


@pytest.mark.parametrize(
    ("case", "to", "said"),
    [
        ("asymmetric", "gptq", r"cannot hold every asymmetric zero.*6 more.*--to gptq-v2"),
        ("eight", "awq", r"awq holds 4 bits only.*6 more"),
        ("three", "awq-gemv", r"awq holds 4 bits only"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    made: dict[str, Path], case: str, to: str, said: str, tmp_path: Path
) -> None:
    for lossy in (False, True):
        with pytest.raises(UnsupportedError, match=said):
            run(made[case], to, tmp_path / "out", lossy=lossy)
    assert list(tmp_path.iterdir()) == []


def test_a_mislabelled_artifact_is_repaired(made: dict[str, Path], tmp_path: Path) -> None:
    """As the user says that zeros are to be read, whatever the label."""
    right = run(made["asymmetric"], "gptq-v2", tmp_path / "right")
    wrong = relabel(right, tmp_path / "wrong", "gptq")
    plain = numbers(run(wrong, "awq", tmp_path / "plain", assume="v1"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert not np.array_equal(plain[name], numbers(right)[name])
    repaired = run(wrong, "gptq-v2", tmp_path / "repaired", assume="v2")
    assert weights(repaired) == weights(right)
    (said,) = json.loads((repaired / "qtool.json").read_text())["conversions"][-1:]
    assert said["assumed"] == "v2"


def test_assume_is_about_gptq(made: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="about GPTQ's zeros"):
        run(made["asymmetric"], "gptq-v2", tmp_path / "out", assume="v2")


def test_what_is_not_quantized_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="is not quantized"):
        run(resolve("tiny"), "awq", tmp_path / "out")


def test_targets() -> None:
    assert target("AWQ_GEMV").name == "awq-gemv" and target("ct").format == "compressed-tensors"
    assert {found.name for found in TARGETS.values()} == set(TARGETS)
    with pytest.raises(UsageError, match=r"expected awq, .*gguf"):
        target("exl2")
    with pytest.raises(UsageError, match=r"did you mean gptq\?$"):
        target("gptqq")


def keys_of(schema: dict[str, object]) -> set[str]:
    properties, required = schema["properties"], schema["required"]
    assert isinstance(properties, dict) and isinstance(required, list)
    assert schema["additionalProperties"] is False and set(required) == set(properties)
    return set(properties)


def test_json_is_what_the_schema_says(made: dict[str, Path], tmp_path: Path) -> None:
    text = (Path(schemas.__path__[0]) / "convert.json").read_text()
    schema = json.loads(text)
    exact = converted(made["asymmetric"], "gptq-v2", tmp_path / "exact").json()
    rounded = converted(made["asymmetric"], "hf", tmp_path / "rounded").json()
    for said in (exact, rounded):
        assert said.keys() == keys_of(schema)
        assert said["source"].keys() == keys_of(schema["properties"]["source"])
    assert len(rounded["rounded"]) == MATRICES and not rounded["exact"] and exact["exact"]
    for one in rounded["rounded"]:
        assert one.keys() == keys_of(schema["properties"]["rounded"]["items"])
    assert rounded["dequantized"] == {"w4 g128 asym": MATRICES}


COMMANDS = {
    "no such file": ("{nowhere}", "--to", "awq", "-o", "{out}"),
    "expected awq, awq-gemv": ("{asymmetric}", "--to", "exl2", "-o", "{out}"),
    "makes a folder, not a GGUF file; choose": ("{eight}", "--to", "mlx", "-o", "{out}.gguf"),
    "is what this command reads": ("{eight}", "--to", "gptq-v2", "-o", "{eight}"),
    "expected v1 or v2": ("{eight}", "--to", "gptq", "--assume", "v3", "-o", "{out}"),
    "expected float16, bfloat16": ("{eight}", "--to", "hf", "--dtype", "int8", "-o", "{out}"),
    "is not empty": ("{eight}", "--to", "gptq", "-o", "{asymmetric}"),
    "name the file to make": ("{eight}", "--to", "gguf", "-o", "{asymmetric}"),
}


@pytest.mark.parametrize("said", COMMANDS)
def test_wrong_commands_get_a_sentence(said: str, made: dict[str, Path], tmp_path: Path) -> None:
    places = {"nowhere": tmp_path / "nowhere", "out": tmp_path / "out", **made}
    arguments = [word.format(**places) for word in COMMANDS[said]]
    found = CliRunner().invoke(main.app, ["convert", *arguments])
    assert said in str(found.exception) and isinstance(found.exception, QtoolError)
    assert isinstance(found.exception, UsageError) == said.startswith("expected")
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_was_kept(made: dict[str, Path], tmp_path: Path) -> None:
    arguments = ["convert", str(made["asymmetric"]), "--to", "awq-llm", "-o", str(tmp_path / "out")]
    found = CliRunner().invoke(main.app, arguments)
    assert found.exit_code == 0
    assert found.stdout.startswith(f"{tmp_path / 'out'}: LlamaForCausalLM as awq llm_awq, ")
    assert found.stdout.endswith(
        f"all {TENSORS} tensors read back and compared: the same numbers\n"
    )
    arguments = ["convert", str(made["eight"]), "--to", "hf", "--json", "-o", str(tmp_path / "hf")]
    said = json.loads(CliRunner().invoke(main.app, arguments).stdout)
    assert said["format"] == "hf" and said["matrices"] == MATRICES
