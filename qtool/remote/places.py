"""What a person types for a model on a server, and the folder there that it means.

    hf://OWNER/NAME[@REVISION][/FILE]      a repository of the hub, or a file or folder in it
    http(s)://HOST/PATH/FILE.gguf          a file; also .safetensors
    http(s)://HOST/PATH/FOLDER/            a folder with config.json, and the weights that its
                                           index names or model.safetensors; also by the address
                                           of the config or the index itself

Pages of the hub (https://huggingface.co/OWNER/NAME/blob/main/FILE) mean the repository. HF_ENDPOINT
and HF_TOKEN are huggingface_hub's; the token goes to the hub alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import qtool
from qtool import hub
from qtool.errors import SourceError
from qtool.formats.safetensors_header import parse_json
from qtool.formats.safetensors_layout import INDEX_NAME
from qtool.hub.answers import RefusedError, shown
from qtool.remote.ranges import Server, basic, origin, split

FILES = (".gguf", ".safetensors")
_MAX_LIST_BYTES = 16_000_000
_LONGEST_NAME = 255  # bytes, on common file systems
_SPECIAL = ("refs/pr/", "refs/convert/")  # revisions with slashes that every hub has


@dataclass(frozen=True)
class Place:
    """A folder on a server, and a file in it where one was named."""

    server: Server
    where: str  # the folder as a person names it
    url_of: Callable[[str], str]
    names: frozenset[str] | None  # of all files below it; None where the server gives no list
    file: str | None = None


def locate(text: str) -> Place:
    """The place that an address means; asks the hub for the list of files of a repository."""
    if text.lower().startswith("hf://"):
        return _in_repository(*_hub_parts(text[5:]))
    if (page := _of_page(text)) is not None:
        return _in_repository(*page)
    return _on_server(text)


def _on_server(url: str) -> Place:
    """A file or a folder anywhere."""
    parts = split(url)
    secret = basic(url)
    server = Server({} if secret is None else {origin(url): secret}, _agent())
    path = parts.path
    file = None
    if path.lower().endswith(FILES):
        path, _, file = path.rpartition("/")
    elif path.endswith(("/config.json", f"/{INDEX_NAME}")):
        path = path.rpartition("/")[0]  # the model that it is a part of
    elif parts.query:
        raise SourceError(
            f"{shown(url)}: neither {' nor '.join(FILES)} at the end of its path; only such "
            "addresses may have a query"
        )
    folder = urlunsplit((parts.scheme, parts.netloc, path.rstrip("/") + "/", "", ""))

    def url_of(name: str) -> str:
        return url if name == file else folder + quote(name)

    file = None if file is None else unquote(file)
    return Place(server, shown(folder).rstrip("/"), url_of, None, file)


def _agent() -> str:
    return f"qtool/{qtool.__version__}"


def _hub_parts(rest: str) -> tuple[hub.HubModel, str]:
    """The repository and the path in it, from what follows hf://."""
    parts = [part for part in rest.split("/") if part]
    if not parts or parts[0] in ("datasets", "spaces", "buckets"):
        raise SourceError(f"hf://{rest}: expected hf://OWNER/NAME[@REVISION][/FILE], of a model")
    owner, name, inside = parts[0], "".join(parts[1:2]), parts[2:]
    if "@" in owner or not name:
        raise SourceError(f"hf://{rest}: expected hf://OWNER/NAME[@REVISION][/FILE]")
    name, _, revision = name.partition("@")
    if revision == "refs" and "/".join([revision, *inside[:1], ""]) in _SPECIAL:
        revision = "/".join([revision, *inside[:2]])
        inside = inside[2:]
    return hub.HubModel(f"{owner}/{name}", unquote(revision) or "main"), "/".join(inside)


def _of_page(url: str) -> tuple[hub.HubModel, str] | None:
    """The same of an address of one of the hub's pages."""
    from huggingface_hub import constants

    if origin(url) != origin(constants.ENDPOINT):
        return None
    below = urlsplit(constants.ENDPOINT).path.rstrip("/") + "/"
    path = urlsplit(url).path
    parts = [unquote(part) for part in path.removeprefix(below).split("/") if part]
    if not path.startswith(below) or len(parts) < 2 or parts[0] in ("api", "datasets", "spaces"):
        return None
    model = hub.HubModel("/".join(parts[:2]))
    if len(parts) == 2:
        return None if parts[1].lower().endswith(FILES) else (model, "")
    if parts[2] not in ("tree", "blob", "resolve", "raw") or len(parts) == 3:
        return None
    inside = parts[4:]
    revision = parts[3]
    if "/".join([revision, *inside[:1], ""]) in _SPECIAL:
        revision, inside = "/".join([revision, *inside[:2]]), inside[2:]
    return replace(model, revision=revision), "/".join(inside)


def _in_repository(model: hub.HubModel, inside: str) -> Place:
    """The folder of a repository at one commit."""
    from huggingface_hub import constants, get_token, hf_hub_url
    from huggingface_hub.errors import HFValidationError

    where = f"hf://{model}"
    if constants.HF_HUB_OFFLINE:
        raise SourceError(f"{where}: HF_HUB_OFFLINE is set; inspect a local copy, or unset it")
    endpoint = constants.ENDPOINT
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    server = Server({} if token is None else {origin(endpoint): f"Bearer {token}"}, _agent())
    try:
        hf_hub_url(model.repository, "config.json")
    except HFValidationError:
        raise SourceError(f"{where}: {model.repository!r} is not a name on the hub") from None
    with ExitStack() as failed:
        failed.callback(server.close)
        commit, names = _list_files(server, endpoint, model, where)
        inside, file = _split(inside, names, where)
        failed.pop_all()

    def url_of(name: str) -> str:
        return hf_hub_url(model.repository, inside + name, revision=commit)

    below = frozenset(n.removeprefix(inside) for n in names if n.startswith(inside))
    return Place(server, f"{where}/{inside}".rstrip("/"), url_of, below, file or None)


def _split(inside: str, names: Sequence[str], where: str) -> tuple[str, str]:
    """What is asked for within a repository: a folder with its slash, and a file there or none."""
    if inside in names:
        folder, slash, file = inside.rpartition("/")
        return folder + slash, file
    if inside and not any(name.startswith(f"{inside}/") for name in names):
        raise SourceError(f"{where}: has no file or folder {inside!r}")
    return inside and f"{inside}/", ""


def _list_files(
    server: Server, endpoint: str, model: hub.HubModel, where: str
) -> tuple[str, list[str]]:
    """The commit of a revision, and the files it has."""
    url = f"{endpoint}/api/models/{model.repository}/revision/{quote(model.revision, safe='')}"
    try:
        found = parse_json(server.whole(url, _MAX_LIST_BYTES), f"{where}: the list of its files")
    except RefusedError as error:
        raise _refused(where, model.revision, error) from None
    siblings, commit = found.get("siblings"), found.get("sha")
    listed = siblings if isinstance(siblings, list) else []
    names = [one.get("rfilename") for one in listed if isinstance(one, dict)]
    return (
        commit if isinstance(commit, str) and commit else model.revision,
        [name for name in names if isinstance(name, str) and _is_plain(name)],
    )


def _is_plain(name: str) -> bool:
    """Whether a file may be called so: the hub has no others, and they could lead elsewhere."""
    parts = name.split("/")
    return (
        name.isprintable()
        and "\\" not in name
        and all(
            part not in ("", ".", "..") and len(part.encode()) <= _LONGEST_NAME for part in parts
        )
    )


def _refused(where: str, revision: str, error: RefusedError) -> SourceError:
    """Why the hub gives no list of files."""
    if error.code == "GatedRepo":
        return SourceError(
            f"{where} is gated: accept its terms on its page, then log in with `hf auth login` or "
            "set HF_TOKEN"
        )
    if error.code == "RevisionNotFound":
        return SourceError(f"{where} has no revision {revision!r}")
    return SourceError(
        f"{where} does not exist, or is private; check the spelling, and log in with "
        "`hf auth login` or set HF_TOKEN if it is yours"
    )
