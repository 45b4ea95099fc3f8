"""An artifact into a repository of the hub: checked, described, sent as one commit, compared.

    verify -> card -> create the repository -> upload -> one commit -> compare the hub's digests

The upload is huggingface_hub's: what the hub has already by its digest is not sent again. Where
files of another artifact lie there, which engines would load together with this one, nothing is
sent, or they are removed in the same commit (replacing).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from qtool import __version__
from qtool.checkpoints.links import TEMPLATES
from qtool.errors import QtoolError, SourceError
from qtool.hub import WANTED, HubModel, is_hub_id, plain_name
from qtool.hub.answers import shown
from qtool.hub.failures import explained, first_line, transport_errors
from qtool.hub.listing import HubFile, Listing, ask
from qtool.hub.transfer import hasher, is_as_stated
from qtool.messages.progress import Progress
from qtool.publishing.upload import CARD, Upload, prepared


@dataclass(frozen=True)
class Pushed:
    """What lies on the hub now."""

    artifact: str
    repository: str
    revision: str
    commit: str
    url: str
    private: bool
    files: tuple[tuple[str, int], ...]
    left_behind: tuple[str, ...]  # in the folder, and no part of the artifact

    def json(self) -> dict[str, Any]:
        """For --json, without seconds."""
        return {
            "artifact": self.artifact,
            "repository": self.repository,
            "revision": self.revision,
            "commit": self.commit,
            "url": self.url,
            "private": self.private,
            "files": [{"name": name, "size_bytes": size} for name, size in self.files],
            "size_bytes": sum(size for _, size in self.files),
            "left_behind": list(self.left_behind),
        }


def push(
    artifact: Path,
    repository: str,
    *,
    private: bool = False,
    replacing: bool = False,
    revision: str = "main",
    message: str | None = None,
    evaluations: Sequence[Path] = (),
    threads: int | None = None,
    progress: Progress | None = None,
) -> Pushed:
    """Send an artifact that verify passes; SourceError, and nothing sent, where it does not."""
    progress = progress or Progress(quiet=True)
    model = HubModel(repository, revision)
    if not artifact.exists():
        raise SourceError(f"{artifact}: no such file or folder")
    _check_target(model)
    with progress.stage("verify"):
        _check_artifact(artifact, threads)
    upload = prepared(artifact, repository, evaluations)
    if upload.left:
        progress.say(f"not sent, being no part of the artifact: {_some(upload.left)}")
    where = f"{repository} on the hub"
    with progress.stage("upload"), explained(model, where, verb="uploaded"):
        there = _there(model)
        _check_private(model, there, private)
        old = _old_files(there, upload)
        if old and not replacing:
            more = " ..." if len(old) > 4 else ""
            raise SourceError(
                f"{where} has files of another model, which engines would load together with this "
                f"one: {', '.join(old[:4])}{more}; --replace removes them in the same commit (its "
                "history keeps them), or push to another repository"
            )
        for card in there.files if there is not None else ():
            if card.name == CARD and not _is_sent(upload, card):
                progress.say(f"replacing the {CARD} that is there (the history keeps it)")
        commit = _send(model, upload, old, private, message or _message(artifact), progress)
        now = _compare(replace(model, revision=commit), upload, progress)
    from huggingface_hub import constants

    sizes = {name: path.stat().st_size for name, path in upload.files.items()}
    sizes[CARD] = len(upload.card.encode())
    branch = "" if revision == "main" else f"/tree/{revision}"
    return Pushed(
        str(artifact),
        repository,
        revision,
        commit,
        f"{shown(constants.ENDPOINT)}/{repository}{branch}",
        now.private is True,
        tuple(sorted(sizes.items())),
        upload.left,
    )


def _check_target(model: HubModel) -> None:
    """A name that the hub may have, a token, and a network."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not is_hub_id(model.repository) or "@" in model.repository:
        raise SourceError(f"{model.repository}: expected OWNER/NAME, a repository of the hub")
    try:
        validate_repo_id(model.repository)
    except HFValidationError:
        raise SourceError(f"{model.repository}: not a name that the hub allows") from None
    if constants.HF_HUB_OFFLINE:
        raise SourceError("nothing can be pushed: HF_HUB_OFFLINE is set; unset it")
    if get_token() is None:
        raise SourceError(
            f"{model.repository}: nobody is logged in; `hf auth login`, or set HF_TOKEN to a token "
            "that may write"
        )


def _check_artifact(artifact: Path, threads: int | None) -> None:
    from qtool.verification.run import verify_artifact

    verdict = verify_artifact(artifact, threads=threads)
    errors = [finding for finding in verdict.findings if finding.severity == "error"]
    if errors:
        more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
        raise SourceError(
            f"{artifact} does not pass verify and is not pushed: {errors[0].message}{more}; "
            f"`qtool verify {artifact}` says all"
        )


def _message(artifact: Path) -> str:
    return f"{artifact.resolve().name}, made with qtool {__version__}"


def _no_pause(seconds: float, error: BaseException) -> None:
    """Asked again at once."""


def _there(model: HubModel) -> Listing | None:
    """What lies where the commit will; None where there is no such repository yet."""
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return ask(model, _no_pause)
    except GatedRepoError:
        raise
    except RevisionNotFoundError:  # a branch that is made begins with what is in main
        return _there(HubModel(model.repository)) if model.revision != "main" else None
    except RepositoryNotFoundError:
        return None


def _check_private(model: HubModel, there: Listing | None, private: bool) -> None:
    """SourceError where only its owner shall see it, and others do."""
    if private and there is not None and there.private is not True:
        raise SourceError(
            f"{model.repository} on the hub is not private, and --private does not change a "
            "repository that exists: make it private in its settings, or push to another one; "
            "nothing was sent"
        )


def _old_files(there: Listing | None, upload: Upload) -> list[str]:
    """Files there that engines would read together with those of the upload."""
    names = [] if there is None else [f.name for f in there.files if f.name not in upload.files]
    if any(name.endswith(".gguf") for name in upload.files):  # many lie in one repository
        models = {plain_name(name) for name in upload.files}
        return [name for name in names if name.endswith(".gguf") and plain_name(name) in models]
    read = [pattern for pattern in WANTED if pattern not in (CARD, "LICENSE*")]
    return [
        name
        for name in names
        if name.rpartition("/")[0] in ("", TEMPLATES)
        and any(fnmatchcase(name, pattern) for pattern in read)
    ]


def _send(
    model: HubModel,
    upload: Upload,
    old: Sequence[str],
    private: bool,
    message: str,
    progress: Progress,
) -> str:
    """One commit with everything; its name."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(library_name="qtool", library_version=__version__)
    added = [CommitOperationAdd(CARD, upload.card.encode())]
    added += [CommitOperationAdd(name, path) for name, path in upload.files.items()]
    total = sum(path.stat().st_size for path in upload.files.values())
    if old:
        progress.say(f"removing {len(old)} files of another model: {', '.join(old)}")
    with _one_sentence(model):
        api.create_repo(model.repository, private=True if private else None, exist_ok=True)
        if private:  # a hub that does not know the word would publish it
            _check_private(model, ask(HubModel(model.repository), _no_pause), private)
        if model.revision != "main":
            api.create_branch(model.repository, branch=model.revision, exist_ok=True)
        progress.say(f"uploading {len(added)} files, {total / 1e6:,.1f} MB, to {model.repository}")
        made = api.create_commit(
            model.repository,
            [*added, *(CommitOperationDelete(name) for name in old)],
            commit_message=message,
            revision=model.revision,
        )
    return str(made.oid)


@contextmanager
def _one_sentence(model: HubModel) -> Iterator[None]:
    """Inside, what huggingface_hub raises of its own is a SourceError."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError) as error:
        cause = error.__cause__
        if isinstance(cause, transport_errors()):
            raise cause from None
        if isinstance(error, (*transport_errors(), QtoolError)):
            raise
        raise SourceError(
            f"{model.repository} on the hub: the upload failed ({type(error).__name__}: "
            f"{first_line(error)}); run this again, what came is not sent twice"
        ) from None


def _compare(at: HubModel, upload: Upload, progress: Progress) -> Listing:
    """The hub has these bytes, and none that engines would take for a part of them."""
    now = ask(at, _no_pause)
    stated = {file.name: file for file in now.files}
    for name in (CARD, *upload.files):
        file = stated.get(name, HubFile(name, None))
        if file.etag is not None and _is_sent(upload, file):
            continue
        found = "nothing of that name" if name not in stated else file.digest or "no digest"
        raise SourceError(
            f"{at.repository} on the hub has {found} for {name}, which is not what was sent; push "
            "it again"
        )
    if old := _old_files(now, upload):
        raise SourceError(
            f"{at.repository} on the hub: meanwhile somebody put {old[0]} there, which is not of "
            "this artifact; look what it is, and push again"
        )
    others = sorted(stated.keys() - upload.files.keys() - {CARD, ".gitattributes"})
    if others:
        progress.say(f"left as they were: {_some(others)}")
    progress.say(f"compared: the hub states the digests of these {len(upload.files) + 1} files")
    return now


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"


def _is_sent(upload: Upload, file: HubFile) -> bool:
    if file.name != CARD:
        return is_as_stated(upload.files[file.name], file)
    data = upload.card.encode()
    digest = hasher(file, len(data))
    digest.update(data)
    return digest.hexdigest() == file.etag
