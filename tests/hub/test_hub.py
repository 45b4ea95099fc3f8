"""Models by name: aliases, folders, downloads from a hub on loopback, and what can go wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qtool import api, hub
from qtool.cards.card import parts
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cli.main import app
from qtool.errors import SourceError
from qtool.provenance.embedded import read
from support.hub import hub_server
from support.hub.hub_here import hub_here
from support.models import header_files
from support.runs.quantizing import first_block_of_tiny

# Run in a process of its own: huggingface_hub reads its environment when it is imported.
RESOLVE = """
import json, sys
from qtool.errors import QtoolError
from qtool.hub import resolve
found = []
for model in sys.argv[1:]:
    try:
        found.append(str(resolve(model)))
    except QtoolError as error:
        found.append(f"{type(error).__name__}: {error}")
print(json.dumps(found))
"""


def resolve_in_process(endpoint: str, cache: Path, *models: str, **more: str) -> list[str]:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))
    }
    environment |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        **more,
    }
    result = subprocess.run(
        [sys.executable, "-c", RESOLVE, *models],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert isinstance(found, list)
    return found


def model(folder: Path) -> Path:
    header_files.write(folder, header_files.llama(vocabulary=32768), {"model_type": "llama"})
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(b"\0")
    (folder / "README.md").write_text("# a model")
    (folder / "pytorch_model.bin").write_bytes(b"pickle" * 100)
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.safetensors").write_bytes(b"x" * 1000)
    return folder


def test_download(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    only_bin = tmp_path / "bin"
    only_bin.mkdir()
    (only_bin / "pytorch_model.bin").write_bytes(b"pickle")
    (only_bin / "config.json").write_text("{}")
    gguf = tmp_path / "gguf"
    gguf.mkdir()
    (gguf / "m-q4.gguf").write_bytes(b"GGUF")
    alias = hub.ALIASES["llama-7b"]
    repositories = {
        "ann/llama": source,
        "ann/bin": only_bin,
        "ann/gguf": gguf,
        alias.repository: source,
    }
    with hub_server.serve(repositories, {alias.repository: alias.revision}) as server:
        server.cut_once["model.safetensors"] = 25_000_000
        cache = tmp_path / "cache"
        good, by_alias, *errors = resolve_in_process(
            server.endpoint,
            cache,
            "ann/llama",
            "llama-7b",
            "ann/bin",
            "ann/gguf",
            "ann/gated",
            "ann/nothing",
            "ann/llama@v9",
        )
        # Only what is needed, and whole although it broke off.
        folder = Path(good)
        names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
        wanted = {"model.safetensors", "config.json", "tokenizer.json", "tokenizer.model"}
        # The card says things that GGUF files record.
        assert names == wanted | {"README.md"}
        size = (source / "model.safetensors").stat().st_size
        assert (folder / "model.safetensors").read_bytes() == (
            source / "model.safetensors"
        ).read_bytes()
        # Once for each of the two names, but for the piece (of 10 MB) that was under way.
        again = server.sent["model.safetensors"] - 2 * size
        assert 0 <= again < 11_000_000 < 25_000_000 < size
        assert server.sent["pytorch_model.bin"] == 0
        # An alias names one commit; a name means the newest.
        assert Path(by_alias).name == alias.revision
        assert folder.name == hub_server.COMMIT
        assert f"GET {alias.repository}/resolve/{alias.revision}/config.json" in server.requests
        assert len(Checkpoint.open(folder).tensors) == 21
        sentences = (
            "has only Python pickles (pytorch_model.bin)",
            "ann/gguf on the hub (there is no such file or folder here) has only GGUF files, such "
            "as m-q4.",
            "ann/gated on the hub (there is no such file or folder here) is gated",
            "ann/nothing on the hub (there is no such file or folder here) does not exist, or is "
            "private",
            "has no revision 'v9'",
        )
        for error, sentence in zip(errors, sentences, strict=True):
            kind = "UnsupportedError: " if "GGUF" in sentence else "SourceError: "
            assert error.startswith(kind) and sentence in error
            assert "\n" not in error
        # A second time nothing is fetched but the name of the newest commit.
        before = server.sent.total()
        assert resolve_in_process(server.endpoint, cache, "ann/llama", "llama-7b") == [
            good,
            by_alias,
        ]
        assert server.sent.total() == before
    # Without the hub the cache serves; what is not in it is said.
    offline = resolve_in_process(
        server.endpoint, cache, "ann/llama", "ann/other", HF_HUB_OFFLINE="1"
    )
    assert offline[0] == good and "cannot be reached" in offline[1]
    gone = resolve_in_process(server.endpoint, tmp_path / "empty", "ann/llama")
    assert "cannot be reached" in gone[0]


def test_local_paths_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("ann/llama")
    folder.mkdir(parents=True)
    assert hub.resolve("ann/llama") == folder
    assert hub.public_name("ann/llama") is None
    for missing in ("./nothing", "/no/such/path", "nothing", "a/b/c", "../x"):
        with pytest.raises(SourceError, match=r"no such file or folder, and no hub id .*llama-7b"):
            hub.resolve(missing)
    for missing in ("out/model.gguf", "out/model.safetensors"):  # and no repository
        with pytest.raises(SourceError, match=f"^{missing}: no such file or folder$"):
            hub.resolve(missing)


def test_aliases_are_pinned() -> None:
    assert hub.ALIASES["llama-7b"].repository == "huggyllama/llama-7b"
    for found in hub.ALIASES.values():
        assert hub.is_hub_id(found.repository)
        assert len(found.revision) == 40 and int(found.revision, 16)
    assert hub.parse("ann/llama@v1") == hub.HubModel("ann/llama", "v1")
    assert hub.public_name("smollm2-135m") == str(hub.ALIASES["smollm2-135m"])
    assert hub.public_name("tiny") == "tiny"
    assert hub.public_name("ann/llama") == "ann/llama"


def test_the_commit_is_a_part_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = {"ann/llama": "1" * 40}
    with hub_here(monkeypatch, tmp_path, {"ann/llama": hub.tiny_folder()}, commits):
        api.quantize("ann/llama", "w4g128-rtn", tmp_path / "out")
    record = json.loads((tmp_path / "out" / "qtool.json").read_text())
    assert record["source"]["name"] == f"ann/llama@{'1' * 40}"
    head, _ = parts((tmp_path / "out" / "README.md").read_text())
    assert head["base_model"] == "ann/llama"


@pytest.mark.parametrize("typed", ["ann/llama", "ann/llama:Q8_0"])
@pytest.mark.parametrize("recipe", ["q8_0", "w8-rtn"])
def test_what_was_made_of_a_branch_is_made_again_when_it_has_moved(
    typed: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit is recorded, whether a checkpoint or a GGUF file is made of one or the other."""
    source, newer = first_block_of_tiny(tmp_path / "source"), tmp_path / "newer"
    if typed.endswith("Q8_0"):
        api.quantize(source, "q8_0", tmp_path / "q8" / "a-Q8_0.gguf")
        source = tmp_path / "q8"
    newer.mkdir()
    (newer / "README.md").write_text("gone")
    out = tmp_path / ("out.gguf" if recipe == "q8_0" else "out")
    with hub_here(monkeypatch, tmp_path, {"ann/llama": source}, {"ann/llama": "1" * 40}) as server:
        runner = CliRunner()
        words = ["quantize", typed, "--recipe", recipe, "-o", str(out), "--provenance"]
        words += ["--requantize"] if source.name == "q8" else []
        assert runner.invoke(app, words, catch_exceptions=False).exit_code == 0
        if recipe == "q8_0":
            planned = runner.invoke(app, ["plan", *words[1:4], "--json"], catch_exceptions=False)
            if not typed.endswith("Q8_0"):
                assert json.loads(planned.stdout)["size_bytes"] == out.stat().st_size
        name, _, quant = typed.partition(":")
        recorded = f"{name}@{'1' * 40}{':' * bool(quant)}{quant}"
        assert read(out).source == recorded
        server.repositories["ann/llama"], server.commits["ann/llama"] = newer, "2" * 40
        again = runner.invoke(app, ["reproduce", str(out)], catch_exceptions=False)
        assert again.exit_code == 0, again.output
    stated = json.loads((tmp_path / f"{out.name}.provenance.json").read_text())
    inputs = stated["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert inputs[0]["uri"].startswith(f"hf://ann/llama@{'1' * 40}/")


def test_tiny_is_shipped() -> None:
    assert (hub.resolve("tiny") / "config.json").is_file()
