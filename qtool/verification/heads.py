"""The output head against tie_word_embeddings: one copy where tied, its own where not."""

import re
from collections.abc import Iterator

import numpy as np

from qtool.checkpoints import structure
from qtool.checkpoints.hf_config import complete
from qtool.checkpoints.roles import outside_reason
from qtool.formats.layer_names import is_head
from qtool.formats.safetensors_file import checksum
from qtool.gguf.architectures import TABLE
from qtool.streaming.weights import Weights
from qtool.verification import by_table
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

CHECK = "head"
_TIED = "tie_word_embeddings"
_MODULES = "modules.json"  # sentence-transformers'
_ROWS = 4096  # of an embedding, in memory at once
# Model classes that classify or embed: Qwen3Model, LlamaForSequenceClassification and the like.
_HEADLESS = re.compile(r".*((?<!LMHead)Model|Classification|QuestionAnswering)")


def tied(subject: Subject) -> bool | None:
    """Whether config.json ties the head to the embedding; None where it does not say."""
    config = subject.config
    for part in (config, structure.text_config(config)):
        if isinstance(part.get(_TIED), bool):
            return bool(part[_TIED])
    named = config.get("architectures")
    row = TABLE.get(str(named[0])) if isinstance(named, list) and named else None
    if row is None:
        return None
    said = complete(config, row.defaults).get("tie_word_embeddings")
    return said if isinstance(said, bool) else False


def heads_of(subject: Subject) -> list[str]:
    """The output heads that are there."""
    heads = [n for n in subject.present if is_head(n.removesuffix(".weight"))]
    return [n for n in heads if n.endswith(".weight")]


def head_is_embedding(source: Weights) -> bool:
    """Whether a model's head is its embedding, number for number, whatever its config.json says."""
    kinds = {name: outside_reason(name) for name in source.tensors}
    heads, embeddings = (
        [name for name, kind in kinds.items() if kind == wanted and name.endswith(".weight")]
        for wanted in ("output head", "embedding")
    )
    if len(heads) != 1:
        return False
    head = source.tensors[heads[0]]
    alike = [n for n in embeddings if source.tensors[n].shape == head.shape]
    return any(
        source.tensors[name].dtype == head.dtype and _same(source, name, heads[0], head.shape[0])
        for name in alike
    )


def _same(source: Weights, one: str, other: str, rows: int) -> bool:
    """Whether two tensors have the same bytes; some rows at a time."""
    for first in range(0, rows, _ROWS):
        last = min(rows, first + _ROWS)
        if not np.array_equal(source.part(one, first, last), source.part(other, first, last)):
            return False
    return True


def _headless(subject: Subject) -> bool:
    """Whether the model class has no output head."""
    named = subject.config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return isinstance(first, str) and _HEADLESS.fullmatch(first) is not None


def _embeds(subject: Subject) -> bool:
    """Whether it is made for embeddings, whatever its class: its names lack their first part, as
    where a model was saved without its head, or sentence-transformers' list of modules is there."""
    row = by_table.row_of(subject.config)
    bare = row is not None and by_table.bare_name(subject.present, row[0]) is not None
    return bare or (subject.artifact.checkpoint.folder / _MODULES).is_file()


def said_headless(subject: Subject) -> str:
    """That config.json asks for a head that is not there."""
    said = _TIED in subject.config or _TIED in structure.text_config(subject.config)
    says = f"says {_TIED} false" if said else f"does not say {_TIED}, which is false then"
    return f"config.json {says}, and there is no output head"


def lacks_head(subject: Subject) -> bool:
    """Whether a model that writes text has no output head, and its embedding is none."""
    named = subject.config.get("architectures")
    speaks = isinstance(named, list) and any(str(one).endswith("ForCausalLM") for one in named)
    heads = any(is_head(name.rpartition(".")[0]) for name in subject.present)
    return speaks and not heads and tied(subject) is False and not _embeds(subject)


def check_head(subject: Subject) -> Iterator[Finding]:
    """head: there where it is needed, and not twice."""
    heads = heads_of(subject)
    is_tied = tied(subject)
    embeddings = [n for n, role in subject.roles.items() if role.reason == "embedding"]
    if not heads:
        # Of what is no switch the check of settings speaks.
        said = subject.config.get(_TIED, False)
        if isinstance(said, bool) and is_tied is False and embeddings and not _headless(subject):
            yield Finding(
                "warning" if _embeds(subject) else "error", CHECK, "lm_head.weight",
                f"{said_headless(subject)}; "
                + ("engines can make embeddings with it, and no text" if _embeds(subject) else
                   "fetch or make the artifact again, or tie it if the source is tied"),
            )  # fmt: skip
        return
    entry = subject.entries.get(heads[0])
    if is_tied is not True or entry is None:
        return
    if entry.scheme is not None:
        yield Finding(
            "warning", CHECK, heads[0],
            f"config.json ties the head to the embedding, and {heads[0]} is stored quantized; "
            "engines that tie take the embedding, and its bytes are of no use",
        )  # fmt: skip
        return
    same = [n for n in embeddings if subject.entries[n].shape == entry.shape]
    if same and _digest(subject, same[0]) == _digest(subject, heads[0]):
        yield Finding(
            "warning", CHECK, heads[0],
            f"{heads[0]} is a copy of {same[0]}, to which config.json ties it: "
            f"{entry.nbytes:,} bytes for nothing; leave it out",
        )  # fmt: skip
    elif same:
        yield Finding(
            "warning", CHECK, heads[0],
            f"{heads[0]} differs from {same[0]}, to which config.json ties it; engines that tie "
            "ignore it: set tie_word_embeddings to false if this head is meant",
        )  # fmt: skip


def _digest(subject: Subject, name: str) -> tuple[str, int]:
    """dtype and CRC-32 of a dense tensor's bytes."""
    entry = subject.entries[name]
    checkpoint, stored = subject.artifact.checkpoint, entry.stored[0]
    return entry.dtype, checksum(checkpoint.file_of(stored), checkpoint.tensors[stored])
