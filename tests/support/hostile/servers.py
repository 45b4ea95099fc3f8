"""Servers that lie, to `qtool inspect http://...`: each row tells a server what to answer."""

from collections.abc import Callable
from dataclasses import dataclass

from qtool.formats.safetensors_file import INDEX_NAME
from support.hostile.row import entry, tensors
from support.hub.range_server import Handler, RangeServer, Virtual, as_json, whole

FILE = tensors({"model.layers.0.w": entry()}, bytes(8))
MODEL = "m/model.safetensors"


@dataclass(frozen=True)
class Lie:
    """`tell` makes the server lie; the address is below the server's own."""

    name: str
    tell: Callable[[RangeServer], object]
    says: str
    address: str = MODEL


def answer(status: int, body: bytes = b"", **headers: object) -> Callable[[RangeServer], object]:
    """One answer to every request for the weights; headers' underscores stand for hyphens."""
    return lambda server: server.answers.update(
        {MODEL: lambda handler: handler.answer(status, body, **headers)}
    )


def raw(said: bytes) -> Callable[[RangeServer], object]:
    """These bytes, and the end of the connection."""

    def run(handler: Handler) -> None:
        handler.connection.sendall(said)
        handler.close_connection = True

    return lambda server: server.answers.update({MODEL: run})


def files(**content: Virtual) -> Callable[[RangeServer], object]:
    """Files of a folder m."""
    named = {"config": "config.json", "index": INDEX_NAME, "model": "model.safetensors"}
    return lambda server: server.files.update({f"m/{named[n]}": f for n, f in content.items()})


def hub(listed: object) -> Callable[[RangeServer], object]:
    """The hub's list of files."""
    return lambda server: server.files.update(
        {"api/models/ann/m/revision/main": as_json(listed), MODEL: whole(FILE)}
    )


PART = b"HTTP/1.1 206 Partial Content\r\n"
LIES = [
    Lie("bytes in gzip", answer(206, b"\x1f\x8b" + bytes(6), Content_Encoding="gzip",
                                Content_Range="bytes 0-7/8"), r"sends it compressed \(gzip\)"),
    Lie("a name for compressing that paints",
        answer(206, bytes(8), Content_Encoding="\x1b[31m", Content_Range="bytes 0-7/8"), r"\\x1b"),
    Lie("a redirect to a file here", answer(302, Location="file:///etc/passwd"),
        "file:///etc/passwd: not an address that can be fetched"),
    Lie("a redirect to another protocol", answer(302, Location="gopher://127.0.0.1:70/x"),
        "not an address that can be fetched"),
    Lie("a redirect to itself", answer(302, Location="/m/model.safetensors"),
        "redirected more than 5 times"),
    Lie("a redirect to nowhere", answer(302), "redirected to nowhere"),
    Lie("a redirect to no address", answer(302, Location="http://[/"), "which is no address"),
    Lie("another range than asked", answer(206, bytes(8), Content_Range="bytes 8-15/99"),
        "asked for 8 bytes from byte 0 on, the server answers with"),
    Lie("a range without numbers", answer(206, bytes(8), Content_Range="bytes */*"),
        "answers with the range"),
    Lie("a range of 30 digits", answer(206, bytes(8), Content_Range=f"bytes 0-7/{10**30}"),
        "answers with the range"),
    Lie("a range that its length denies",
        answer(206, bytes(9), Content_Range="bytes 0-7/99"), "and a body of 9 bytes"),
    Lie("a whole file of terabytes", answer(200, bytes(8), Content_Length=10**13),
        "does not answer range requests and would send the whole file of 10000000000000 bytes"),
    Lie("a body without an end", raw(PART + b"Content-Range: bytes 0-7/99\r\n\r\n" + bytes(10**6)),
        "longer than the 8 bytes that were to come"),
    Lie("chunks without an end",
        raw(PART + b"Content-Range: bytes 0-7/99\r\nTransfer-Encoding: chunked\r\n\r\n" +
            b"4\r\nabcd\r\n" * 100), "longer than the 8 bytes"),
    Lie("a chunk of minus five",
        raw(PART + b"Content-Range: bytes 0-7/99\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc"),
        "cannot be fetched"),
    Lie("a header of 100 KB", raw(PART + b"X: " + b"y" * 100_000 + b"\r\n\r\n"),
        "does not speak HTTP"),
    Lie("a thousand headers", raw(PART + b"X: y\r\n" * 1000 + b"\r\n"), "does not speak HTTP"),
    Lie("no HTTP at all", raw(b"SSH-2.0-OpenSSH_9.6\r\n"), "does not speak HTTP"),
    Lie("no content", answer(204), "status 204"),
    Lie("a status of its own", answer(299, bytes(8)), "status 299"),
    Lie("a header of 2^63 bytes",
        lambda s: s.files.update({MODEL: Virtual((2**63).to_bytes(8, "little"), 10**9)}),
        "header is 9223372036854775808 bytes long"),
    Lie("a header of nothing but lists",
        lambda s: s.files.update({MODEL: whole(tensors(b'{"w":[' + b"[]," * 100_000 + b"0]}"))}),
        "JSON so dense"),
    Lie("a config of 5 MB", files(config=whole(b" " * 5_000_000), model=whole(FILE)),
        "5000000 bytes; at most 4000000 are fetched", "m"),
    Lie("a config that is a page", files(config=whole(b"<html>"), model=whole(FILE)),
        r"m/config\.json: not valid JSON", "m"),
    Lie("an index out of its folder",
        files(index=as_json({"weight_map": {"w": "../../../x.safetensors"}})),
        "leads out of the folder", "m"),
    Lie("an index to another server",
        files(index=as_json({"weight_map": {"w": "http://h/x.safetensors"}})),
        "http:/|not there", "m"),
    Lie("a list of files out of the folder",
        hub({"sha": "0" * 40, "siblings": [{"rfilename": "../../x.safetensors"}]}),
        "has no safetensors files|not there|leads out", "hf://ann/m"),
    Lie("a list that is a number", hub({"siblings": 7}), "has no safetensors files", "hf://ann/m"),
    Lie("a list of names with NUL", hub({"siblings": [{"rfilename": "a\0.safetensors"}]}),
        "has no safetensors files", "hf://ann/m"),
    Lie("a list of endless names", hub({"siblings": [{"rfilename": "a" * 5000 + ".safetensors"}]}),
        "has no safetensors files", "hf://ann/m"),
    Lie("a list of nothing", hub({"siblings": None}), "has no safetensors files", "hf://ann/m"),
    Lie("a list of pickles", hub({"siblings": [{"rfilename": "pytorch_model.bin"}]}),
        "only Python pickles", "hf://ann/m"),
    Lie("a list that is a list", hub([1, 2]), "expected a JSON object", "hf://ann/m"),
]  # fmt: skip
