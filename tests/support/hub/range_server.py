"""A server on loopback that answers range requests for files that exist by their first bytes only.

    GET /PATH                                     a file; Range, Content-Range
    GET /api/models/OWNER/NAME/revision/REV       {"id", "sha", "siblings": [{"rfilename"}]}
    GET /OWNER/NAME/resolve/SHA/FILE              a file of a repository, or a redirect

It counts the bytes of the bodies that it sends. `answers` are handlers for paths on which a server
is to behave in some other way.
"""

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from qtool.formats.safetensors_file import INDEX_NAME, TensorSpec, plan_shards
from support.gguf import gguf_big
from support.models import header_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True)
class Virtual:
    """A file: its first bytes, and zeros up to its length."""

    head: bytes
    size: int

    def read(self, first: int, last: int) -> bytes:
        """Bytes first to last, the last one included."""
        found = self.head[first : last + 1]
        return found + bytes(last + 1 - first - len(found))


def whole(data: bytes) -> Virtual:
    """A file without a hole."""
    return Virtual(data, len(data))


def as_json(content: object) -> Virtual:
    """A JSON file."""
    return whole(json.dumps(content).encode())


class RangeServer(ThreadingHTTPServer):
    """Serves `files` by their paths, without a leading slash."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, files: Mapping[str, Virtual]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = dict(files)
        self.answers: dict[str, Callable[[Handler], None]] = {}
        self.sent: Counter[str] = Counter()
        self.requests: list[tuple[str, str | None, str | None]] = []  # path, range, authorization
        self.connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def total(self) -> int:
        """Bytes of all bodies."""
        return sum(self.sent.values())


@contextmanager
def serve(files: Mapping[str, Virtual]) -> Iterator[RangeServer]:
    """A running server, stopped at the end."""
    server = RangeServer(files)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: RangeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body in one packet

    def log_message(self, format: str, *args: object) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    @property
    def place(self) -> str:
        return unquote(urlsplit(self.path).path).strip("/")

    def answer(self, status: int, body: bytes = b"", **headers: object) -> None:
        """Status, headers (underscores for hyphens) and body."""
        self.send_response(status)
        for name, value in ({"Content_Length": len(body)} | headers).items():
            if value is not None:
                self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)
        self.server.sent[self.place] += len(body)

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.requests.append((self.place, wanted, self.headers.get("Authorization")))
        special = self.server.answers.get(self.place)
        if special is not None:
            return special(self)
        file = self.server.files.get(self.place)
        if file is None:
            return self.answer(404, b"<html>nothing here</html>", X_Error_Code="EntryNotFound")
        if wanted is None:
            assert file.size < 1 << 26, f"{self.place} was asked for as a whole"
            return self.answer(200, file.read(0, file.size - 1))
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        assert found is not None, wanted
        first, last = int(found[1]), min(int(found[2]), file.size - 1)
        if first > last:
            return self.answer(416, Content_Range=f"bytes */{file.size}")
        body = file.read(first, last)
        return self.answer(206, body, Content_Range=f"bytes {first}-{last}/{file.size}")


def repository(name: str, files: Mapping[str, Virtual], commit: str = COMMIT) -> dict[str, Virtual]:
    """The files of a repository as a hub serves them, with the list of them."""
    listed = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]}
    found = {f"{name}/resolve/{commit}/{file}": content for file, content in files.items()}
    return {f"api/models/{name}/revision/main": as_json(listed)} | found


def shards(count: int, config: Mapping[str, Any] | None = None) -> dict[str, Virtual]:
    """A Llama of 70 billion weights in `count` files, with its index."""
    shapes = header_files.llama(layers=80, hidden=8192, inner=28672, kv=1024, vocabulary=128_256)
    specs = [TensorSpec(name, "BF16", shape) for name, shape in shapes.items()]
    most = sum(spec.nbytes for spec in specs) // count
    layout = plan_shards(specs, most)
    while len(layout.files) > count:
        most += most // 50
        layout = plan_shards(specs, most)
    assert layout.index is not None and len(layout.files) == count
    files = {file.name: Virtual(file.header, file.size) for file in layout.files}
    return files | {INDEX_NAME: as_json(layout.index), "config.json": as_json(config or {})}


def big_gguf() -> Virtual:
    """A file of 144 GB whose header has a vocabulary of 150,000 tokens."""
    return Virtual(*gguf_big.header())
