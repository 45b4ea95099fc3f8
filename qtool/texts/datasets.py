"""Files of hub datasets that hold texts: which one, and where it lies."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from qtool.errors import SourceError, UnsupportedError
from qtool.hub import HubModel
from qtool.texts.stored import JSON, PARQUET, TABLES, check_readable, kind_of

# Kinds of files, the first that there are first; of .json many are settings.
_KINDS = (
    (*(kind for kind in JSON if kind != ".json"), PARQUET),
    (".txt", ".text", ".md"),
    (*TABLES,),
    (".json",),
)
_NO_TEXT = {"readme", "license", "licence", "dataset_info", "dataset_infos", "dataset_dict",
            "state", "config", "trainer_state"}  # fmt: skip
_TRAIN = re.compile(r"(?i)(?<![a-z])train(?![a-z])")
_CACHED = re.compile(r"(?:^|/)datasets--(.+?)--([^/]+)/snapshots/[^/]+/(.+)$")


def choose(dataset: str) -> str:
    """The file of texts of a dataset: of several, the first that says `train`, if any."""
    names = _names(dataset)
    own = [name for name in names if Path(name).name.lower().partition(".")[0] not in _NO_TEXT]
    usable = [name for kinds in _KINDS for name in own if kind_of(name) in kinds]
    if usable:
        return next((name for name in usable if _TRAIN.search(name)), usable[0])
    raise UnsupportedError(
        f"{_shown(dataset)} has no file of texts: text, JSON, CSV or Parquet (it has "
        f"{', '.join(names[:4])}); save its texts as such a file and name that"
    )


def download(dataset: str, file: str) -> Path:
    """A file of a dataset, through the hub's cache."""
    from huggingface_hub import errors, hf_hub_download

    check_readable(file)
    with _explained(dataset) as (repository, revision):
        try:
            return Path(hf_hub_download(repository, file, repo_type="dataset", revision=revision))
        except errors.EntryNotFoundError as error:
            if isinstance(error, errors.LocalEntryNotFoundError):
                raise
            names = _names(dataset)
            near = [name for name in names if name.startswith(file.partition("*")[0])]
            near = near[:3] or get_close_matches(file, names, 3, 0.5) or names[:3]
            raise SourceError(
                f"{_shown(dataset)} has no file {file!r}; name one, such as {', '.join(near)}"
            ) from None


def named(path: Path) -> str:
    """What a text is called: owner/name:FILE of a dataset in the hub's cache, else the file's
    name."""
    found = _CACHED.search(path.as_posix())
    return path.name if found is None else f"{found[1]}/{found[2]}:{found[3]}"


def _names(dataset: str) -> list[str]:
    from huggingface_hub import HfApi

    with _explained(dataset) as (repository, revision):
        return sorted(HfApi().list_repo_files(repository, repo_type="dataset", revision=revision))


@contextmanager
def _explained(dataset: str) -> Iterator[tuple[str, str]]:
    """Within, what the hub says of a repository and its revision becomes a SourceError."""
    from qtool.hub.failures import explained

    repository, _, revision = dataset.partition("@")
    found = HubModel(f"datasets/{repository}", revision or "main")
    with explained(found, _shown(dataset)):
        yield repository, found.revision


def _shown(dataset: str) -> str:
    return f"{dataset}: dataset on the hub (there is no such file here)"
