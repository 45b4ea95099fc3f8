"""What inspect says of artifacts whose sizes can be worked out by hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from qtool.artifacts.artifact import Artifact
from qtool.cli.main import app
from qtool.errors import FormatError, SourceError, UnsupportedError
from qtool.formats import FORMATS
from qtool.inspecting.inspect import inspect
from qtool.scheme import GroupQuant, Scheme
from qtool.verification.run import verify_artifact
from support.formats.artifact_files import assert_same, random_quant, write_folder
from support.formats.header_artifacts import group_config, plain, stored

KEYS = {"format", "quant_method", "bits_per_weight", "size_bytes", "parameters",
        "unquantized_share", "provenance", "tensors"}  # fmt: skip
ROW = {"name", "shape", "dtype", "scheme", "bits_per_weight", "bytes"}
Q = "model.layers.{}.self_attn.q_proj"


@pytest.fixture
def awq_folder(tmp_path: Path) -> Path:
    quants = {Q.format(i): random_quant(Scheme(4, 32, False), 16, 64, seed=i) for i in range(2)}
    dense = {
        "model.embed_tokens.weight": np.ones((10, 16), np.float16),
        "model.norm.weight": np.full(16, 2, np.float32),
    }
    write_folder(tmp_path, "awq", quants, dense)
    provenance = {"qtool_version": "0", "recipe": {"name": "x"}, "source": {"digest": "ab"}}
    (tmp_path / "qtool.json").write_text(json.dumps(provenance))
    return tmp_path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_by_hand(awq_folder: Path) -> None:
    found = json.loads(run(awq_folder, "--json"))
    assert found.keys() == KEYS
    # qweight 64 x 2 words, qzeros 2 x 2 words, scales 2 x 16 halves
    matrix = 4 * 128 + 4 * 4 + 2 * 32
    parameters = 2 * 16 * 64 + 160 + 16
    assert found["format"] == found["quant_method"] == "awq"
    assert found["parameters"] == parameters
    total = 2 * matrix + 320 + 64
    assert found["bits_per_weight"] == pytest.approx(8 * total / parameters)
    assert found["unquantized_share"] == pytest.approx(176 / parameters)
    assert found["size_bytes"] == (awq_folder / "model.safetensors").stat().st_size > total
    assert found["provenance"]["source"]["digest"] == "ab"
    rows = {row["name"]: row for row in found["tensors"]}
    assert all(row.keys() == ROW for row in rows.values())
    assert rows[Q.format(1) + ".weight"] == {
        "name": Q.format(1) + ".weight",
        "shape": [16, 64],
        "dtype": "I32",
        "scheme": "w4 g32 asym",
        "bits_per_weight": 8 * matrix / 1024,
        "bytes": matrix,
    }
    assert rows["model.norm.weight"]["scheme"] is None
    assert rows["model.norm.weight"]["bits_per_weight"] == 32
    assert len(rows) == 4


def test_plain_text_in_a_pipe(awq_folder: Path) -> None:
    text = run(awq_folder)
    assert "\x1b" not in text and "format: awq gemm" in text and "source.digest: ab" in text
    assert "model.layers.*.self_attn.q_proj.weight (2)  16x64" in text
    every = run(awq_folder, "--all")
    assert Q.format(0) in every and Q.format(1) in every


def test_layers_that_are_stored_otherwise_are_named(tmp_path: Path) -> None:
    quants = {Q.format(i): random_quant(Scheme(4, 32, False), 16, 64, seed=i) for i in (0, 1, 3)}
    write_folder(tmp_path, "awq", quants, {Q.format(2) + ".weight": np.ones((16, 64), np.float16)})
    text = run(tmp_path)
    assert "model.layers.{0-1,3}.self_attn.q_proj.weight (3)" in text
    assert "model.layers.2.self_attn.q_proj.weight " in text and ".*." not in text


def test_one_tensor_in_detail(tmp_path: Path) -> None:
    quant = random_quant(Scheme(3, 32, False), 32, 64)
    quant.codes[:] = 5
    quant.codes[0, 0] = 2
    quant.zero[:] = 3
    quant.zero[4, 1] = 7
    quant.scale[:] = 0.5
    quant.scale[1, 1] = 0.25
    norm = np.array([1, np.nan, 3], np.float32)
    write_folder(tmp_path, "gptq", {"a.b": quant}, {"norm.weight": norm})
    for name in ("a.b", "a.b.weight", "a.b.qweight", "a.b.g_idx"):
        detail = json.loads(run(tmp_path, "--tensor", name, "--json"))
        assert detail["shape"] == [32, 64] and detail["scheme"] == "w3 g32 asym"
    assert detail["scale_range"] == [0.25, 0.5] and detail["zero_range"] == [3, 7]
    assert detail["code_counts"] == [0, 0, 1, 0, 0, 2047, 0, 0]
    assert next(s["name"] for s in detail["stored"]) == "a.b.qweight"
    text = run(tmp_path, "--tensor", "a.b")
    assert "zeros            3 to 7" in text and "scales           0.25 to 0.5" in text
    detail = json.loads(run(tmp_path, "--tensor", "norm.weight", "--json"))
    assert detail["range"] == [1.0, 3.0] and detail["not_finite"] == 1
    with pytest.raises(SourceError, match="no tensor 'c'"):
        Artifact.open(tmp_path).entry("c")


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_reading_and_dequantizing(tmp_path: Path, kind: str) -> None:
    scheme = Scheme(4, 32, kind == "gptq")
    quants = {Q.format(i): random_quant(scheme, 16, 64, seed=i) for i in range(3)}
    norm = np.arange(16, dtype=np.float16)
    ids = np.arange(4)
    write_folder(tmp_path, kind, quants, {"norm.weight": norm, "ids": ids}, shard_bytes=500)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    artifact = Artifact.open(tmp_path)
    for name, quant in quants.items():
        found = artifact.read(name)
        assert isinstance(found, GroupQuant)
        assert_same(found, quant)
    state = dict(artifact.dequantized())
    assert state.keys() == {f"{name}.weight" for name in quants} | {"norm.weight", "ids"}
    for name, quant in quants.items():
        assert np.array_equal(state[f"{name}.weight"], quant.dequantize())
    assert state["norm.weight"].dtype == np.float32 and state["ids"].dtype == np.int64


def test_scales_in_bfloat16(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file
    from safetensors.torch import save_file as save_torch

    quant = random_quant(Scheme(4, 32, True), 16, 64)
    write_folder(tmp_path, "gptq", {"a": quant})
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["a.scales"] = tensors["a.scales"].to(torch.bfloat16)
    save_torch(tensors, tmp_path / "model.safetensors")
    found = Artifact.open(tmp_path).read("a")
    assert isinstance(found, GroupQuant)
    assert found.scheme == Scheme(4, 32, True, "bfloat16")
    assert np.array_equal(found.scale, tensors["a.scales"].float().numpy().T)
    assert np.array_equal(found.codes, quant.codes)


def test_a_bare_file_without_a_config_is_told_by_its_shapes(tmp_path: Path) -> None:
    for kind, scheme in (("awq", Scheme(4, 32, False)), ("gptq", Scheme(8, 64, True))):
        folder = tmp_path / kind
        folder.mkdir()
        quant = random_quant(scheme, 16, 128)
        write_folder(folder, kind, {"a": quant})
        for path in folder.glob("*.json"):
            path.unlink()
        artifact = Artifact.open(folder / "model.safetensors")
        assert artifact.found.format == kind
        found = artifact.read("a")
        assert isinstance(found, GroupQuant) and np.array_equal(found.codes, quant.codes)
        assert found.scheme.bits == scheme.bits and found.scheme.group_size == scheme.group_size
    save_file({"a.qweight": np.zeros((4, 4), np.int32)}, tmp_path / "x.safetensors")
    with pytest.raises(FormatError, match="no config says how"):
        Artifact.open(tmp_path / "x.safetensors")


def test_the_config_may_lie_beside(tmp_path: Path) -> None:
    quant = random_quant(Scheme(4, 32, True), 16, 64)
    write_folder(tmp_path, "gptq", {"a": quant})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    found = Artifact.open(tmp_path)
    assert found.found.scheme == Scheme(4, 32, True)


def test_a_dense_checkpoint(tmp_path: Path) -> None:
    save_file({"w": np.ones((4, 8), np.float16)}, tmp_path / "model.safetensors")
    found = inspect(tmp_path).json()
    assert (found["format"], found["quant_method"]) == ("dense", "none")
    assert (found["unquantized_share"], found["bits_per_weight"]) == (1.0, 16.0)
    assert found["provenance"] is None


OTHERS: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], int]] = {
    "compressed-tensors": (
        {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}, "format": "marlin-24"},
        {"a.weight_packed": np.zeros((8, 4), np.int32), "a.weight_scale": np.ones((8, 1), "f2"),
         "a.weight_shape": np.array([8, 32])},
        8 * 32,
    ),
    "quanto": ({}, {"a.weight": np.zeros((8, 32), np.int8), "a.weight_scale": np.ones((1, 1))},
               8 * 32),
    "bitsandbytes": (
        {"load_in_4bit": True},
        {"a.weight": np.zeros((128, 1), np.uint8), "a.weight.absmax": np.zeros(4, np.float32)},
        256,
    ),
    "someone-elses": ({}, {"a.weight": np.zeros((8, 32), np.int8)}, 8 * 32),
}  # fmt: skip


@pytest.mark.parametrize("method", list(OTHERS))
def test_formats_that_are_named_and_not_decoded(tmp_path: Path, method: str) -> None:
    config, tensors, parameters = OTHERS[method]
    norm = {"norm.weight": np.ones(4, np.float32)}
    save_file(tensors | norm, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": method} | config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = inspect(tmp_path).json()
    assert found["format"] == found["quant_method"] == method
    assert found["parameters"] == parameters + 4
    rows = {row["name"]: row for row in found["tensors"]}
    assert rows.keys() == {"a.weight", "norm.weight"}
    assert rows["a.weight"]["scheme"] == method and rows["norm.weight"]["scheme"] is None
    assert rows["a.weight"]["bytes"] == sum(t.nbytes for t in tensors.values())
    with pytest.raises(UnsupportedError, match=f"{method} is recognised, but not decoded"):
        Artifact.open(tmp_path).read("a")
    assert "code_counts" not in json.loads(run(tmp_path, "--tensor", "a", "--json"))


def test_names_cannot_move_the_cursor(tmp_path: Path) -> None:
    save_file({"\x1b[2Jw\n": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "qtool.json").write_text(json.dumps({"recipe": "\x1b]0;x\x07"}))
    for arguments in ((tmp_path,), (tmp_path, "--tensor", "\x1b[2Jw\n")):
        text = run(*arguments)
        assert "\x1b" not in text and "\x07" not in text and r"\x1b[2Jw\n" in text


def test_json_has_no_infinities(tmp_path: Path) -> None:
    """Python reads and writes Infinity and NaN in JSON; nobody else does."""
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "qtool.json").write_text('{"a": [NaN, {"b": -Infinity}, 1.5]}')
    found = json.loads(run(tmp_path, "--json"), parse_constant=pytest.fail)
    assert found["provenance"] == {"a": ["nan", {"b": "-inf"}, 1.5]}


def test_inspect_starts_light(awq_folder: Path) -> None:
    heavy = ["torch", "transformers", "numpy", "huggingface_hub", "requests", "rich", "yaml"]
    code = (
        "import sys; sys.argv = ['qtool', 'inspect', sys.argv[1], '--json']\n"
        "from qtool.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit as done:\n    assert not done.code\n"
        f"print([m for m in {heavy} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(awq_folder)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["format"] == "awq"
    assert done.stderr.strip() == "[]"


def test_every_format_module_has_the_same_functions() -> None:
    names = ["NAME", "choose", "supports", "supports_together", "specs", "pack", "scheme_in",
             "unpack", "config", "side_files", "detect"]  # fmt: skip
    for key, module in FORMATS.items():
        assert key == module.NAME
        assert all(hasattr(module, name) for name in names)


def test_a_pointer_of_git_lfs_is_called_that(awq_folder: Path) -> None:
    """What a clone without git-lfs leaves: its text is no length of a header."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 9\n"
    (awq_folder / "model.safetensors").write_text(pointer)
    found = CliRunner().invoke(app, ["inspect", str(awq_folder)])
    assert isinstance(found.exception, FormatError)
    assert "model.safetensors: a pointer of Git LFS" in str(found.exception)
    assert "git lfs pull" in str(found.exception)


def test_json_is_not_nested_without_end(awq_folder: Path) -> None:
    """Python reads 990 levels, and whoever walks through them does not get that far."""
    said = "the JSON is nested more than 100 deep"
    for depth, fine in ((90, True), (500, False)):
        nested = '{"a":' * depth + "1" + "}" * depth
        (awq_folder / "qtool.json").write_text(nested)
        found = json.loads(run(awq_folder, "--json"))
        assert found.keys() - KEYS == (set() if fine else {"provenance_unreadable"})
        assert fine or found["provenance_unreadable"] == f"qtool.json: {said}"
    (awq_folder / "config.json").write_text(nested)
    refused = CliRunner().invoke(app, ["inspect", str(awq_folder), "--json"])
    assert isinstance(refused.exception, FormatError)
    assert f"config.json: {said}" in str(refused.exception)


def test_codes_in_more_bits_than_they_have(tmp_path: Path) -> None:
    """Three matrices of 131,072 numbers, a byte each, and 1,280 scales of two bytes."""
    rate = 8 + 16 * 1280 / (3 * 131072)
    said = f"codes: of 4 bits in 8 each, {rate:.3f} bits per weight with their scales"
    for bits, told in ((4, True), (8, False)):
        arguments = {"num_bits": bits, "type": "int", "strategy": "channel"}
        stored(tmp_path, plain(), group_config("int-quantized", arguments, None))
        assert (said in run(tmp_path).splitlines()) == told
        assert told or "codes" not in dict(inspect(tmp_path).summary())


def test_what_an_artifact_was_calibrated_on_is_one_line(awq_folder: Path) -> None:
    record = json.loads((awq_folder / "qtool.json").read_text())
    for calibration, said in [
        ({"source": "file", "samples": 1, "length": 512, "seed": 3, "digest": "sha256:ab"},
         ["calibrated on: 1 sample of 512 tokens of a file, seed 3",
          "calibration.digest: sha256:ab"]),
        ({"source": "owner/set", "samples": 2048, "length": 64, "precision": "bfloat16"},
         ["calibrated on: 2,048 samples of 64 tokens of owner/set, matmuls in bfloat16"]),
        ({"source": {"hub": "x"}, "samples": 2, "length": 64, "seed": -5, "precision": 7},
         ["calibrated on: 2 samples of 64 tokens", "calibration.source.hub: x",
          "calibration.seed: -5", "calibration.precision: 7"]),
        ({"samples": "many", "length": 64},
         ["calibration.samples: many", "calibration.length: 64"]),
        ({"samples": True, "length": 64}, ["calibration.samples: true"]),
        ("none", ["calibration: none"]),
    ]:  # fmt: skip
        text = json.dumps({**record, "calibration": calibration})
        (awq_folder / "qtool.json").write_text(text)
        found = [line for line in run(awq_folder).splitlines() if line.startswith("calibrat")]
        assert found[: len(said)] == said


def test_statistics_say_what_they_are_of(tmp_path: Path) -> None:
    said = {"source": "file", "samples": 4, "length": 64, "seed": 0, "digest": "sha256:ab"}
    metadata = {
        "qtool.statistics": "{}",
        "model_digest": "cd",
        "calibration": json.dumps(said),
    }
    path = tmp_path / "stats.safetensors"
    save_file({"site.a.mean_abs": np.ones(8, np.float32)}, path, metadata)
    lines = run(path).splitlines()
    assert lines[0] == "format: statistics of a model, for `qtool quantize --stats`"
    assert "calibrated on: 4 samples of 64 tokens of a file, seed 0" in lines
    assert not any(line.startswith(("parameters", "left unquantized")) for line in lines)
    found = json.loads(run(path, "--json"))
    assert found["format"] == "statistics"
    assert found["provenance"] == {"calibration": said, "model_digest": "cd"}
    save_file({"site.a.mean_abs": np.ones(8, np.float32)}, path, metadata | {"calibration": "{"})
    assert "calibration: {" in run(path).splitlines()
    # A model whose file bears the key is none of statistics.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert run(path).startswith("format: dense")
    (tmp_path / "config.json").unlink()
    (found,) = [one for one in verify_artifact(path).findings if one.severity == "error"]
    assert found.message.startswith("statistics of a model") and not verify_artifact(path).ok
