"""inspect of models on servers: what is fetched, and what servers may not do."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import range_server
from artifact_files import random_quant, write_folder
from gguf_bytes import Gguf, entry, info
from range_server import Handler, RangeServer, Virtual, as_json, whole
from typer.testing import CliRunner

from qtool.cli.main import app
from qtool.errors import QtoolError, SourceError
from qtool.formats.gguf_values import Kind
from qtool.formats.safetensors_file import INDEX_NAME, TensorSpec, lay_out
from qtool.remote import answers, ranges
from qtool.remote import open as remote_open
from qtool.remote.open import opened
from qtool.remote.places import locate
from qtool.scheme import Scheme

SMALL = lay_out("m", [TensorSpec("a.weight", "F16", (4, 8)), TensorSpec("b", "F32", (2,))])
SAFETENSORS = Virtual(SMALL.header, SMALL.size)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    """One that is also the hub."""
    for key in ("http_proxy", "HTTP_PROXY", "HF_TOKEN"):
        monkeypatch.delenv(key, raising=False)
    with range_server.serve({}) as running:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("{repo_id}")
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{running.url}/{''.join(template[1:])}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent/token")
        yield running


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(address: str) -> str:
    with pytest.raises(QtoolError) as caught, opened(address):
        pass
    return str(caught.value)


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


# servers that fail, or lie

HEAD = len(SMALL.header)
Answer = Callable[[Handler], None]


def ranged(first: Any, last: Any, total: Any, body: bytes = bytes(8), **more: Any) -> Answer:
    return lambda h: h.answer(206, body, Content_Range=f"bytes {first}-{last}/{total}", **more)


def _moved(handler: Handler) -> None:
    """Longer by a byte at every request."""
    size = SMALL.size + len(handler.server.requests)
    first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
    body = Virtual(SMALL.header, size).read(first, last)
    handler.answer(206, body, Content_Range=f"bytes {first}-{last}/{size}")


def _cut(handler: Handler) -> None:
    handler.close_connection = True
    handler.answer(206, bytes(3), Content_Length=8, Content_Range=f"bytes 0-7/{SMALL.size}")


def _chunked(handler: Handler) -> None:
    handler.answer(200, b"5\r\nhello\r\n" * 9, Content_Length=None, Transfer_Encoding="chunked")


def _no_http(handler: Handler) -> None:
    handler.close_connection = True
    handler.wfile.write(b"220 ready\r\n")


LIES: dict[str, tuple[Answer, str]] = {
    "the whole file": (
        lambda h: h.answer(200, bytes(100), Content_Length=10**11),
        "does not answer range requests and would send the whole file of 100000000000 bytes",
    ),
    "the whole file in chunks": (_chunked, "would send the whole file; download it"),
    "another first byte": (ranged(8, 15, 99), "bytes from byte 0 on, the server answers with 'byt"),
    "another last byte": (ranged(0, 8, 99, bytes(9)), "the server answers with 'bytes 0-8/99'"),
    "an early last byte": (ranged(0, 6, 99, bytes(7)), "the server answers with 'bytes 0-6/99'"),
    "an unknown length": (ranged(0, 7, "*"), r"the range 'bytes 0-7/*'"),
    "a huge number": (ranged(0, 7, "9" * 5000), "the server answers with the range 'bytes 0-7/99"),
    "no range at all": (lambda h: h.answer(206, bytes(8)), "answers with the range ''"),
    "several ranges": (
        lambda h: h.answer(206, bytes(8), Content_Type="multipart/byteranges; boundary=x"),
        "answers with the range ''",
    ),
    "a longer body": (ranged(0, 7, 99, bytes(90)), "'bytes 0-7/99' and a body of 90 bytes"),
    "a body cut off": (_cut, "broke off after 3 of 8 bytes); tried twice"),
    "compressed": (ranged(0, 7, 99, Content_Encoding="gzip"), "sends it compressed (gzip)"),
    "a file that grows": (_moved, "it changed meanwhile, try again"),
    "redirected in a circle": (lambda h: h.answer(302, Location=h.path), "redirected more than 5"),
    "redirected to a file": (
        lambda h: h.answer(302, Location="file:///etc/passwd"),
        "file:///etc/passwd: not an address that can be fetched",
    ),
    "redirected to half an address": (
        lambda h: h.answer(302, Location="http://[::1"),
        "redirected to http://[::1, which is no address",
    ),
    "redirected to a wrong port": (
        lambda h: h.answer(302, Location="//h:99999/m?secret"),
        "http://h:99999/m: not an address that can be fetched",
    ),
    "redirected to a strange host": (
        lambda h: h.answer(302, Location="http://\xff\xfe..x/m"),
        "/m: not an address that can be fetched",
    ),
    "redirected to nowhere": (lambda h: h.answer(307), "redirected to nowhere"),
    "no such file": (lambda h: h.answer(404), "m.safetensors: not there (status 404)"),
    "forbidden": (lambda h: h.answer(403), "the server refuses it (status 403)"),
    "out of range": (
        lambda h: h.answer(416, Content_Range="bytes */0"),
        "0 bytes are too few for a safetensors file",
    ),
    "broken": (lambda h: h.answer(503, Retry_After=0), "(status 503); tried twice"),
    "a teapot": (lambda h: h.answer(418), "answers with status 418; expected the file"),
    "no HTTP": (_no_http, "does not speak HTTP: BadStatusLine); tried twice"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies(server: RangeServer, lie: str) -> None:
    server.answers["m.safetensors"], message = LIES[lie]
    address = f"{server.url}/m.safetensors"
    said = refusal(address)
    assert message in said and server.sent["m.safetensors"] < 1000
    assert "/tmp" not in said and said.count("://") <= 3


def test_a_second_attempt(server: RangeServer) -> None:
    server.files["m.safetensors"] = SAFETENSORS
    failures: list[Answer] = [lambda h: h.answer(503, Retry_After=0), _cut, _no_http]

    def at_first(handler: Handler) -> None:
        del server.answers["m.safetensors"]
        failures.pop()(handler)

    while failures:
        server.answers["m.safetensors"] = at_first
        assert "parameters: 34" in run(f"{server.url}/m.safetensors")


def test_a_silent_server(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_SILENCE", 0.05)
    server.answers["m.safetensors"] = lambda h: time.sleep(0.2)
    assert "does not answer in time); tried twice" in refusal(f"{server.url}/m.safetensors")


_HEAD = b"HTTP/1.1 206 Partial Content\r\n"


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.",
        _HEAD + b"X-Slow: ",
        _HEAD + b"Content-Range: bytes 0-7/900\r\nContent-Length: 8\r\n\r\n",
    ],
)
def test_a_server_that_drips(
    said: bytes, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte before each time-out, of status, header or body, does not hold inspect for ever."""

    def drip(handler: Handler) -> None:
        with suppress(OSError):
            handler.connection.sendall(said)
            for _ in range(40):
                handler.connection.sendall(b"1")
                time.sleep(0.1)
        handler.close_connection = True

    monkeypatch.setattr(ranges, "_PATIENCE", 0.25)
    server.answers["m.safetensors"] = drip
    began = time.monotonic()
    assert "too slow; " in refusal(f"{server.url}/m.safetensors")
    assert time.monotonic() - began < 3  # of the 4 that it would take


def test_other_kinds_of_addresses() -> None:
    found = CliRunner().invoke(app, ["inspect", "ftp://foo/x.gguf"])
    assert isinstance(found.exception, SourceError)
    assert "from ftp:// addresses; expected hf://, http:// or https://" in str(found.exception)
    assert "ftp://foo/x.gguf" in str(found.exception)


def test_the_config_of_a_model_means_the_model(server: RangeServer) -> None:
    server.files = {
        "a/b/m/config.json": as_json({"model_type": "llama"}),
        "a/b/m/model.safetensors": SAFETENSORS,
    }
    assert run(f"{server.url}/a/b/m/config.json") == run(f"{server.url}/a/b/m/")


def test_nobody_there() -> None:
    assert "cannot be fetched (" in refusal("http://127.0.0.1:9/m.gguf")


def test_no_way_from_https_to_http(monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = ranges.Server({}, "x")
    monkeypatch.setattr(fetcher, "_once", lambda *_: "http://127.0.0.1:9/m")
    with pytest.raises(SourceError, match="redirected from https to http://127"):
        fetcher.part("https://h/m", 0, 8)


def length(count: int, rest: bytes = b"{}") -> Virtual:
    return Virtual(count.to_bytes(8, "little") + rest, 10**9)


def test_headers_that_lie(server: RangeServer) -> None:
    nested = b"[" * 10_000
    for file, message in {
        length(2**63): "and the file has 1000000000",
        length(10**9 - 8): "a header of 999999992 bytes; at most 32000000 are read",
        length(2, b"[]"): "does not begin with '{'",
        length(len(nested) + 5, b'{"a":' + nested): "nested too deeply",
        length(30_000): "not valid JSON",
        Virtual(SMALL.header, SMALL.size - 1): "the file is truncated",
        Virtual(SMALL.header, SMALL.size + 1): "follow the last tensor",
        whole(b"abc"): "3 bytes are too few",
    }.items():
        server.files["m.safetensors"] = file
        assert message in refusal(f"{server.url}/m.safetensors")
        assert server.total() < 200_000
        server.sent.clear()
    server.files["m.gguf"] = Virtual(b"GGUF", 10**9)
    assert "GGUF version 0" in refusal(f"{server.url}/m.gguf")
    server.files["m.gguf"] = whole(b"")
    assert "would end at byte 4 of a file of 0 bytes" in refusal(f"{server.url}/m.gguf")


def test_indexes_that_lie(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_open, "_MAX_FILES", 40)
    for content, message in {
        ("../x.safetensors",): "leads out of the folder",
        ("x.bin",): "a Python pickle",
        ("there.safetensors", "gone.safetensors"): "gone.safetensors: not there",
        tuple(f"{i}.safetensors" for i in range(41)): "names 41 files; at most 40",
    }.items():
        weight_map = {f"t{number}": file for number, file in enumerate(content)}
        server.files = {
            f"m/{INDEX_NAME}": as_json({"weight_map": weight_map}),
            "m/there.safetensors": SAFETENSORS,
        }
        said = refusal(f"{server.url}/m")
        assert message in said and f"{server.url}/m" in said and "/tmp" not in said
    listed = {INDEX_NAME: as_json({"weight_map": {"a": "gone.safetensors"}})}
    server.files = range_server.repository("ann/m", listed)
    assert "hf://ann/m/gone.safetensors: named by" in refusal("hf://ann/m")
    server.files = {"m/config.json": whole(b" " * 4_000_001), "m/model.safetensors": SAFETENSORS}
    assert "4000001 bytes; at most 4000000 are fetched" in refusal(f"{server.url}/m")


def test_no_more_than_so_many_bytes_in_all(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = range_server.shards(10)
    server.files = {f"m/{name}": file for name, file in files.items()}
    monkeypatch.setattr(remote_open, "_MAX_RECEIVED", 100_000)
    assert "at most 100000 are fetched of one model" in refusal(f"{server.url}/m")


def test_the_hub_refuses(server: RangeServer) -> None:
    place = "api/models/ann/m/revision/main"
    for status, code, message in (
        (403, "GatedRepo", "hf://ann/m is gated: accept its terms"),
        (404, "RevisionNotFound", "has no revision 'main'"),
        (404, "RepoNotFound", "does not exist, or is private"),
        (401, "RepoNotFound", "does not exist, or is private"),
    ):
        server.answers[place] = lambda h, s=status, c=code: h.answer(s, X_Error_Code=c)
        assert message in refusal("hf://ann/m")
    del server.answers[place]
    server.files[place] = whole(b"[1]")
    assert "expected a JSON object" in refusal("hf://ann/m")
    server.files[place] = as_json({"siblings": [1, {"rfilename": 2}, {"x": 1}], "sha": 7})
    assert "has no safetensors files" in refusal("hf://ann/m")


def test_offline(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal("hf://ann/m")
    assert server.requests == []


def test_shown() -> None:
    assert answers.shown("https://u:p@h:1/a@b?c=d#e") == "https://h:1/a@b"
    assert answers.shown("https://u:p@h?x@y/z") == "https://h"
