"""A server on loopback that speaks as much of the hub's API as downloads and uploads need.

    GET  /api/models/OWNER/NAME/revision/REV      {"id", "sha", "siblings": [{"rfilename"}]}
         with ?blobs=true                         ... "size", "blobId", "lfs" of each
    GET  /api/models/OWNER/NAME/tree/REV          [{"type", "path", "size", "oid", "lfs"?}]
    HEAD, GET  /OWNER/NAME/resolve/REV/PATH       the file; ETag, X-Repo-Commit, Range
    and the same of datasets, under /api/datasets/ and /datasets/

    GET  /api/whoami-v2                           who a token belongs to
    POST /api/validate-yaml                       the metadata of a card
    POST /api/repos/create                        {"name", "organization", "visibility"}
    POST /api/models/OWNER/NAME/branch/REV
    POST /api/models/OWNER/NAME/preupload/REV     which files go by LFS
    POST /OWNER/NAME.git/info/lfs/objects/batch   where they go
    PUT  /lfs/OID                                 one of them
    POST /api/models/OWNER/NAME/commit/REV        lines of JSON: header, file, lfsFile

What goes wrong is chosen by name: OWNER/gated refuses its files to those without a token in
`granted`, private repositories are there for owners of a token only, and files break off, are
damaged or are refused as often as the test says.
"""

import base64
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_thisIsNoRealToken"


@dataclass
class Refusal:
    """An answer given instead of the right one, so many times."""

    status: int
    times: int = 1
    retry_after: str | None = None


class HubServer(ThreadingHTTPServer):
    """Serves `repositories`: "owner/name" to a folder. Counts bytes sent for each file."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, Path], commits: dict[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.commits = commits  # of a repository, where it is not COMMIT
        self.uploads: Path | None = None  # a folder for what is pushed; without it nothing may be
        self.owners = {TOKEN: "ann"}
        self.granted: set[str] = set()  # tokens that may read gated repositories
        self.private: set[str] = set()
        self.branches: dict[str, set[str]] = {}
        self.messages: list[str] = []  # of commits
        self.cut_once: dict[str, int] = {}  # file name to bytes after which it breaks off
        self.damaged: dict[str, int] = {}  # file name to a byte that arrives wrong
        self.held: dict[str, int] = {}  # file name to bytes after which it waits, and breaks off
        self.gives_up = threading.Event()  # waiting
        self.refusals: dict[str, Refusal] = {}  # by a part of the path
        self.without_digests = False
        self.odd_etags: set[str] = set()  # files whose ETag is no digest
        self.is_a_page = False  # answers as a proxy's page for logging in does
        self.more_files: list[dict[str, object]] = []  # that it says it has
        self.damaged_uploads = False
        self.damaged_cards = False
        self.deaf_to_private = False  # makes public what was to be private
        self.without_ranges = False
        self.sent: Counter[str] = Counter()
        self.uploaded: Counter[str] = Counter()  # bytes, by digest
        self.requests: list[str] = []
        self.ranges: list[str] = []
        self.heads: list[str] = []  # User-Agent of each request
        self.lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serve(
    repositories: dict[str, Path], commits: dict[str, str] | None = None
) -> Iterator[HubServer]:
    """A running server, stopped at the end."""
    server = HubServer(dict(repositories), dict(commits or {}))
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
    disable_nagle_algorithm = True  # else a body waits 40 ms for its headers to be acknowledged
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that was killed
            super().handle()

    def _refuse(self, status: int, code: str, retry_after: str | None = None, **more: str) -> None:
        body = json.dumps({"error": code, **more}).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
        if retry_after is not None:
            self.send_header("Retry-After", retry_after)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, content: object) -> None:
        body = b"<html>" if self.server.is_a_page else json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @property
    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _begun(self) -> str | None:
        """The path; None where the request has been refused."""
        path = unquote(urlsplit(self.path).path).strip("/")
        with self.server.lock:
            self.server.requests.append(f"{self.command} {path}")
            self.server.heads.append(self.headers.get("User-Agent", ""))
            for part, refusal in self.server.refusals.items():
                if part in path and refusal.times > 0:
                    refusal.times -= 1
                    break
            else:
                return path
        self._refuse(refusal.status, "", refusal.retry_after)
        return None

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self._begun()
        if path is None:
            return None
        if path == "api/whoami-v2":
            if self._token not in self.server.owners:
                return self._refuse(401, "")
            return self._json({"type": "user", "name": self.server.owners[self._token], "orgs": []})
        parts = path.split("/")
        api = parts[0] == "api"
        if api or parts[0] == "datasets":
            parts = parts[2 if api else 1 :]
        name, rest = "/".join(parts[:2]), parts[2:]
        folder = self.server.repositories.get(name)
        gated = name.endswith("/gated")
        if gated and self._token not in self.server.granted and not (api and folder):
            return self._refuse(403 if self._token else 401, "GatedRepo")
        hidden = name in self.server.private and self._token not in self.server.owners
        if folder is None or hidden:
            return self._refuse(404, "RepoNotFound")
        commit = self.server.commits.get(name, COMMIT)
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", commit, *self.server.branches.get(name, ())):
            return self._refuse(404, "RevisionNotFound")
        if not api:
            return self._file(folder, "/".join(rest[2:]), commit)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if rest and rest[0] == "tree":
            return self._json([_tree_entry(folder, file) for file in files])
        siblings: list[dict[str, object]] = [
            {"rfilename": file.relative_to(folder).as_posix()} for file in files
        ]
        if "blobs=" in self.path and not self.server.without_digests:
            for sibling, file in zip(siblings, files, strict=True):
                entry = _tree_entry(folder, file)
                sibling |= {"size": entry["size"], "blobId": entry["oid"]}
                if isinstance(lfs := entry.get("lfs"), dict):
                    sibling["lfs"] = {**lfs, "sha256": lfs["oid"]}
        siblings += self.server.more_files
        answer = {"id": name, "modelId": name, "sha": commit, "siblings": siblings}
        return self._json(answer | {"private": name in self.server.private})

    def _file(self, folder: Path, relative: str, commit: str) -> None:
        path = folder / relative
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        data = path.read_bytes()
        start = 0
        end = len(data) - 1
        wanted = None if self.server.without_ranges else self.headers.get("Range")
        if wanted is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or end), end)
            self.server.ranges.append(wanted)
        self.send_response(200 if wanted is None else 206)
        if wanted is not None:
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
        odd = path.name in self.server.odd_etags
        self.send_header("ETag", f'"{len(data)}-odd"' if odd else f'"{_etag(path, data)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        body = data[start : end + 1]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        wrong = self.server.damaged.get(path.name)
        if wrong is not None and start <= wrong <= end:
            body = bytearray(body)
            body[wrong - start] ^= 1
        cut = self.server.cut_once.pop(path.name, None)
        if cut is not None:
            body = body[:cut]
            self.close_connection = True
        held = self.server.held.get(path.name, len(body))
        self.wfile.write(body[:held])
        self.server.sent[path.name] += len(body[:held])
        if held < len(body):
            self.server.gives_up.wait(60)
            self.close_connection = True

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            found = bytearray()
            while size := int(self.rfile.readline().split(b";")[0], 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return bytes(found)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_PUT(self) -> None:
        data = self._body()
        path = self._begun()
        if path is None or self.server.uploads is None:
            return
        oid = path.removeprefix("lfs/")
        self.server.uploaded[oid] += len(data)
        if hashlib.sha256(data).hexdigest() != oid:
            return self._refuse(400, "")
        (self.server.uploads / oid).write_bytes(data)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = self._body()
        path = self._begun()
        if path is None:
            return None
        if self.server.uploads is None or self._token not in self.server.owners:
            return self._refuse(401, "")
        if path == "api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "api/repos/create":
            return self._create(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body)["objects"])
        name, what, revision = "/".join(path.split("/")[2:4]), path.split("/")[4], path[-1]
        revision = path.split("/", 5)[5]
        if name not in self.server.repositories:
            return self._refuse(404, "RepoNotFound")
        if what == "branch":
            self.server.branches.setdefault(name, set()).add(revision)
            return self._json({})
        if revision not in ("main", *self.server.branches.get(name, ())):
            return self._refuse(404, "RevisionNotFound")
        if what == "preupload":
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if _is_lfs(Path(file["path"])) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._json({"files": modes})
        return self._commit(name, [json.loads(line) for line in body.splitlines()])

    def _create(self, asked: dict[str, str | None]) -> None:
        owner = asked.get("organization") or self.server.owners[self._token]
        name = f"{owner}/{asked['name']}"
        if owner != self.server.owners[self._token]:
            return self._refuse(403, "")
        if name in self.server.repositories:
            return self._refuse(409, "", url=f"{self.server.endpoint}/{name}")
        assert self.server.uploads is not None
        folder = self.server.uploads / "repositories" / name
        folder.mkdir(parents=True)
        self.server.repositories[name] = folder
        private = asked.get("visibility") == "private" or asked.get("private")
        if private and not self.server.deaf_to_private:
            self.server.private.add(name)
        self._json({"url": f"{self.server.endpoint}/{name}"})

    def _batch(self, objects: list[dict[str, object]]) -> None:
        assert self.server.uploads is not None
        found = []
        for one in objects:
            answer: dict[str, object] = {"oid": one["oid"], "size": one["size"]}
            if not (self.server.uploads / str(one["oid"])).is_file():
                href = f"{self.server.endpoint}/lfs/{one['oid']}"
                answer["actions"] = {"upload": {"href": href}}
            found.append(answer)
        self._json({"transfer": "basic", "objects": found})

    def _commit(self, name: str, lines: list[dict[str, object]]) -> None:
        folder, uploads = self.server.repositories[name], self.server.uploads
        assert uploads is not None
        for line in lines:
            value = line["value"]
            assert isinstance(value, dict)
            if line["key"] == "header":
                self.server.messages.append(value["summary"])
                continue
            path = folder / value["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            if line["key"] == "file":
                path.write_bytes(base64.b64decode(value["content"]))
                if self.server.damaged_cards and path.name == "README.md":
                    path.write_bytes(path.read_bytes() + b"!")
            elif line["key"] == "lfsFile":
                path.write_bytes((uploads / value["oid"]).read_bytes())
                if self.server.damaged_uploads:
                    path.write_bytes(path.read_bytes() + b"!")
            else:
                path.unlink()
        commit = hashlib.sha1(json.dumps(lines).encode()).hexdigest()
        self.server.commits[name] = commit
        url = f"{self.server.endpoint}/{name}/commit/{commit}"
        self._json({"success": True, "commitOid": commit, "commitUrl": url})


def _is_lfs(path: Path) -> bool:
    return path.suffix in (".safetensors", ".gguf")


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
