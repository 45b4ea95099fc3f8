"""The reader of a model on a server, by its headers."""

import json
from pathlib import Path
from typing import Any

import lies
from promises import tellable

# Nothing of qtool is imported here: coverage is counted of what is imported later.

_TEMPLATE = "https://hub/{repo_id}/resolve/{revision}/{filename}"


class Remote:
    """What a server answers when a model is opened by its headers; one answer after another."""

    name = "remote"
    beside = 0
    _CUT = b"\n\x1e\n"
    _ADDRESSES = ("http://h/m/", "http://h/m/model.safetensors", "http://h/m/m.gguf", "hf://a/m",
                  "hf://a/g", "https://u:p@h/m/")  # fmt: skip

    def __init__(self, folder: Path) -> None:
        from qtool.formats.safetensors_file import INDEX_NAME, TensorSpec, lay_out
        from support.gguf import gguf_bytes

        layout = lay_out("m", [TensorSpec("model.layers.0.q.weight", "F16", (4, 8))])
        content = layout.header + bytes(layout.size - len(layout.header))
        index = {"weight_map": {"model.layers.0.q.weight": "model.safetensors"}}
        listed = [{"rfilename": n} for n in ("config.json", "model.safetensors", INDEX_NAME)]
        only = [{"rfilename": "m.gguf"}]
        commit = "0" * 40
        self.files = {
            "/m/config.json": b'{"model_type": "llama"}',
            "/m/model.safetensors": content,
            "/m/m.gguf": bytes(gguf_bytes.Gguf()),
            f"/m/{INDEX_NAME}": json.dumps(index).encode(),
        }
        for name, siblings in (("m", listed), ("g", only)):
            said = json.dumps({"sha": commit, "siblings": siblings}).encode()
            self.files[f"/api/models/a/{name}/revision/main"] = said
        for name in ("config.json", "model.safetensors", INDEX_NAME):
            self.files[f"/a/m/resolve/{commit}/{name}"] = self.files[f"/m/{name}"]
        self.files[f"/a/g/resolve/{commit}/m.gguf"] = self.files["/m/m.gguf"]
        self.answers: list[bytes] | None = None  # None: honest ones, which are kept
        self.given: list[bytes] = []
        self.made: list[bytes] = []
        for number in range(len(self._ADDRESSES)):
            self.answers, self.given = None, []
            self.attempt(bytes([number]))
            self.made.append(bytes([number]) + self._CUT.join(self.given))
        self.answers = []

    def seeds(self) -> list[bytes]:
        return self.made

    @staticmethod
    def lie(data: bytes, choose: Any) -> bytes:
        number = data[:1] if data and choose.random() > 0.03 else bytes([choose.randrange(6)])
        some = data[1:].split(Remote._CUT)
        at = choose.randrange(len(some))
        head, gap, body = some[at].partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        kind = choose.randrange(8)
        if kind == 0:
            some[at] = lies.byte_lie(some[at], choose)
        elif kind == 1:
            lie = lies.json_lie if body[:1] == b"{" else lies.contained
            some[at] = head + gap + lie(body, choose)
        elif kind == 2:
            some.insert(at, choose.choice(some))
        elif kind == 3 and len(some) > 1:
            del some[at]
        elif kind == 4:
            lines[0] = b"HTTP/1.1 %d x" % choose.choice(
                [100, 200, 204, 206, 301, 302, 304, 308, 401, 404, 408, 416, 429, 500, 503, 999]
            )
            some[at] = b"\r\n".join(lines) + gap + body
        else:
            size = choose.choice([0, 1, 8, len(body), 10**6, 2**31, 2**63, 10**17, 10**30, -1])
            line = choose.choice([
                b"Content-Length: %d" % size, b"Transfer-Encoding: chunked",
                b"Content-Range: bytes 0-%d/%d" % (max(0, len(body) - 1), size),
                b"Content-Range: bytes 0-7/%d" % size, b"Content-Range: bytes %d-8/9" % size,
                b"Content-Encoding: gzip", b"Content-Encoding: identity",
                b"Location: http://other/x", b"Location: file:///etc/passwd", b"Location: //[",
                b"Location: /m/\xff\xfe\n x", b"Location: " + b"a" * 3000, b"Location: https://h:0/",
                b"Retry-After: 9999999", b"X-Error-Code: GatedRepo", b"Connection: close",
                b"x" * 300 + b": y", b"X: " + b"y" * 70_000, b"Content-Range: bytes 0-7/*",
            ])  # fmt: skip
            name = line.partition(b":")[0]
            lines = [one for one in lines if not one.startswith(name + b":")] + [line]
            some[at] = b"\r\n".join(lines) + (gap or b"\r\n\r\n") + body
        return number + Remote._CUT.join(some)

    def _answer(self, request: bytes) -> bytes:
        if self.answers is not None:
            return self.answers.pop(0) if self.answers else b""
        head = request.decode("latin-1")
        found = self.files.get(head.split(" ")[1])
        if found is None:
            made = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
        elif "Range: bytes=" in head:
            first, last = head.partition("Range: bytes=")[2].split("\r\n")[0].split("-")
            part = found[int(first) : int(last) + 1]
            end = int(first) + len(part) - 1
            made = b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\n" % len(part)
            made += b"Content-Range: bytes %s-%d/%d\r\n\r\n" % (first.encode(), end, len(found))
            made += part
        else:
            made = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(found) + found
        self.given.append(made)
        return made

    def attempt(self, data: bytes) -> None:
        import http.client
        import io
        import ssl
        import time
        from unittest.mock import patch

        from huggingface_hub import constants

        from qtool.remote import open as remote_open
        from qtool.remote import ranges

        reader = self

        class Socket:
            """What was asked gets the next answer."""

            asked = b""

            def sendall(self, sent: bytes) -> None:
                self.asked += bytes(sent)

            def makefile(self, *_: object) -> io.BufferedReader:
                asked, self.asked = self.asked, b""
                return io.BufferedReader(io.BytesIO(reader._answer(asked)))  # type: ignore[arg-type]

            def close(self) -> None:
                pass

            def shutdown(self, _: int) -> None:
                pass

        def connect(connection: Any) -> None:
            if connection.host not in ("h", "other", "hub"):
                raise OSError("no such host")
            connection.sock = Socket()

        if self.answers is not None:
            self.answers = data[1:].split(self._CUT)
        address = self._ADDRESSES[(data[0] if data else 0) % len(self._ADDRESSES)]
        with (
            patch.object(http.client.HTTPConnection, "connect", connect),
            patch.object(http.client.HTTPSConnection, "connect", connect),
            patch.object(ranges.Server, "_context", ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)),
            patch.object(ranges, "getproxies", dict),
            patch.object(time, "sleep", lambda _: None),
            patch.object(remote_open, "_AT_ONCE", 1),  # answers come in one order
            patch.object(constants, "ENDPOINT", "https://hub"),
            patch.object(constants, "HUGGINGFACE_CO_URL_TEMPLATE", _TEMPLATE),
            patch.object(constants, "HF_HUB_OFFLINE", False),
            remote_open.opened(address) as (found, fetched),
        ):
            tellable(found.json())
            assert 0 <= fetched() <= max(len(data), 10**6)
