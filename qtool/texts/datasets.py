"""Files of hub datasets that hold texts: which one, and where it lies."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from qtool.errors import SourceError, UnsupportedError
from qtool.texts.stored import JSON, PARQUET, TABLES, check_readable, kind_of

_TEXT = (".txt", ".text", ".md")
# Kinds of files, the first that there are first: of .json many are settings.
_KINDS = ((*_TEXT, ".jsonl", ".ndjson"), (*TABLES,), (PARQUET,), JSON)
_NO_TEXT = ("readme", "license")


def choose(dataset: str) -> str:
    """The file of texts of a dataset: of several, the first that says `train`, if any."""
    from huggingface_hub import HfApi

    repository, _, revision = dataset.partition("@")
    with _failures(dataset):
        names = HfApi().list_repo_files(repository, repo_type="dataset", revision=revision or None)
    own = sorted(name for name in names if not Path(name).name.lower().startswith(_NO_TEXT))
    usable = [name for kinds in _KINDS for name in own if kind_of(name) in kinds]
    if usable:
        return next((name for name in usable if "train" in name.lower()), usable[0])
    raise UnsupportedError(
        f"{_named(dataset)} has no file of texts: text, JSONL, CSV or Parquet (it has "
        f"{', '.join(sorted(names)[:4])}); save its text as a file and name that"
    )


def download(dataset: str, file: str) -> Path:
    """A file of a dataset, through the hub's cache."""
    from huggingface_hub import hf_hub_download

    check_readable(file)
    repository, _, revision = dataset.partition("@")
    with _failures(dataset, file):
        return Path(
            hf_hub_download(repository, file, repo_type="dataset", revision=revision or None)
        )


@contextmanager
def _failures(dataset: str, file: str = "") -> Iterator[None]:
    """Within, what the hub says becomes a SourceError."""
    from huggingface_hub import errors as hub_errors

    where = _named(dataset)
    transport = cast("tuple[type[Exception], ...]", hub_errors.HfHubHTTPError.__bases__)
    try:
        yield
    except (hub_errors.RepositoryNotFoundError, hub_errors.HFValidationError):
        raise SourceError(f"{where} does not exist, or is private; check the spelling") from None
    except hub_errors.EntryNotFoundError as error:
        reason = (
            "cannot be reached, and the cache has no copy; check the network and HF_HUB_OFFLINE"
            if isinstance(error, hub_errors.LocalEntryNotFoundError)
            else f"has no file {file!r}"
        )
        raise SourceError(f"{where} {reason}") from None
    except transport as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise SourceError(f"{where} cannot be downloaded: {said}") from None


def _named(dataset: str) -> str:
    return f"{dataset}: dataset on the hub (there is no such file here)"
