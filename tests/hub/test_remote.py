"""inspect of models on servers: what is fetched, and what servers may not do."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from qtool.cli.main import app
from qtool.formats.gguf_values import Kind
from qtool.remote.places import locate
from qtool.scheme import Scheme
from support.formats.artifact_files import random_quant, write_folder
from support.gguf.gguf_bytes import Gguf, entry, info
from support.hub import range_server
from support.hub.range_server import RangeServer, as_json, whole
from support.hub.remote_models import SAFETENSORS, refusal, run, server

__all__ = ["server"]

# what is fetched


def test_a_gguf_file_of_144_gb(server: RangeServer) -> None:
    big = server.files["files/big.gguf"] = range_server.big_gguf()
    assert big.size > 100e9
    start = time.process_time()
    found = json.loads(run(f"{server.url}/files/big.gguf", "--json"))
    assert time.process_time() - start < 2
    assert server.total() <= len(big.head) + 1_000_000
    assert server.connections == 1 and len(server.requests) < 16
    assert found["size_bytes"] == big.size and len(found["tensors"]) == 723
    assert found["files"] == ["big.gguf"] and found["tokenizer"]["tokens"] == 150_000


@pytest.mark.parametrize("address", ["{}/plain/", "hf://ann/llama"])
def test_fifty_shards(server: RangeServer, address: str) -> None:
    files = range_server.shards(50, {"model_type": "llama"})
    server.files |= range_server.repository("ann/llama", files)
    server.files |= {f"plain/{name}": file for name, file in files.items()}
    start = time.process_time()
    found = json.loads(run(address.format(server.url), "--json"))
    assert time.process_time() - start < 2
    heads = {n: len(f.head) for n, f in files.items() if n.endswith(".safetensors")}
    assert len(heads) == 50 and server.total() < 2_000_000
    for place, sent in server.sent.items():
        # the header and not a byte of a tensor
        assert sent == heads.get(place.rpartition("/")[2], sent)
    assert server.connections <= 17
    assert found["size_bytes"] == sum(f.size for n, f in files.items() if n in heads) > 140e9
    assert found["format"] == "dense" and len(found["tensors"]) == 80 * 9 + 3


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("awq", Scheme(4, 32, False)),
        ("gptq", Scheme(4, -1, True)),
        ("compressed-tensors", Scheme(4, 32, True)),
        ("compressed-tensors", Scheme(4, -1, True)),  # whose width a tensor tells, too
        ("dense", None),
    ],
)
def test_the_same_as_of_the_local_copy(
    server: RangeServer, tmp_path: Path, kind: str, scheme: Scheme | None
) -> None:
    name = "model.layers.0.q_proj"
    quants = {name: random_quant(scheme, 16, 64, seed=1)} if scheme else {}
    write_folder(tmp_path, kind, quants, {"norm.weight": np.ones(4, np.float32)})
    (tmp_path / "qtool.json").write_text('{"qtool_version": "0"}')
    for path in tmp_path.iterdir():
        server.files[f"o/{path.name}"] = whole(path.read_bytes())
    assert run(f"{server.url}/o", "--json") == run(tmp_path, "--json")
    one = run(f"{server.url}/o/model.safetensors", "--json")
    assert one == run(tmp_path / "model.safetensors", "--json")
    text = run(f"{server.url}/o")
    assert f"format: {kind}" in text and "qtool_version: 0" in text and "fetched: " in text


def test_addresses(server: RangeServer) -> None:
    hub_files = {"config.json": as_json({}), "model.safetensors": SAFETENSORS}
    hub_files |= {"sub/x.safetensors": SAFETENSORS, "README.md": whole(b"#")}
    server.files |= range_server.repository("ann/m", hub_files)
    listing = server.files["api/models/ann/m/revision/main"]
    server.files["api/models/ann/m/revision/refs/pr/1"] = listing
    for address in (
        "hf://ann/m", "hf://ann/m@main", "hf://ann/m@refs/pr/1", "hf://ann/m@refs%2Fpr%2F1/",
        "ann/m", f"{server.url}/ann/m", f"{server.url}/ann/m/tree/main",
        f"{server.url}/ann/m/blob/main/model.safetensors", "hf://ann/m/model.safetensors",
        "hf://ann/m/sub/x.safetensors", f"{server.url}/ann/m/resolve/main/sub/x.safetensors",
    ):  # fmt: skip
        assert json.loads(run(address, "--json"))["parameters"] == 34, address
    assert locate("hf://ann/m/sub").names == {"x.safetensors"}
    assert "no file or folder 'nothing'" in refusal("hf://ann/m/nothing")
    assert "hf://ann/m@v9 does not exist" in refusal("hf://ann/m@v9")
    assert "expected hf://OWNER/NAME" in refusal("hf://datasets/a/b")
    assert "expected hf://OWNER/NAME" in refusal("hf://alone")
    assert "'ann/a--b' is not a name on the hub" in refusal("hf://ann/a--b")
    assert "expected a .gguf or .safetensors" in refusal("hf://ann/m/README.md")
    result = CliRunner().invoke(app, ["inspect", "ann/lama"])
    assert "ann/lama: no such file or folder here, and hf://ann/lama does not" in str(
        result.exception
    )
    assert "may have a query" in refusal(f"{server.url}/x?file=1")
    for bad in ("http://", "http://h:99999/", "https://a b/", "http://h/\nx"):
        assert "not an address" in refusal(bad)


def test_several_ggufs_and_none(server: RangeServer) -> None:
    gguf = range_server.repository("ann/g", {"b-q4.gguf": SAFETENSORS, "a-q8.gguf": SAFETENSORS})
    pickle = range_server.repository("ann/p", {"pytorch_model.bin": SAFETENSORS})
    server.files |= gguf | pickle
    said = refusal("hf://ann/g")
    assert "holds 2 GGUF models; name one:\n  hf://ann/g/a-q8.gguf\n  hf://ann/g/b-q4.gguf" in said
    assert "only Python pickles" in refusal("hf://ann/p")
    assert "expected b'GGUF': no GGUF file" in refusal("hf://ann/g/b-q4.gguf")
    result = CliRunner().invoke(app, ["inspect", "hf://ann/g/b-q4.gguf", "--tensor", "x"])
    assert "only headers are fetched" in str(result.exception)


def test_split_gguf(server: RangeServer, tmp_path: Path) -> None:
    parts = [tmp_path / f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for number, path in enumerate(parts):
        keys = [
            entry("split.no", Kind.UINT16, number),
            entry("split.count", Kind.UINT16, len(parts)),
            entry("split.tensors.count", Kind.INT32, len(parts)),
        ]
        if number == 0:
            keys.append(entry("general.architecture", Kind.STRING, "llama"))
        path.write_bytes(bytes(Gguf(keys, [info(f"t{number}", [2, 4])])))
        server.files[f"f/{path.name}"] = whole(path.read_bytes())
    local = json.loads(run(parts[0], "--json"))
    for path in parts:
        assert json.loads(run(f"{server.url}/f/{path.name}", "--json")) == local
    del server.files[f"f/{parts[1].name}"]
    said = refusal(f"{server.url}/f/{parts[0].name}")
    assert f"{server.url}/f/{parts[1].name}: not there" in said


# secrets


def test_the_token_goes_to_the_hub_alone(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    files = {"config.json": as_json({}), "model.safetensors": SAFETENSORS}
    server.files |= range_server.repository("ann/m", files)
    with range_server.serve({"blob/1": SAFETENSORS}) as other:
        place = f"ann/m/resolve/{range_server.COMMIT}/model.safetensors"
        server.answers[place] = lambda h: h.answer(302, Location=f"{other.url}/blob/1?sig=hidden")
        text = run("hf://ann/m")
        assert {secret for *_, secret in server.requests} == {"Bearer hf_secret"}
        assert [secret for *_, secret in other.requests] == [None, None]
        # the second range is asked for where the first one was
        assert sum(path == place for path, *_ in server.requests) == 1
        assert "hf_secret" not in text
        del other.files["blob/1"]
        said = refusal("hf://ann/m")
        assert "not there" in said and "hidden" not in said and "hf_secret" not in said
        other.files["m.safetensors"] = SAFETENSORS
        other.requests.clear()
        run(f"{other.url}/m.safetensors?sig=hidden")
        assert other.requests and {secret for *_, secret in other.requests} == {None}


def test_a_user_in_an_address(server: RangeServer) -> None:
    server.files["m.safetensors"] = SAFETENSORS
    address = server.url.replace("//", "//ann:p%40ss@") + "/m.safetensors"
    text = run(address)
    assert {secret for *_, secret in server.requests} == {"Basic YW5uOnBAc3M="}
    assert "p%40ss" not in text
    assert "ann" not in refusal(address.replace("m.safe", "n.safe"))


def test_a_proxy(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["m.safetensors"] = SAFETENSORS
    for key in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("http_proxy", server.url)
    run("http://127.0.0.1:9/m.safetensors")
    assert ("m.safetensors", "bytes=0-7", None) in server.requests
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert "cannot be fetched" in refusal("http://127.0.0.1:9/m.safetensors")
