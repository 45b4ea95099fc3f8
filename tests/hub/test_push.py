"""From a hub and back to it, on loopback: quantize by name, push, inspect what lies there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from qtool import hub, schemas
from qtool.cards.card import parts, with_quality
from qtool.cli.main import app
from qtool.errors import QtoolError
from support.hub import hub_server
from support.hub.hub_here import hub_here

ALIAS = hub.ALIASES["llama-7b"]
EVAL = {
    "perplexity": 7.25,
    "reference_perplexity": 7.125,
    "kld": {"mean": 0.0125},
    "top1_agreement": 0.975,
    "protocol": {"text": "/some/where/text.txt"},
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.HubServer]:
    """A hub that has the shipped model under the alias's id, at its commit."""
    source = tmp_path / "source"
    source.mkdir()
    for path in hub.tiny_folder().iterdir():
        if path.suffix == ".json" or path.name == "model.safetensors":
            (source / path.name).write_bytes(path.read_bytes())
    (source / "README.md").write_text("---\nlicense: other\nlicense_name: mine\n---\n# it\n")
    monkeypatch.chdir(tmp_path)
    with hub_here(
        monkeypatch, tmp_path, {ALIAS.repository: source}, {ALIAS.repository: ALIAS.revision}
    ) as running:
        running.uploads = tmp_path / "uploads"
        running.uploads.mkdir()
        yield running


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.stdout


def refusal(*arguments: object) -> str:
    with pytest.raises(QtoolError) as error:
        run(*arguments)
    assert "\n" not in str(error.value) and hub_server.TOKEN not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "less",
    [
        ("--samples", 2, "--length", 64, "--set", "awq.grid=1"),
        pytest.param((), marks=pytest.mark.slow),
    ],
)
def test_an_alias_there_and_back(
    server: hub_server.HubServer, monkeypatch: pytest.MonkeyPatch, less: tuple[object, ...]
) -> None:
    said = run("quantize", "llama-7b", "--recipe", "w4g128-awq", *less)
    assert "next: " in said
    artifact = Path("llama-7b-w4g128-awq")
    assert "nothing wrong" in run("verify", artifact)
    card = (artifact / "README.md").read_text()
    head, _ = parts(card)
    assert head["base_model"] == "huggyllama/llama-7b"
    assert head["base_model_relation"] == "quantized" and head["library_name"] == "transformers"
    assert head["license"] == "other" and head["license_name"] == "mine"
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    Path("llama-7b-w4g128-awq.eval.json").write_text(json.dumps(EVAL))
    pushed = json.loads(run("push", artifact, "ann/llama-7b-AWQ", "--private", "--json"))
    Draft202012Validator(json.loads(schemas.text("push"))).validate(pushed)
    assert pushed["url"] == f"{server.endpoint}/ann/llama-7b-AWQ" and pushed["private"]
    assert server.private == {"ann/llama-7b-AWQ"}
    assert server.messages == [f"{artifact}, made with qtool {hub.qtool.__version__}"]
    there = server.repositories["ann/llama-7b-AWQ"]
    names = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    assert names == {file["name"] for file in pushed["files"]}
    assert names == {path.name for path in artifact.iterdir()}
    for name in names - {"README.md"}:
        assert (there / name).read_bytes() == (artifact / name).read_bytes()
    head, body = parts((there / "README.md").read_text())
    assert head["base_model"] == "huggyllama/llama-7b" and "quantized" in head["tags"]
    assert "| text.txt | 7.2500 | 7.1250 | 0.01250 | 97.50% |" in body
    assert body.index("## Quality") < body.index("## Provenance")
    # Seen from elsewhere: by its headers alone, and only with the token.
    found = json.loads(run("inspect", "ann/llama-7b-AWQ", "--json"))
    assert found["format"] == "awq"
    monkeypatch.delenv("HF_TOKEN")
    assert "does not exist, or is private" in refusal("inspect", "ann/llama-7b-AWQ")
    # Again: nothing is sent twice, and its weights neither.
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    sent = dict(server.uploaded)
    run("push", artifact, "ann/llama-7b-AWQ", "--message", "once more")
    assert dict(server.uploaded) == sent and server.messages[1] == "once more"
    assert server.uploads is not None
    assert sent == {oid: (server.uploads / oid).stat().st_size for oid in sent}


def test_a_gguf_file(server: hub_server.HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    run("quantize", "llama-7b", "--recipe", "q4_k_m")
    said = run("push", "llama-7b-q4_k_m.gguf", "ann/llama-7b-GGUF", "--revision", "trial")
    assert "next: llama-server -hf ann/llama-7b-GGUF:Q4_K_M" in said
    there = server.repositories["ann/llama-7b-GGUF"]
    assert {path.name for path in there.iterdir()} == {"README.md", "llama-7b-Q4_K_M.gguf"}
    head, body = parts((there / "README.md").read_text())
    assert head["base_model"] == "huggyllama/llama-7b" and head["library_name"] == "gguf"
    assert "llama-server -hf ann/llama-7b-GGUF:Q4_K_M" in body
    assert server.branches == {"ann/llama-7b-GGUF": {"trial"}}
    found = json.loads(run("inspect", "ann/llama-7b-GGUF", "--json"))
    assert found["format"] == "gguf" and found["file_type"] == "Q4_K_M"
    # And as a model again, under the name that llama.cpp gives it.
    assert hub.resolve("ann/llama-7b-GGUF:Q4_K_M").read_bytes()[:4] == b"GGUF"


def test_what_is_not_pushed(
    server: hub_server.HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "source"
    assert "nobody is logged in; `hf auth login`" in refusal("push", folder, "ann/x")
    assert "nothing: no such file or folder" in refusal("push", tmp_path / "nothing", "ann/x")
    monkeypatch.setenv("HF_TOKEN", "hf_ofNobody")
    assert "log in with `hf auth login`, or set HF_TOKEN" in refusal("push", folder, "ann/x")
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    for name in ("ann", "ann/a--b", "ann/x@main", "../x"):
        assert name in refusal("push", folder, name)
    assert "(status 403)" in refusal("push", folder, "bob/x")
    (tmp_path / "eval.json").write_text("{}")
    assert "no `perplexity`" in refusal("push", folder, "ann/x", "--eval", tmp_path / "eval.json")
    assert "no such file or folder" in refusal("push", tmp_path / "nothing", "ann/x")
    (folder / "model.safetensors").write_bytes(b"\0" * 8)
    said = refusal("push", folder, "ann/x")
    assert "does not pass verify and is not pushed" in said and "`qtool verify " in said
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal("push", folder, "ann/x")
    assert not server.uploaded and not server.messages


def test_files_of_an_earlier_push(
    server: hub_server.HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    source = tmp_path / "source"
    run("push", source, "ann/x")
    there = server.repositories["ann/x"]
    stale = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "spiece.model"]
    for name in [*stale, "picture.png", "x-Q8_0.gguf"]:
        (there / name).write_bytes(b"other")
    (there / "onnx").mkdir()
    (there / "onnx" / "config.json").write_bytes(b"other")
    before = {path.name for path in there.iterdir()}
    said = refusal("push", source, "ann/x", "--message", "second")
    assert "has files of another model" in said and "--replace removes them" in said
    assert all(name in said for name in stale) and "picture" not in said and "onnx" not in said
    assert {path.name for path in there.iterdir()} == before and "second" not in server.messages
    assert "README.md" not in said
    (there / "README.md").write_text("by hand", encoding="utf-8")
    result = CliRunner().invoke(app, ["push", str(source), "ann/x", "--replace"])
    assert result.exit_code == 0, result.output
    assert "replacing the README.md that is there (the history keeps it)" in result.stderr
    assert "left as they were: onnx/config.json, picture.png, x-Q8_0.gguf" in result.stderr
    assert {path.name for path in there.iterdir()} == before - set(stale)
    again = CliRunner().invoke(app, ["push", str(source), "ann/x"])  # nothing is replaced any more
    assert again.exit_code == 0 and "README.md" not in again.stderr


def test_gguf_files_of_other_kinds_stay(
    server: hub_server.HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    run("quantize", "tiny", "--recipe", "q8_0", "-o", "t.gguf")
    run("push", "t.gguf", "ann/t-GGUF")
    there = server.repositories["ann/t-GGUF"]
    (name,) = (path.name for path in there.glob("*.gguf"))
    (there / "t-Q4_K_M.gguf").write_bytes(b"GGUF")
    run("push", "t.gguf", "ann/t-GGUF")
    part = name.replace(".gguf", "-00001-of-00002.gguf")
    (there / part).write_bytes(b"GGUF")
    said = refusal("push", "t.gguf", "ann/t-GGUF")
    assert part in said and "Q4_K_M" not in said


def test_private_is_what_the_hub_says(
    server: hub_server.HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    source = tmp_path / "source"
    assert not json.loads(run("push", source, "ann/x", "--json"))["private"]
    sent = list(server.messages)
    said = refusal("push", source, "ann/x", "--private", "--message", "secret")
    assert "ann/x on the hub is not private, and --private does not change" in said
    assert server.messages == sent
    server.private.add("ann/x")
    for more in ((), ("--private",)):
        assert json.loads(run("push", source, "ann/x", "--json", *more))["private"]
    server.deaf_to_private = True
    assert "is not private" in refusal("push", source, "ann/y", "--private")
    assert not list(server.repositories["ann/y"].iterdir())


def test_links_to_elsewhere_are_not_published(
    server: hub_server.HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    (tmp_path / "id_rsa").write_text("a key")
    (tmp_path / "secrets").mkdir()
    link = tmp_path / "source" / "notes.txt"
    for target in (tmp_path / "id_rsa", tmp_path / "secrets"):
        link.symlink_to(target)
        said = refusal("push", tmp_path / "source", "ann/x")
        assert said.startswith(f"{link}: a link to {target}, outside of the artifact")
        assert not server.messages and "ann/x" not in server.repositories
        link.unlink()
    link.symlink_to("config.json")
    run("push", tmp_path / "source", "ann/x")
    (tmp_path / "ggufs").mkdir()
    run("quantize", "tiny", "--recipe", "q8_0", "-o", "t.gguf")
    (tmp_path / "ggufs" / "a.gguf").symlink_to(tmp_path / "t.gguf")
    assert "outside of the artifact" in refusal("push", tmp_path / "ggufs", "ann/z")
    # In the cache every file is a link to the store.
    run("push", hub.resolve("llama-7b"), "ann/y")
    assert (server.repositories["ann/y"] / "config.json").is_file()


def test_only_what_an_artifact_is_made_of_is_sent(
    server: hub_server.HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    out = tmp_path / "out"
    run("quantize", "tiny", "--recipe", "w4g64-rtn", "--max-shard-size", "500kB", "-o", out)
    (out / "LICENSE.txt").write_text("mine")
    made = {path.name for path in out.iterdir()}
    assert "model.safetensors.index.json" in made and "quant_config.json" in made
    (out / "logs" / "run").mkdir(parents=True)
    others = ["notes.txt", "optimizer.pt", "old-model.bak", "logs/run/.env", "logs/run/a.log"]
    for name in [*others, ".netrc"]:
        (out / name).write_text("secret")
    (out / "eval.json").write_text(json.dumps(EVAL))
    result = CliRunner().invoke(app, ["push", str(out), "ann/x"])
    assert result.exit_code == 0, result.output
    left = ["logs/run/a.log", "notes.txt", "old-model.bak", "optimizer.pt"]
    assert f"not sent, being no part of the artifact: {', '.join(left)}\n" in result.stderr
    there = server.repositories["ann/x"]
    assert {path.name for path in there.rglob("*")} == made
    assert "7.2500" in (there / "README.md").read_text()
    assert json.loads(run("push", out, "ann/x", "--json"))["left_behind"] == left
    # And of a folder with a GGUF file.
    (tmp_path / "g").mkdir()
    run("quantize", "tiny", "--recipe", "q8_0", "-o", tmp_path / "g" / "t.gguf")
    (tmp_path / "g" / "notes.txt").write_text("secret")
    pushed = json.loads(run("push", tmp_path / "g", "ann/t-GGUF", "--json"))
    assert pushed["left_behind"] == ["notes.txt"] and len(pushed["files"]) == 2


def test_a_server_that_fails(
    server: hub_server.HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    server.refusals["/commit/"] = hub_server.Refusal(500, 99)
    source = tmp_path / "source"
    assert "fails on the server's side (status 500)" in refusal("push", source, "ann/x")
    assert not server.messages
    # What lies there is compared with what was sent.
    server.refusals.clear()
    server.damaged_uploads = True
    said = refusal("push", source, "ann/x")
    assert "model.safetensors, which is not what was sent" in said
    server.damaged_uploads = False
    server.damaged_cards = True
    assert "README.md, which is not what was sent" in refusal("push", source, "ann/z")


def test_cards() -> None:
    head, body = parts("---\nlicense: mit\ntags:\n- a\n---\n# title\n")
    assert head == {"license": "mit", "tags": ["a"]} and body == "# title\n"
    assert parts("# no head\n") == ({}, "# no head\n")
    assert parts("---\n[: broken\n---\ntext") == ({}, "text")
    once = with_quality("# t\n\n## Provenance\n\nx\n", [EVAL])
    assert with_quality(once, [EVAL]) == once
    other: dict[str, Any] = {**EVAL, "perplexity": 9.0}
    assert with_quality(once, [other]).count("## Quality") == 1
    assert "9.0000" in with_quality(once, [other])
