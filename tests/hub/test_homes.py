"""Models where people already have them, and what other programs are told of new ones."""

import hashlib
import json
import shlex
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

from qtool import hub
from qtool.cards import serve
from qtool.cards.llama_cpp import names_for
from qtool.cards.serve import command, next_lines
from qtool.cli.main import app
from qtool.errors import SourceError
from qtool.homes.hub_cache import newest_snapshot, repository_of
from qtool.homes.ollama import create_line, modelfile_text, stored_model
from support.gguf import gguf_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


def cache(folder: Path, *commits: str, main: str | None = None) -> Path:
    """A repository of huggingface_hub's cache with the shipped model in its snapshots."""
    repository = folder / "models--ann--tiny-1B"
    for commit in commits:
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for path in hub.tiny_folder().iterdir():
            if path.suffix in (".json", ".safetensors"):
                (snapshot / path.name).symlink_to(path)
    if main is not None:
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(main)
    return repository


def test_the_hubs_cache(tmp_path: Path) -> None:
    repository = cache(tmp_path, COMMIT, OTHER, main=COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    assert newest_snapshot(repository) == hub.resolve(str(repository)) == snapshot
    assert newest_snapshot(snapshot) == snapshot
    assert repository_of(snapshot / "config.json") == ("ann/tiny-1B", COMMIT)
    assert repository_of(repository) == ("ann/tiny-1B", None)
    assert repository_of(tmp_path) is None
    assert hub.public_name(str(snapshot)) == f"ann/tiny-1B@{COMMIT}"
    for path in (repository, snapshot):
        assert hub.plain_name(str(path)) == "tiny-1B"
        said = CliRunner().invoke(app, ["plan", str(path), "--recipe", "w4g128-rtn"])
        assert said.exit_code == 0, said.output
    (repository / "refs" / "main").unlink()
    with pytest.raises(SourceError, match="holds 2 snapshots"):
        newest_snapshot(repository)
    assert newest_snapshot(cache(tmp_path / "one", OTHER)).name == OTHER
    (tmp_path / "models--a--b" / "snapshots").mkdir(parents=True)
    with pytest.raises(SourceError, match="no snapshot"):
        newest_snapshot(tmp_path / "models--a--b")


def test_ollamas_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gguf_files.model(tmp_path / "m.gguf", layers=1)
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    (tmp_path / "blobs").mkdir()
    blob = model.rename(tmp_path / "blobs" / f"sha256-{digest}")
    layers = [
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"},
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:00"},
    ]
    for name in ("registry.ollama.ai/library/small/1b", "hf.co/ann/small-GGUF/latest"):
        manifest = tmp_path / "manifests" / name
        manifest.parent.mkdir(parents=True)
        manifest.write_text(json.dumps({"layers": layers}))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    assert stored_model("small:1b") == stored_model("hf.co/ann/small-GGUF") == blob
    assert hub.resolve("ollama:small:1b") == blob
    assert hub.plain_name("ollama:small:1b") == "ollama-small-1b"
    said = CliRunner().invoke(app, ["plan", "ollama:small:1b", "--recipe", "q8_0"])
    assert said.exit_code == 0, said.output
    for name in ("small", "../x", "a/b/c/d", "small:"):
        with pytest.raises(SourceError, match="ollama list"):
            stored_model(name if name != "small:" else "small:2b")
    manifest.write_text(json.dumps({"layers": layers[1:]}))
    with pytest.raises(SourceError, match="names 0 models"):
        stored_model("hf.co/ann/small-GGUF")
    blob.unlink()
    with pytest.raises(SourceError, match="ollama pull small:1b"):
        stored_model("small:1b")


def test_lm_studios_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    folder = tmp_path / ".lmstudio" / "models" / "ann" / "small-GGUF"
    folder.mkdir(parents=True)
    gguf_files.model(folder / "small-F16.gguf", layers=1)
    for name in (str(folder), "lmstudio:ann/small-GGUF", "lmstudio:ann/small-GGUF/small-F16.gguf"):
        said = CliRunner().invoke(app, ["inspect", name])
        assert said.exit_code == 0 and "format: GGUF" in said.stdout, said.output
    for name in ("ann", "ann/other", "ann/..", "ann//x"):
        with pytest.raises(SourceError, match="lms ls"):
            hub.resolve(f"lmstudio:{name}")
    model = folder / "small-F16.gguf"
    assert next_lines(model, "tiny")[-1] == f"next: lms import {model}"


def test_modelfiles(tmp_path: Path) -> None:
    model = gguf_files.model(tmp_path / "Some Model-q8.gguf", layers=1)
    assert modelfile_text(model) == "FROM ./Some Model-q8.gguf\n"
    assert create_line(model).startswith("ollama create some-model-q8 -f '")
    assert create_line(model).endswith("/Some Model-q8.Modelfile'")


def test_modelfiles_say_what_is_known(tmp_path: Path) -> None:
    path = tmp_path / "chat.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m }}<|im_end|>{% endfor %}")
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    lines = modelfile_text(path).splitlines()
    assert lines[:3] == ["FROM ./chat.gguf", "PARAMETER temperature 0.6", "PARAMETER top_k 20"]
    assert lines[3].startswith('TEMPLATE """{{- range .Messages }}<|im_start|>{{ .Role }}')
    assert lines[-1] == 'PARAMETER stop "<|im_end|>"'


def test_names_that_llama_cpp_finds(tmp_path: Path) -> None:
    made = CliRunner().invoke(
        app, ["quantize", "tiny", "--recipe", "q5_k_m", "-o", str(tmp_path / "x.gguf")]
    )
    assert made.exit_code == 0
    assert f"next: llama-server -m {tmp_path}/x.gguf" in made.stdout
    for repository in ("ann/tiny", "ann/tiny-GGUF", "ann/tiny-q5_k_m"):
        (name,) = names_for(tmp_path / "x.gguf", repository)
        assert name.upper() == "TINY-Q5_K_M.GGUF"


def test_what_serves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.tiny_folder()
    assert command(folder) == f"vllm serve {folder}"
    # Nothing that an engine loads.
    assert next_lines(tmp_path, "tiny") == [
        f"next: qtool eval {tmp_path} --against tiny --text FILE"
    ]
    monkeypatch.chdir(tmp_path.parent)  # a folder that hides what it was made of
    assert next_lines(tmp_path, tmp_path.name) == [f"next: qtool eval {tmp_path} --text FILE"]
    monkeypatch.setattr(serve, "loads", lambda artifact: "vllm")
    assert next_lines(Path("tiny"), "tiny") == [  # the name of the shipped model is no path
        "next: vllm serve ./tiny", "next: qtool eval ./tiny --against tiny --text FILE",
    ]  # fmt: skip


def test_the_part_that_sees_is_served_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was left out of the file, as llama.cpp has it."""
    (file := tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(serve, "loads", lambda artifact: "llama.cpp")
    monkeypatch.setattr(serve, "_runs_here", lambda artifact: True)
    for left, more in (
        ("visual.blocks.0.attn.qkv.weight", " --mmproj FILE"),
        ("mtp.fc.weight", ""),
    ):
        said = next_lines(file, "tiny", left=["lm_head.weight", left])
        assert said[0] == f"next: llama-server -m {file}{more}"


def test_the_command_that_comes_next_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the true names: of a model in a folder with a space, and of an output that is called
    like an option."""
    shutil.copytree(hub.tiny_folder(), tmp_path / "my model")
    (tmp_path / "a text.txt").write_text("How does it go on? " * 400, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = ["quantize", "my model", "--recipe", "w8-rtn", "-o", "./-out"]
    made = CliRunner().invoke(app, words)
    (line,) = (one for one in made.stdout.splitlines() if one.startswith("next: qtool eval"))
    pasted = shlex.split(line.removeprefix("next: qtool ").replace("FILE", "'a text.txt'"))
    measured = CliRunner().invoke(app, [*pasted, "--windows", "1", "--length", "64", "--no-cache"])
    assert measured.exit_code == 0 and "KL" in measured.stdout, (line, measured.output)


def test_what_a_format_was_made_for_is_named_first(tmp_path: Path) -> None:
    """SGLang has a loader for bitsandbytes, but transformers is what it is written for."""
    out = tmp_path / "out"
    words = ["quantize", "tiny", "--recipe", "int8-llmint8", "--set", "llm_int8.outliers=false"]
    made = CliRunner().invoke(app, [*words, "-o", str(out)])
    assert made.exit_code == 0 and f"next: transformers serve {out}" in made.stdout
    assert "sglang" not in made.stdout + (out / "README.md").read_text()
