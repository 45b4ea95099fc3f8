"""Whether the artifact was made of this source, and whether its weights lie in its directions."""

from collections.abc import Iterator, Mapping

import numpy as np

from qtool.artifacts.stored_config import quantization_config
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.formats.compressed_tensors_transforms import KEY
from qtool.formats.safetensors_file import FLOAT_DTYPES
from qtool.streaming.weights import rows_of
from qtool.verification.against.side_by_side import norm
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

CHECK = "made-of"


def rotated(subject: Subject) -> str:
    """What tells that the weights are in other directions than the source's; "" where nothing does.

    The embedding's rows have the source's lengths, or another tool's config says so.
    """
    source = subject.source
    table = quantization_config(subject.artifact.checkpoint).get(KEY)
    if table and subject.artifact.provenance is None:
        return f"the config has a {KEY}"
    # Of tokens: the largest table, where towers have some of patches and places, too.
    tables = [
        entry
        for name, role in subject.roles.items()
        if role.reason == "embedding" and len((entry := subject.entries[name]).shape) == 2
    ]
    if source is None or not tables:
        return ""
    entry = max(tables, key=lambda table: table.parameters)
    if entry.name not in source.tensors:
        return ""
    if entry.scheme is not None or entry.dtype not in FLOAT_DTYPES:
        return ""
    if source.tensors[entry.name].shape != entry.shape:
        return ""
    some = min(entry.shape[0], 4096)
    old = rows_of(source, entry.name)(0, some)
    new = rows_of(subject.artifact.checkpoint, entry.stored[0])(0, some)
    before, after = np.linalg.norm(old, axis=1), np.linalg.norm(new, axis=1)
    rotated = norm(old - new) > 0.5 * norm(old) and norm(before - after) < 0.02 * norm(before)
    return "the embedding has the source's norms and other directions" if rotated else ""


def made_of_it(subject: Subject) -> bool | None:
    """Whether the source has the digest that the provenance names; None where it names none."""
    record = (subject.artifact.provenance or {}).get("source")
    said = record.get("digest") if isinstance(record, Mapping) else None
    if not isinstance(said, str) or not isinstance(subject.source, Checkpoint):
        return None
    return said == f"sha256:{subject.source.digest()}"


def check_made_of(subject: Subject) -> Iterator[Finding]:
    """made-of: the files that the artifact was made of, by its own record."""
    if made_of_it(subject) is False:
        yield Finding(
            "note", CHECK, "",
            "by qtool.json the artifact was made of other files than those given: a copy that was "
            "saved anew, another revision, or another model, whose errors may look like these",
        )  # fmt: skip
