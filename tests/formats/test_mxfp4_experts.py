"""gpt-oss as it is released, experts in MXFP4: read, run, verified, and made plain again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from qtool.artifacts.artifact import Artifact
from qtool.artifacts.expert_stack import ExpertStack
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cli.main import app
from qtool.diff.diff import diff
from qtool.errors import FormatError, UnsupportedError
from qtool.formats import mxfp4_experts
from qtool.inspecting.inspect import inspect
from qtool.messages.progress import Progress
from qtool.quality.weights import open_weights
from qtool.verification.run import verify_artifact
from support.gguf import gguf_models
from support.gguf.families import sparse
from support.runs import quantizing
from support.verification.verifying import but_digests

STACKS = {
    f"model.layers.{block}.mlp.experts.{name}": shape
    for block in range(2)
    for name, shape in (("gate_up_proj", (4, 64, 192)), ("down_proj", (4, 96, 64)))
}


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return gguf_models.build("gpt-oss-mxfp4", tmp_path / "packed", dtype="bfloat16")


def arrays(folder: Path) -> dict[str, Any]:
    """Every tensor: bytes as they are, the others in float32."""
    found = Checkpoint.open(folder)
    codes = {name for name, info in found.tensors.items() if info.dtype == "U8"}
    return {n: found.array(n) if n in codes else found.float32(n) for n in found.tensors}


def rewrite(folder: Path, name: str, array: NDArray[np.uint8]) -> None:
    save_file({**arrays(folder), name: array}, folder / "model.safetensors")


def test_by_hand() -> None:
    """2 experts of one row: the first number in the low nibble, times a power of two."""
    blocks = np.zeros((2, 1, 1, 16), np.uint8)
    blocks[0, 0, 0, 0], blocks[1, 0, 0, 15] = 0x72, 0x9F
    found = mxfp4_experts.dequantize(blocks, np.array([[[128]], [[126]]], np.uint8))
    assert found.shape == (2, 32, 1)
    wanted = np.zeros((2, 32, 1), np.float32)
    wanted[0, :2, 0], wanted[1, 30:, 0] = (2.0, 12.0), (-3.0, -0.25)
    assert np.array_equal(found, wanted)


def test_read_as_plain_experts(packed: Path) -> None:
    """Whole, by experts and by rows, the numbers that transformers makes of them."""
    plain = arrays(sparse.unpacked(packed))
    artifact = Artifact.open(packed)
    stacks = {name: entry for name, entry in artifact.entries.items() if entry.stacked}
    assert {name: entry.shape for name, entry in stacks.items()} == STACKS
    assert artifact.entries.keys() == plain.keys()
    with open_weights(packed) as weights:
        for name, shape in STACKS.items():
            wanted = plain[name]
            assert np.array_equal(artifact.read(name), wanted)
            assert np.array_equal(weights.float32(name), wanted)
            part = weights.part(name, 1, 3).view(np.float32).reshape(2, *shape[1:])
            assert np.array_equal(part, wanted[1:3])
            rows, matrix = ExpertStack(artifact, name), wanted.reshape(-1, shape[2])
            assert np.array_equal(rows.dequantize(), matrix)
            assert np.array_equal(rows.rows(shape[1] - 3, 3 * shape[1] + 5),
                                  matrix[shape[1] - 3 : 3 * shape[1] + 5])  # fmt: skip
            assert rows.rows(7, 7).shape == (0, shape[2])


def test_inspected(packed: Path) -> None:
    found = inspect(packed)
    plain = inspect(sparse.unpacked(packed))
    assert found.parameters == plain.parameters
    experts = sum(np.prod(shape) for shape in STACKS.values())
    assert found.unquantized == found.parameters - experts


def qtool(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


def test_made_plain(packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "plain"
    said = qtool("convert", packed, "--to", "hf", "-o", out)
    assert said.exit_code == 0 and "the same numbers" in said.stdout
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    made, wanted = Checkpoint.open(out), Checkpoint.open(sparse.unpacked(packed))
    assert made.tensors.keys() == wanted.tensors.keys()
    for name, info in made.tensors.items():
        assert info.dtype == "BF16"
        assert np.array_equal(made.float32(name), wanted.float32(name)), name
    found = diff(packed, out, Progress(quiet=True))
    assert {one.name: one.kind for one in found.tensors} == dict.fromkeys(STACKS, "storage")
    refused = qtool("convert", packed, "--to", "gptq", "-o", tmp_path / "no")
    assert isinstance(refused.exception, UnsupportedError)
    assert "dequantize it with --to hf" in str(refused.exception)


def test_run_as_the_plain_one(packed: Path) -> None:
    quantizing.add_tokenizer(packed)
    plain = quantizing.add_tokenizer(sparse.unpacked(packed))
    text = quantizing.text_file(packed / "text.txt", 400)
    options = ["--text", text, "--windows", 2, "--length", 32, "--no-cache", "--json"]
    said = qtool("eval", packed, "--against", plain, *options)
    assert said.exit_code == 0, said.stderr
    found = json.loads(said.stdout)
    assert found["kld"]["mean"] == 0 and found["perplexity"] == found["reference_perplexity"]


def said(folder: Path, **more: Any) -> list[tuple[str, str]]:
    verdict = verify_artifact(folder, **more)
    return [(one.severity, one.check) for one in but_digests(verdict.findings)]


def test_nothing_is_wrong_with_it(packed: Path) -> None:
    quantizing.add_tokenizer(packed)
    plain = sparse.unpacked(packed)
    wrong = [one for one in said(packed, against=plain) if one[1] != "unquantized"]
    assert not wrong


def test_scales_that_are_no_numbers(packed: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales = arrays(packed)[name].copy()
    scales[2, 5, 1] = 255
    rewrite(packed, name, scales)
    (found,) = [one for one in verify_artifact(packed).findings if one.check == "scales"]
    assert found.severity == "error" and "experts.2.down_proj" in found.name
    beside = verify_artifact(packed, against=packed).findings
    assert found in [one for one in beside if one.check == "scales"]


def test_scales_of_other_groups(packed: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    rewrite(packed, name, arrays(packed)[name][:, :, :1].copy())
    with pytest.raises(FormatError, match="one scale for each group"):
        _ = Artifact.open(packed).entries
    assert ("error", "shapes") in said(packed)


def test_experts_that_the_config_leaves_plain(packed: Path) -> None:
    def leave(config: dict[str, Any]) -> None:
        config["quantization_config"]["modules_to_not_convert"].append("model.layers.*.mlp.experts")

    gguf_models.rewrite_config(packed, leave)
    assert ("error", "dense-list") in said(packed)
