"""`qtool download`, from a hub on loopback: what is fetched, resumed, checked and refused."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

import qtool
from qtool import schemas
from qtool.cli.main import app
from qtool.errors import QtoolError
from qtool.hub import resolve, tiny_folder
from qtool.hub.failures import ATTEMPTS, pause_before_next
from support.hub import hub_server
from support.hub.hub_here import hub_here
from support.models import header_files

SIZE = 6_000_000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of some megabytes, with much that nobody needs."""
    folder = tmp_path_factory.mktemp("source")
    header_files.write(folder, header_files.llama(vocabulary=256), {"model_type": "llama"})
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"weights" * 10_000)
    for name, content in {
        "README.md": b"---\nlicense: mit\n---\n",
        "pytorch_model.bin": b"pickle",
        "image.png": b"image",
        "onnx/model.onnx": b"onnx",
        "a-q4_k_m.gguf": b"GGUF" + bytes(100),
        "a-Q8_0.gguf": b"GGUF" + bytes(200),
        "mmproj-Q8_0.gguf": b"GGUF",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    assert (folder / "model.safetensors").stat().st_size < SIZE
    return folder


@pytest.fixture
def server(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[hub_server.HubServer]:
    repositories = {"ann/llama": source, "ann/gated": source}
    with hub_here(monkeypatch, tmp_path, repositories) as running:
        yield running


def download(*arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["download", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    Draft202012Validator(json.loads(schemas.text("download"))).validate(found)
    assert isinstance(found, dict)
    return found


def refusal(*arguments: str) -> str:
    with pytest.raises(QtoolError) as error:
        CliRunner().invoke(app, ["download", *arguments], catch_exceptions=False)
    said = str(error.value)
    assert "\n" not in said
    return said


def test_only_what_is_needed_once(server: hub_server.HubServer, source: Path) -> None:
    found = download("ann/llama")
    folder = Path(str(found["folder"]))
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert names == {"model.safetensors", "config.json", "tokenizer.json", "README.md"}
    assert found["commit"] == hub_server.COMMIT == folder.name
    assert found["fetched_bytes"] == found["size_bytes"] == server.sent.total()
    for name in names:
        assert (folder / name).read_bytes() == (source / name).read_bytes()
        assert server.sent[name] == (source / name).stat().st_size
    # Again: the newest commit is asked for, and nothing else.
    server.requests.clear()
    again = download("ann/llama")
    assert again["folder"] == found["folder"] and again["fetched_bytes"] == 0
    assert server.requests == ["GET api/models/ann/llama/revision/main"]
    # A commit never changes: no request at all.
    server.requests.clear()
    assert download(f"ann/llama@{hub_server.COMMIT}")["fetched_bytes"] == 0
    assert server.requests == []
    assert not list(folder.parents[1].glob("blobs/*.incomplete"))


def test_what_ships_with_qtool_needs_no_hub() -> None:
    found = download("tiny")
    assert found["folder"] == str(tiny_folder()) and found["fetched_bytes"] == 0
    assert {"config.json", "model.safetensors"} <= {one["name"] for one in found["files"]}  # type: ignore[attr-defined]
    assert qtool.download("tiny") == tiny_folder()
    said = CliRunner().invoke(app, ["download", "tiny"], catch_exceptions=False).stdout
    assert "tiny ships with qtool (6 files, 7.5 MB): nothing to download\n" in said
    assert said.splitlines()[-1] == str(tiny_folder())
    assert "--include: tiny ships with qtool" in refusal("tiny", "--include", "*.json")


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried at once."""
    monkeypatch.setattr("qtool.hub.snapshot._pauses", lambda *_: lambda *_: None)


@pytest.mark.usefixtures("no_pauses")
def test_a_connection_that_breaks_off(server: hub_server.HubServer, source: Path) -> None:
    server.cut_once["model.safetensors"] = 2_000_001
    download("ann/llama")
    size = (source / "model.safetensors").stat().st_size
    assert server.sent["model.safetensors"] == size  # no byte twice
    assert server.ranges == [f"bytes=2000001-{size - 1}"]


@pytest.mark.usefixtures("no_pauses")
def test_a_server_without_ranges(server: hub_server.HubServer, source: Path) -> None:
    server.cut_once["model.safetensors"] = 2_000_001
    server.without_ranges = True
    folder = Path(str(download("ann/llama")["folder"]))
    name = "model.safetensors"
    assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert server.sent[name] == (source / name).stat().st_size + 2_000_001


def test_a_killed_download_goes_on(
    server: hub_server.HubServer, source: Path, tmp_path: Path
) -> None:
    """From what was on the disk when the process was killed, which is not sent again."""
    name = "model.safetensors"
    data = (source / name).read_bytes()
    server.held[name] = 2_500_000
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": server.endpoint,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HOME": str(tmp_path),
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, "-m", "qtool", "download", "ann/llama"]
    blobs = tmp_path / "cache" / "models--ann--llama" / "blobs"
    part = blobs / f"{hashlib.sha256(data).hexdigest()}.incomplete"
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not part.exists() or part.stat().st_size < 500_000:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    have = part.stat().st_size
    assert 500_000 <= have <= server.held.pop(name) < len(data)
    server.gives_up.set()
    server.sent.clear()
    found = download("ann/llama")
    assert server.ranges == [f"bytes={have}-{len(data) - 1}"]
    assert server.sent[name] == len(data) - have
    assert (Path(str(found["folder"])) / name).read_bytes() == data


def test_bad_digests(server: hub_server.HubServer, tmp_path: Path) -> None:
    for name, kind in (("model.safetensors", 64), ("config.json", 40)):
        server.damaged = {name: 1}
        said = refusal("ann/llama")
        assert said.startswith("ann/llama on the hub") and "run this again" in said
        assert f": {name} came with the digest " in said
        stated = said.partition("the hub states ")[2].partition(":")[0]
        assert len(stated) == kind
        blobs = tmp_path / "cache" / "models--ann--llama" / "blobs"
        assert not list(blobs.glob(f"{stated}*"))
        assert not (blobs.parent / "snapshots").exists()
        shutil.rmtree(blobs.parent)
    server.damaged = {}
    download("ann/llama")


def test_a_file_of_the_cache_that_was_changed(server: hub_server.HubServer) -> None:
    path = Path(str(download("ann/llama")["folder"])) / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"W")
    said = refusal("ann/llama")
    assert "model.safetensors in the cache is not what the hub states" in said
    assert not path.exists() and not path.is_symlink()
    assert download("ann/llama")["fetched_bytes"] == path.stat().st_size


def test_what_was_compared_is_said(
    server: hub_server.HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def said() -> str:
        result = CliRunner().invoke(app, ["download", "ann/llama"], catch_exceptions=False)
        return str(result.stdout.splitlines()[0])

    assert said().endswith(" MB fetched and compared with the digests")
    assert said().endswith("; 0.0 MB fetched")
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "other"))
    assert said().endswith("; 0.0 MB fetched, 4 files of the cache compared with their digests")


def test_one_that_another_program_brought(
    server: hub_server.HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Path(str(download("ann/llama")["folder"]))
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "other"))
    assert download("ann/llama")["checked_files"] == 4
    assert download("ann/llama")["checked_files"] == 0
    blob = (folder / "config.json").resolve()
    blob.write_bytes(blob.read_bytes().replace(b"l", b"L"))
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "third"))
    assert "config.json in the cache is not what the hub states" in refusal("ann/llama")


def test_offline(server: hub_server.HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    online = download("ann/llama")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.requests.clear()
    assert download("ann/llama")["folder"] == online["folder"]
    assert resolve("ann/llama") == Path(str(online["folder"]))
    said = refusal("ann/other")
    assert "HF_HUB_OFFLINE is set, and the cache has no complete copy" in said
    assert server.requests == []


def test_gated(server: hub_server.HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal("ann/gated")
    assert f"is gated: accept its terms on its page ({server.endpoint}/ann/gated)" in said
    assert "`hf auth login` or set HF_TOKEN" in said
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    said = refusal("ann/gated")
    assert "the account of your token has no access" in said and hub_server.TOKEN not in said
    server.granted.add(hub_server.TOKEN)
    assert download("ann/gated")["fetched_bytes"]


def test_what_is_not_there(server: hub_server.HubServer, tmp_path: Path) -> None:
    assert "ann/nothing on the hub" in refusal("ann/nothing")
    assert "has no revision 'v9'" in refusal("ann/llama@v9")
    assert "no file like *.txt; it has README.md, a-Q8_0.gguf" in refusal(
        "ann/llama", "--include", "*.txt"
    )
    assert "no hub id (OWNER/NAME, with @REVISION or :QUANT)" in refusal("llama")
    assert "lies here, so that there is nothing to download" in refusal(str(tmp_path))
    assert "Python pickles can run any code" in refusal("ann/llama", "--include", "*.bin")


def test_busy_servers(
    server: hub_server.HubServer, monkeypatch: pytest.MonkeyPatch, source: Path
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("threading.Event.wait", lambda _, seconds=None: slept.append(seconds))
    refusals = server.refusals
    refusals["revision/main"] = hub_server.Refusal(429, 1, retry_after="7")
    refusals["resolve/" + hub_server.COMMIT + "/model"] = hub_server.Refusal(503, 2)
    download("ann/llama")
    assert {7.0, 1.0, 2.0} <= {second for second in slept if second is not None}
    assert server.sent["model.safetensors"] == (source / "model.safetensors").stat().st_size
    # Too long to wait for, and too often.
    refusals["revision/main"] = hub_server.Refusal(429, 99, retry_after="3600")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nonexistent/cache")
    said = refusal("ann/llama")
    assert "too many requests (status 429) and asks to wait 3600 s" in said
    refusals["revision/main"] = hub_server.Refusal(500, 99)
    asked = len(server.requests)
    assert "fails on the server's side (status 500); try again later" in refusal("ann/llama")
    assert len(server.requests) - asked == ATTEMPTS + 1  # and once by huggingface_hub


@pytest.mark.parametrize("name", ["../../../x.json", "/x.json", "a/../x.json", "c:x.json", "a\\b"])
def test_names_that_lead_elsewhere(name: str, server: hub_server.HubServer, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("mine")
    server.more_files = [{"rfilename": name, "size": 4, "blobId": "0" * 40}]
    assert "would lie outside of its folder" in refusal("ann/llama")
    assert (tmp_path / "x.json").read_text() == "mine" and server.sent.total() == 0


def test_a_proxy_in_between(server: hub_server.HubServer) -> None:
    server.is_a_page = True
    said = refusal("ann/llama")
    assert "answers with something else than a hub does; check HF_ENDPOINT" in said


def test_pauses() -> None:
    error = ConnectionError("gone")
    assert [pause_before_next(error, n) for n in (1, 2, 3, 4, 5)] == [1.0, 2.0, 4.0, 8.0, None]


def test_no_room(server: hub_server.HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    said = refusal("ann/llama")
    assert "the disk is too full for it" in said and "1,000 free" in said and "HF_HOME" in said
    assert server.sent.total() == 0


def test_gguf_by_its_quantization(server: hub_server.HubServer) -> None:
    found = download("ann/llama:Q4_K_M")
    assert str(found["file"]).endswith("/a-q4_k_m.gguf")
    assert resolve("ann/llama:q8_0").name == "a-Q8_0.gguf"
    assert server.sent.total() == 104 + 204
    assert "no file like *Q5_0.gguf" in refusal("ann/llama:Q5_0")
    only = download("ann/llama", "--include", "*.png")
    assert [one["name"] for one in only["files"]] == ["image.png"]  # type: ignore[index,attr-defined]


def test_a_hub_without_digests(server: hub_server.HubServer, source: Path) -> None:
    server.without_digests = True
    found = download("ann/llama")
    folder = Path(str(found["folder"]))
    # The ETags that came with the files are digests too.
    assert found["checked_files"] == 4
    data = (source / "model.safetensors").read_bytes()
    files: dict[str, object] = {f["name"]: f["digest"] for f in found["files"]}  # type: ignore[index,attr-defined]
    assert files["model.safetensors"] == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert str(files["config.json"]).startswith("git-sha1:")
    assert download("ann/llama")["checked_files"] == 0
    shutil.rmtree(folder.parents[1])
    server.damaged = {"model.safetensors": 1_000_000}
    said = refusal("ann/llama")
    assert "model.safetensors in the cache is not what the hub states" in said
    assert not list(folder.parents[1].glob("blobs/" + hashlib.sha256(data).hexdigest()))


def test_a_hub_without_digests_nor_etags(server: hub_server.HubServer) -> None:
    server.without_digests = True
    server.odd_etags = {"config.json"}
    result = CliRunner().invoke(app, ["download", "ann/llama"], catch_exceptions=False)
    assert result.exit_code == 0 and (
        "no digest is known of 1 files, which were not compared: config.json" in result.stderr
    )
    server.odd_etags = {"model.safetensors"}
    shutil.rmtree(Path(result.stdout.splitlines()[1]).parents[1])
    said = refusal("ann/llama")
    assert "neither the hub's list nor its answer states a digest of model.safetensors" in said


def test_what_another_hub_says(
    server: hub_server.HubServer, monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    pinned = f"ann/llama@{hub_server.COMMIT}"
    # One that lies, with its own bytes and their digests; then the true one.
    other = tmp_path / "other"
    shutil.copytree(source, other)
    path = other / "config.json"
    path.write_bytes(path.read_bytes().replace(b"llama", b"lLama"))
    server.repositories["ann/llama"] = other
    folder = Path(str(download(pinned)["folder"]))
    server.repositories["ann/llama"] = source
    from huggingface_hub import constants

    url = constants.HUGGINGFACE_CO_URL_TEMPLATE
    again = server.endpoint.replace("127.0.0.1", "localhost")
    monkeypatch.setattr(constants, "ENDPOINT", again)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url.replace(server.endpoint, again)
    )
    assert "config.json in the cache is not what the hub states" in refusal(pinned)
    download(pinned)
    assert (folder / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_a_link_out_of_the_cache(server: hub_server.HubServer, tmp_path: Path) -> None:
    path = Path(str(download("ann/llama")["folder"])) / "model.safetensors"
    mine = tmp_path / "mine.safetensors"
    mine.write_bytes(path.read_bytes()[:-1] + b"x")
    path.unlink()
    path.symlink_to(mine)
    assert "it is removed" in refusal("ann/llama")
    assert not path.is_symlink() and mine.is_file()


def test_lines_for_people(server: hub_server.HubServer) -> None:
    result = CliRunner().invoke(app, ["download", "ann/llama"], catch_exceptions=False)
    first, second = result.stdout.splitlines()
    assert first.startswith(f"ann/llama at {hub_server.COMMIT}: 4 files, ")
    assert Path(second).is_dir()
    assert "ann/llama, 4 files: " in result.stderr
