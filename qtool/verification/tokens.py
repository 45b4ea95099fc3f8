"""The tokenizer against the embedding, and every token id that a config names."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qtool.checkpoints import structure
from qtool.checkpoints.roles import outside_reason
from qtool.errors import QtoolError
from qtool.gguf.tokenizer.hf_json import CONFIG, TOKENIZER, read_object
from qtool.messages.sentences import count
from qtool.verification.finding import Finding, of_setting
from qtool.verification.subject import Subject

CHECK = "tokenizer"
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
_KINDS = ("*.tiktoken", "*.model", "tekken.json")  # names of others
NO_TOKENIZER = "has no tokenizer; engines cannot take text: put the model's own beside"
_SHOWN = 60  # characters of a value
_FEW = 16  # tokens that were added and have no rows
_OUTCOMES = {
    "bos_token_id": "texts that begin with it would fail",
    "eos_token_id": "generation would never end, or fail",
    "pad_token_id": "texts that are padded with it would fail",
}
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


def check_tokenizer(subject: Subject) -> Iterator[Finding]:
    """tokenizer: there, and no id beyond the rows of the embedding."""
    folder = subject.artifact.checkpoint.folder
    rows = _embedding_rows(subject)
    if rows is not None:
        yield from _named_ids(subject, folder, rows)
    if not has_tokenizer(folder):
        yield Finding("warning", CHECK, "", f"the folder {NO_TOKENIZER} the weights")
        return
    try:
        ids = ids_of(folder)
        special = read_object(folder / CONFIG)
    except QtoolError as error:
        yield Finding("error", CHECK, TOKENIZER, str(error))
        return
    if not ids:
        if (folder / TOKENIZER).is_file():
            yield Finding(
                "error", CHECK, TOKENIZER,
                f"{TOKENIZER} has no vocabulary, and no engine reads it; put the model's own there",
            )  # fmt: skip
        return
    if (said := _without_rows(ids, rows)) is not None:
        yield Finding("error", CHECK, TOKENIZER, said)
    for key in _NAMED:
        value = special.get(key)
        token = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(token, str) and token and token not in ids:
            yield Finding(
                "warning", CHECK, CONFIG,
                f"{CONFIG} names {token!r} as {key}, which the tokenizer does not know; text will "
                "not begin or end as the model learned it",
            )  # fmt: skip


def has_tokenizer(folder: Path) -> bool:
    """Whether some file of a folder holds a vocabulary, by its name."""
    return any((folder / name).is_file() for name in _FILES) or any(
        any(folder.glob(kind)) for kind in _KINDS
    )


def of_another_model(subject: Subject) -> str | None:
    """That the tokenizer has ids for which the embedding has no rows; None where it has not, where
    no file tells, and where they are a few: Gemma 3's text models have none for its image token."""
    try:
        ids, rows = ids_of(subject.artifact.checkpoint.folder), _embedding_rows(subject)
    except QtoolError:
        return None  # is told where it matters
    if rows is None or sum(number >= rows for number in ids.values()) <= _FEW:
        return None
    return _without_rows(ids, rows)


def _without_rows(ids: Mapping[str, int], rows: int | None) -> str | None:
    if rows is None or not (others := sorted((n, t) for t, n in ids.items() if n >= rows)):
        return None
    return (
        f"the tokenizer has {count(len(others), 'id')} beyond the {rows} rows of the embedding "
        f"(the first: {others[0][0]}, {others[0][1]!r}); tokenizer and weights are of different "
        "models, or the embedding was not resized"
    )


def _embedding_rows(subject: Subject) -> int | None:
    if subject.blocks is None:
        return None
    start = f"{subject.blocks.prefix}."  # the many that are not to be looked at
    found = [
        entry.shape
        for name, entry in subject.entries.items()
        if not name.startswith(start)
        and outside_reason(name) == "embedding"
        and "position" not in name
        and "wpe" not in name
    ]
    return found[0][0] if len(found) == 1 and len(found[0]) == 2 else None


def _named_ids(subject: Subject, folder: Path, rows: int) -> Iterator[Finding]:
    """bos, eos and pad of config.json and generation_config.json."""
    text = structure.text_config(subject.config)
    configs: list[tuple[str, Mapping[str, Any]]] = [("config.json", {**subject.config, **text})]
    try:
        configs.append(("generation_config.json", read_object(folder / "generation_config.json")))
    except QtoolError as error:
        yield Finding("error", CHECK, "generation_config.json", str(error))
    for file, config in configs:
        for key, outcome in _OUTCOMES.items():
            value = config.get(key)
            if not _is_ids(value):
                if isinstance(value, str) and file == "config.json":
                    continue  # of which the check of settings tells
                yield Finding(
                    "error", CHECK, file,
                    f"{file} says {key} {repr(value)[:_SHOWN]}; expected the id of a token, or a "
                    "list of such: put back the model's own",
                    of_setting(key),
                )  # fmt: skip
                continue
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int) and not -1 <= number < rows:
                    yield Finding(
                        "error", CHECK, file,
                        f"{file} says {key} {number}, and the embedding has {rows} rows; "
                        f"{outcome}: correct it",
                    )  # fmt: skip


def _is_ids(value: object) -> bool:
    """Whether it is an id, or some, or none."""
    return value is None or all(type(n) is int for n in (value if type(value) is list else [value]))


def tokens_of(folder: Path) -> int:
    """One more than the largest id; 0 where no JSON file tells."""
    try:
        return max(ids_of(folder).values(), default=-1) + 1
    except QtoolError:
        return 0


def ids_of(folder: Path) -> dict[str, int]:
    """Every token with its id, {} where no JSON file tells."""
    data = read_object(folder / TOKENIZER)
    model = data.get("model")
    ids: dict[str, int] = {}
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if vocabulary is None and not data:
        vocabulary = read_object(folder / "vocab.json") or None
    if isinstance(vocabulary, Mapping):
        ids |= {str(t): n for t, n in vocabulary.items() if isinstance(n, int)}
    elif isinstance(vocabulary, list):  # Unigram: pieces with scores, in the order of ids
        for number, piece in enumerate(vocabulary):
            if isinstance(piece, list) and piece:
                ids[str(piece[0])] = number
    added = data.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, Mapping) and isinstance(token.get("id"), int):
            ids[str(token.get("content"))] = token["id"]
    if ids:
        beside = read_object(folder / "added_tokens.json")
        ids |= {token: n for token, n in beside.items() if isinstance(n, int)}
    decoder = read_object(folder / CONFIG).get("added_tokens_decoder")
    for number_text, token in (decoder if isinstance(decoder, Mapping) else {}).items():
        if str(number_text).isdecimal() and isinstance(token, Mapping) and ids:
            ids.setdefault(str(token.get("content")), int(number_text))
    return ids
