"""An artifact into a repository of the hub: checked, described, sent as one commit, compared.

    verify -> card -> create the repository -> upload -> one commit -> compare the hub's digests

The upload is huggingface_hub's: what the hub has already by its digest is not sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qtool import __version__
from qtool.errors import QtoolError, SourceError
from qtool.hub import HubModel, is_hub_id
from qtool.hub.card import joined, parts, with_quality
from qtool.hub.failures import explained, transport_errors
from qtool.hub.listing import HubFile, ask
from qtool.hub.transfer import is_as_stated
from qtool.runs.progress import Progress

CARD = "README.md"
_BESIDE = "eval.json"


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
        }


@dataclass(frozen=True)
class Upload:
    """The files of an artifact, by their names in the repository, and its card."""

    files: dict[str, Path]
    card: str


def push(
    artifact: Path,
    repository: str,
    *,
    private: bool = False,
    revision: str = "main",
    message: str | None = None,
    evaluations: Sequence[Path] = (),
    threads: int | None = None,
    progress: Progress | None = None,
) -> Pushed:
    """Send an artifact that verify passes; SourceError, and nothing sent, where it does not."""
    progress = progress or Progress(quiet=True)
    model = HubModel(repository, revision)
    _check_target(model)
    with progress.stage("verify"):
        _check_artifact(artifact, threads)
    upload = prepared(artifact, repository, evaluations)
    where = f"{repository} on the hub"
    with progress.stage("upload"), explained(model, where, verb="uploaded"):
        commit = _send(model, upload, private, message or _message(artifact), progress)
        _compare(replace(model, revision=commit), upload, progress)
    from huggingface_hub import constants

    sizes = {name: path.stat().st_size for name, path in upload.files.items()}
    sizes[CARD] = len(upload.card.encode())
    url = f"{constants.ENDPOINT}/{repository}" + ("" if revision == "main" else f"/tree/{revision}")
    return Pushed(
        str(artifact), repository, revision, commit, url, private, tuple(sorted(sizes.items()))
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


def prepared(artifact: Path, repository: str, evaluations: Sequence[Path] = ()) -> Upload:
    """What is sent of an artifact: its files, with the card by itself."""
    from qtool.gguf.inspect import gguf_models

    measured = [_evaluation(path) for path in evaluations or _found_beside(artifact)]
    if models := gguf_models(artifact):
        from qtool.homes.gguf_card import render
        from qtool.homes.llama_cpp import names_for

        if len(models) > 1:
            raise SourceError(f"{artifact}: holds {len(models)} GGUF models; name one of them")
        names = names_for(models[0], repository)
        head, body = parts(render(models[0], repository, names))
        return Upload(
            {name: path for name, path in names.items()}, joined(head, with_quality(body, measured))
        )
    if not artifact.is_dir():
        raise SourceError(f"{artifact}: expected a folder or a .gguf file; one file is no model")
    files = {
        path.relative_to(artifact).as_posix(): path
        for path in sorted(artifact.rglob("*"))
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(artifact).parts)
    }
    card = files.pop(CARD, None)
    files.pop(_BESIDE, None)
    text = card.read_text(encoding="utf-8") if card is not None else f"# {repository}\n"
    head, body = parts(text)
    if not head:
        head = {"library_name": "transformers", "tags": ["qtool"]}
    return Upload(files, joined(head, with_quality(body, measured)))


def _found_beside(artifact: Path) -> list[Path]:
    """Where `qtool eval ARTIFACT --json` may have been kept."""
    places = (artifact / _BESIDE, artifact.with_name(f"{artifact.name}.{_BESIDE}"))
    return [path for path in places if path.is_file()][:1]


def _evaluation(path: Path) -> dict[str, Any]:
    from qtool.formats.safetensors_header import read_json

    found = read_json(path)
    if "perplexity" not in found:
        raise SourceError(f"{path}: no `perplexity`; expected what `qtool eval --json` printed")
    return found


def _send(model: HubModel, upload: Upload, private: bool, message: str, progress: Progress) -> str:
    """One commit with everything; its name."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(library_name="qtool", library_version=__version__)
    operations = [CommitOperationAdd(CARD, upload.card.encode())]
    operations += [CommitOperationAdd(name, path) for name, path in upload.files.items()]
    total = sum(path.stat().st_size for path in upload.files.values())
    progress.say(f"uploading {len(operations)} files, {total / 1e6:,.1f} MB, to {model.repository}")
    try:
        api.create_repo(model.repository, private=True if private else None, exist_ok=True)
        if model.revision != "main":
            api.create_branch(model.repository, branch=model.revision, exist_ok=True)
        made = api.create_commit(
            model.repository,
            operations,
            commit_message=message,
            revision=model.revision,
        )
    except (RuntimeError, ValueError, KeyError) as error:
        cause = error.__cause__
        if isinstance(cause, transport_errors()):
            raise cause from None
        if isinstance(error, (*transport_errors(), QtoolError)):
            raise
        raise SourceError(
            f"{model.repository} on the hub: the upload failed ({type(error).__name__}: "
            f"{(str(error).splitlines() or [''])[0]}); run this again, what came is not sent twice"
        ) from None
    return str(made.oid)


def _compare(at: HubModel, upload: Upload, progress: Progress) -> None:
    """The hub has these bytes, and no others."""
    stated = {file.name: file for file in ask(at, lambda pause, error: None).files}
    for name, path in upload.files.items():
        file = stated.get(name, HubFile(name, None))
        if file.etag is not None and is_as_stated(path, file):
            continue
        found = "nothing of that name" if file.etag is None else f"{file.digest}"
        raise SourceError(
            f"{at.repository} on the hub has {found} for {name}, which is not what was sent; push "
            "it again"
        )
    progress.say(f"compared: the hub states the digests of these {len(upload.files)} files")
