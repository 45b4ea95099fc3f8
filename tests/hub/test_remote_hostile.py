"""Servers that fail, or lie: `inspect` says so in one sentence, soon, having read little."""

import gc
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from typer.testing import CliRunner

from qtool.cli.main import app
from qtool.errors import SourceError
from qtool.formats.safetensors_file import INDEX_NAME
from qtool.hub import answers
from qtool.remote import open as remote_open
from qtool.remote import ranges
from support.hub import range_server
from support.hub.range_server import Handler, RangeServer, Virtual, as_json, whole
from support.hub.remote_models import SAFETENSORS, SMALL, refusal, run, server

__all__ = ["server"]

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
    assert "the file is empty" in refusal(f"{server.url}/m.gguf")


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


@pytest.mark.parametrize("refused", ["list", "folder", "file"])
def test_no_connection_is_left_open(server: RangeServer, refused: str) -> None:
    """Neither of those that are kept for a next request, nor of one that the server ends."""
    place = "api/models/ann/m/revision/main"
    server.files[place] = as_json({"siblings": [{"rfilename": "x.bin"}], "sha": "1"})
    address = "hf://ann/m/nowhere"
    if refused == "list":
        server.files[place] = whole(b"[1]")
    if refused == "file":
        server.answers["m.safetensors"] = lambda h: h.answer(418)
        address = f"{server.url}/m.safetensors"
    gc.collect()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ResourceWarning)
        refusal(address)
        for timer in threading.enumerate():
            if isinstance(timer, threading.Timer):  # of a connection, which it knows until it ends
                timer.join(5)
        gc.collect()
    assert not [str(one.message) for one in said if "unclosed" in str(one.message)]


def test_offline(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal("hf://ann/m")
    assert server.requests == []


def test_shown() -> None:
    assert answers.shown("https://u:p@h:1/a@b?c=d#e") == "https://h:1/a@b"
    assert answers.shown("https://u:p@h?x@y/z") == "https://h"
