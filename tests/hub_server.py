"""A server on loopback that speaks as much of the hub's API as a download needs.

    GET  /api/models/OWNER/NAME/revision/REV      {"id", "sha", "siblings": [{"rfilename"}]}
    GET  /api/models/OWNER/NAME/tree/REV          [{"type", "path", "size", "oid", "lfs"?}]
    HEAD, GET  /OWNER/NAME/resolve/REV/PATH       the file; ETag, X-Repo-Commit, Range
    and the same of datasets, under /api/datasets/ and /datasets/

What goes wrong is chosen by name: OWNER/gated, and a file that ends early once.
"""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Serves `repositories`: "owner/name" to a folder. Counts bytes sent for each file."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, Path], commits: dict[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.commits = commits  # of a repository, where it is not COMMIT
        self.cut_once: dict[str, int] = {}  # file name to bytes after which it breaks off
        self.sent: Counter[str] = Counter()
        self.requests: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serve(
    repositories: dict[str, Path], commits: dict[str, str] | None = None
) -> Iterator[HubServer]:
    """A running server, stopped at the end."""
    server = HubServer(repositories, commits or {})
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _refuse(self, status: int, code: str) -> None:
        body = json.dumps({"error": code}).encode()
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.requests.append(f"{self.command} {path}")
        parts = path.split("/")
        api = parts[0] == "api"
        if api or parts[0] == "datasets":
            parts = parts[2 if api else 1 :]
        name, rest = "/".join(parts[:2]), parts[2:]
        if name.endswith("/gated"):
            return self._refuse(403, "GatedRepo")
        folder = self.server.repositories.get(name)
        if folder is None:
            return self._refuse(404, "RepoNotFound")
        commit = self.server.commits.get(name, COMMIT)
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", commit):
            return self._refuse(404, "RevisionNotFound")
        if not api:
            return self._file(folder, "/".join(rest[2:]), commit)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if rest and rest[0] == "tree":
            return self._json([_tree_entry(folder, file) for file in files])
        siblings = [{"rfilename": file.relative_to(folder).as_posix()} for file in files]
        return self._json({"id": name, "modelId": name, "sha": commit, "siblings": siblings})

    def _file(self, folder: Path, relative: str, commit: str) -> None:
        path = folder / relative
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        data = path.read_bytes()
        start = 0
        if (wanted := self.headers.get("Range")) is not None:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{_etag(path, data)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        body = data[start:]
        cut = self.server.cut_once.pop(path.name, None)
        if cut is not None:
            body = body[:cut]
            self.close_connection = True
        self.server.sent[path.name] += len(body)
        self.wfile.write(body)


def _is_lfs(path: Path) -> bool:
    return path.suffix == ".safetensors"


def _etag(path: Path, data: bytes) -> str:
    if _is_lfs(path):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _tree_entry(folder: Path, path: Path) -> dict[str, object]:
    data = path.read_bytes()
    entry: dict[str, object] = {
        "type": "file",
        "path": path.relative_to(folder).as_posix(),
        "size": len(data),
        "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
    }
    if _is_lfs(path):
        entry["lfs"] = {"oid": _etag(path, data), "size": len(data), "pointerSize": 100}
    return entry
