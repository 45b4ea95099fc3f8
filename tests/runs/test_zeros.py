"""Weights that are 0 as an interrupted download leaves them: told by the run that reads them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.checkpoints import holes
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.runs.zeros import Zeros
from qtool.verification.run import verify_artifact
from support.gguf.gguf_from_hf import no_vocabulary
from support.models import gpt_oss
from support.runs.killed_runs import Died, dying
from support.runs.quantizing import caller, first_blocks_of_tiny, text_file

UP = "model.layers.1.mlp.up_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
TORN = f"{DOWN}: 9,000 bytes are 0 in long stretches that begin or end within a row: it was not w"
EMPTY = f"{UP}: every number is 0; the layer does nothing, unless the model has it so"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks of `tiny`, with a matrix of zeros, and a hole in another."""
    folder = first_blocks_of_tiny(tmp_path_factory.mktemp("zeros") / "model", 2)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[UP].zero_()
    tensors[NORM].zero_()  # of which nothing is said: some models have biases of zeros
    flat = tensors[DOWN].reshape(-1).view(torch.uint8)
    flat[5000:14_000] = 0
    flat[4990:5000] = flat[14_000:14_010] = 61
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "recipe", ["w4g128-rtn", "fp8-block", "w4g128-gptq", "q8_0", "q4_k_m", "q4_k_m-awq-gptq"]
)
def test_zeros_are_said(
    recipe: str, model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Of every way in which a run reads: rows, whole matrices, blocks that run, pieces of GGUF."""
    call = caller(monkeypatch, capfd)
    given = ["--calibration", text_file(tmp_path / "t.txt"), "--samples", 4, "--length", 64]
    more = given if "gptq" in recipe else []
    out = tmp_path / ("out.gguf" if recipe.startswith("q") else "out")
    done = call("quantize", model, "--recipe", recipe, "-o", out, *more)
    assert done.status == 0
    assert f"warning: {TORN}" in done.err and f"warning: {EMPTY}" in done.err
    done = call("quantize", model, "--recipe", recipe, "-o", out, *more, "--replace", "--json")
    said = [one for one in json.loads(done.out)["warnings"] if " 0" in one]
    assert sorted(one[: len(TORN)] for one in said) == sorted([TORN, EMPTY[: len(TORN)]])
    assert next(one for one in said if one.startswith(TORN)).endswith("; fetch the model again")


@pytest.mark.parametrize("after", [None, 18])
def test_zeros_of_what_is_rotated(
    after: int | None, model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Into GGUF, where what is encoded has no holes any more. after: as many lines it is killed."""
    call = caller(monkeypatch, capfd)
    given = ("--recipe", "q8_0", "--set", "transforms=[rotate]", "--threads", 1)
    command = ("quantize", model, *given, "-o", tmp_path / "out.gguf")
    if after is not None:
        with monkeypatch.context() as patched, pytest.raises(Died):
            dying(after, patched)
            call(*command)
    done = call(*command)
    assert done.err.count(f"warning: {TORN}") == done.err.count(f"warning: {EMPTY}") == 1


def test_zeros_of_a_head_that_an_earlier_try_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every try reads blocks and embedding, to see that the model stays as it is, and a head that
    is not rotated once, so that the journal alone tells what was wrong with it."""
    folder = first_blocks_of_tiny(tmp_path / "model", 2)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"].view(-1)[400 * 256 + 99 : 430 * 256] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    call = caller(monkeypatch, capfd)
    given = ("--recipe", "q8_0", "--set", "transforms=[rotate]", "--set", "rotate.r1=false")
    command = ("quantize", folder, *given, "--threads", 1, "-o")
    at_once = call(*command, tmp_path / "a.gguf")
    with monkeypatch.context() as patched, pytest.raises(Died):
        dying(18, patched)
        call(*command, tmp_path / "b.gguf")
    written = (tmp_path / ".b.gguf.partial/journal").read_text()
    assert '"output.weight"' in written and '"token_embd.weight"' in written
    done = call(*command, tmp_path / "b.gguf")
    for run in (at_once, done):
        assert run.err.count("warning: lm_head.weight: 15,162 bytes are 0 in long") == 1
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@pytest.mark.parametrize("recipe", ["w8-rtn", "w4g128-gptq"])
def test_zeros_of_codes(
    recipe: str, model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Of a release in FP8 with --requantize, whose codes of 0 are zeros, and of its embedding."""
    call = caller(monkeypatch, capfd)
    source = tmp_path / "fp8"
    assert call("quantize", model, "--recipe", "fp8-dynamic", "-o", source).status == 0
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"].view(-1)[1003:9000] = 0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    given = ["--calibration", text_file(tmp_path / "t.txt"), "--samples", 4, "--length", 64]
    more = given if "gptq" in recipe else []
    done = call(
        "quantize", source, "--requantize", "--recipe", recipe, "-o", tmp_path / "out", *more
    )
    assert done.status == 0, done.err
    assert f"warning: {EMPTY}" in done.err
    assert f"warning: {DOWN}: 9,000 bytes are 0 in long stretches" in done.err
    assert "model.embed_tokens.weight: " in done.err


@pytest.mark.parametrize(
    ("source", "recipe"),
    [
        ("w4g64-rtn", "w8-rtn"),  # AWQ
        ("w4g64-mlx-rtn", "w4g64-gptq"),
        ("w8-rtn", "q8_0"),  # GPTQ
        ("w3g128-rtn", "q4_k_m-awq-gptq"),
    ],
)
def test_zeros_of_packed_codes(
    source: str, recipe: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Of which 0 is no weight of 0. Rows and columns that are 0 are no holes."""
    call = caller(monkeypatch, capfd)
    model = first_blocks_of_tiny(tmp_path / "model", 1) / "model.safetensors"
    tensors = load_file(model)
    tensors["model.layers.0.mlp.up_proj.weight"][100:500] = 0
    tensors[DOWN][:, 100:500] = 0
    save_file(tensors, model, metadata={"format": "pt"})
    packed = tmp_path / "packed"
    assert call("quantize", model.parent, "--recipe", source, "-o", packed).status == 0
    given = ["--calibration", text_file(tmp_path / "t.txt"), "--samples", 4, "--length", 64]
    more = given if "gptq" in recipe else []
    command = ("quantize", packed, "--requantize", "--recipe", recipe, *more, "-o")
    done = call(*command, tmp_path / "whole")
    assert done.status == 0 and " 0 in long stretches" not in done.err
    file = packed / "model.safetensors"
    stored = load_file(file)
    key = next(name for name in stored if "o_proj." in name and name.endswith("weight"))
    stored[key].view(torch.uint8).view(-1)[9_001:18_001] = 0
    save_file(stored, file, metadata={"format": "pt"})
    done = call(*command, tmp_path / "torn")
    assert done.status == 0, done.err
    (said,) = [line for line in done.err.splitlines() if " 0 in long stretches" in line]
    assert said.startswith("warning: model.layers.0.self_attn.o_proj.weight: 9,00")
    assert "bytes of its codes are 0" in said and said.endswith("; fetch the model again")


def test_the_model_itself_is_judged_alike(model: Path) -> None:
    said = [f.message for f in verify_artifact(model).findings if f.check == "dense-values"]
    assert EMPTY in said and any(one.startswith(TORN) for one in said)


def test_nothing_is_said_of_tiny(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    call = caller(monkeypatch, capfd)
    for recipe, out in (("w4g128-rtn", "out"), ("q8_0", "out.gguf")):
        done = call("quantize", "tiny", "--recipe", recipe, "-o", tmp_path / out, "--json")
        assert not [one for one in json.loads(done.out)["warnings"] if " 0" in one]


def test_zeros_of_a_gguf_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    call = caller(monkeypatch, capfd)
    call("quantize", model, "--recipe", "bf16", "-o", tmp_path / "a.gguf")
    done = call("quantize", tmp_path / "a.gguf", "--recipe", "q4_0", "-o", tmp_path / "b.gguf")
    assert "warning: blk.0.ffn_down.weight: 9,000 bytes are 0 in long stretches" in done.err
    assert "warning: blk.1.ffn_up.weight: every number is 0" in done.err
    done = call("quantize", tmp_path / "a.gguf", "--recipe", "w4g128-rtn", "-o", tmp_path / "c")
    assert f"warning: {TORN}" in done.err and f"warning: {EMPTY}" in done.err


def test_biases_of_zeros_are_nothing_to_speak_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those of experts are matrices, and gpt-oss has some before it is trained."""
    file = gpt_oss.plain(tmp_path / "model") / "model.safetensors"
    tensors = load_file(file)
    biases = [name for name, value in tensors.items() if name.endswith("bias") and value.ndim > 1]
    for name in biases:
        tensors[name].zero_()
    save_file(tensors, file, metadata={"format": "pt"})
    assert len(biases) > 2
    no_vocabulary(monkeypatch)
    call, out = caller(monkeypatch, capfd), tmp_path / "a.gguf"
    done = call("quantize", file.parent, "--recipe", "q8_0", "-o", out, "--json")
    assert not [one for one in json.loads(done.out)["warnings"] if " 0;" in one]
    for path in (file.parent, out):
        assert not [f for f in verify_artifact(path).findings if "does nothing" in f.message]


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "q8_0"])
def test_what_an_earlier_try_read_is_said(
    recipe: str, model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    call = caller(monkeypatch, capfd)
    command = ("quantize", model, "--recipe", recipe, "-o", tmp_path / "out", "--threads", 1)
    with monkeypatch.context() as patched, pytest.raises(Died):
        dying(2 if recipe == "w4g128-rtn" else 18, patched)
        call(*command)
    done = call(*command)
    assert "going on with an earlier run" in done.err
    assert f"warning: {TORN}" in done.err and f"warning: {EMPTY}" in done.err


def test_a_stretch_in_two_reads() -> None:
    """Wherever it is cut, one of the two reads shows it."""
    data = np.full(20_000, 7, np.uint8)
    data[5001 : 5001 + holes.LEAST] = 0
    assert holes.zero_stretches(data) == [(5001, 5001 + holes.LEAST)]
    for cut in range(4000, 11_000, 37):
        assert holes.may_have_zeros(data[:cut]) or holes.may_have_zeros(data[cut:])
    every = np.zeros(20_000, np.uint8)
    every[::512] = 1
    assert not holes.may_have_zeros(every)


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """What is read is told by where it lies in the file, whatever a view calls it."""
    tensors = {"a": torch.ones(4, 8, 512), "b": torch.ones(4, 8, 512)}
    tensors["b"][2] = 0
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    zeros = Zeros(tmp_path)
    checkpoint = replace(Checkpoint.open(tmp_path), watch=zeros)
    for name in tensors:
        for expert in range(4):
            checkpoint.part(name, expert, expert + 1)
    assert zeros.seen == ["b"]
    assert zeros.told([{"zeros": ["a", 3]}, {}]) == []  # an expert that is whole has no torn row
