"""A quantized safetensors checkpoint as a model to convert."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from qtool.artifacts import lost
from qtool.artifacts.artifact import Artifact
from qtool.artifacts.entry import Entry
from qtool.artifacts.expert_stack import ExpertStack
from qtool.artifacts.stored_config import plain_config, quantization_config
from qtool.artifacts.untold import said_untold
from qtool.checkpoints import structure
from qtool.checkpoints.checkpoint import Checkpoint, Watch
from qtool.converting.model import DTYPES, Model, Quantized, Tensor
from qtool.converting.zeros import check_label
from qtool.errors import FormatError, UnsupportedError
from qtool.formats.compressed_tensors_transforms import online_rotations
from qtool.formats.safetensors_file import DTYPE_BITS
from qtool.planning.whole import check_whole
from qtool.quality.input_arguments import input_arguments
from qtool.scheme import Scheme
from qtool.verification.digests import check_digests, recorded_digests


def artifact_model(
    path: Path, assume: str | None, *, sound: bool = True, watch: Watch | None = None
) -> Model:
    """Headers only; `assume` (v1, v2) is how GPTQ's zeros are stored, whatever the config says.

    sound: whether files are compared with digests of them, where there are some, and GPTQ's zeros
    with their label. watch: is shown what is read of what is stored.
    """
    artifact = Artifact.of(replace(Checkpoint.open(path), watch=watch))
    found = artifact.found
    if assume is not None:
        if found.format != "gptq":
            raise UnsupportedError(
                f"{path}: --assume {assume} is about GPTQ's zeros, and this is {found.format}"
            )
        artifact = replace(artifact, found=replace(found, layout=assume))
    if (packed := said_untold(artifact)) is not None:
        raise UnsupportedError(f"{path}: {packed}")
    if found.format == "dense":
        raise UnsupportedError(
            f"{path}: is not quantized; `qtool quantize` does that, into GGUF too"
        )
    checkpoint = artifact.checkpoint
    if artifact.unreadable:
        raise FormatError(
            f"{path}: its record of how it was made cannot be read ({artifact.unreadable}), and "
            "what is converted carries that on; fetch the file again, or remove it"
        )
    artifact.check_unchanged()
    _check_sound(artifact, sound)
    odd = check_whole(checkpoint)
    entries = _in_order(artifact)
    if all(entry.scheme is None for entry in entries):
        raise UnsupportedError(
            f"{path}: no matrix of it is packed, so that there is nothing to convert; its "
            f"{found.format} config is about what is done while it runs, such as rounding keys and "
            "values; convert or quantize the model that it was made of"
        )
    for entry in entries:
        if isinstance(entry.scheme, str) and not entry.stacked:
            raise UnsupportedError(
                f"{path}: {entry.name} is stored as {found.format} {found.layout}".rstrip()
                + ", which is recognised, but not decoded by this version"
            )
    if rotated := [
        one.name for one in online_rotations(quantization_config(checkpoint)) if not one.heads
    ]:
        raise UnsupportedError(
            f"{path}: its weights go with inputs that the engine rotates (transform_config: "
            f"{', '.join(rotated)}), which no other format can say; quantize the source anew, "
            "without rotate.r4"
        )
    if sound and assume is None:
        odd += check_label(path, artifact)
    inputs = lost.activations(artifact)
    dropped = [
        (name, why)
        for entry in entries
        for name in entry.stored
        if (why := lost.reason(name)) is not None
    ]
    alone = {name for name, _ in dropped}
    kept = [entry for entry in entries if entry.stored[0] not in alone]
    return Model(
        path=path,
        format=found.format,
        layout=artifact.found.layout,
        config=plain_config(checkpoint.config),
        dtype=_dtype(checkpoint, entries),
        tensors=tuple(_tensor(artifact, entry) for entry in kept),
        digest=lambda: f"sha256:{checkpoint.digest()}",
        provenance=artifact.provenance,
        side_files=partial(_side_files, checkpoint),
        checkpoint=checkpoint,
        activations=inputs,
        rounds_inputs=frozenset(
            entry.name
            for entry in kept
            if input_arguments(artifact, entry.module, entry.scheme) is not None
        ),
        dropped=(*lost.named(inputs), *dropped),
        warnings=(*lost.warnings(inputs, dropped), *odd),
    )


def _check_sound(artifact: Artifact, compared: bool) -> None:
    """UnsupportedError without config.json; FormatError where weights are not those that the
    artifact's own record has digests of. What is made of it has a record of its own."""
    checkpoint = artifact.checkpoint
    if not checkpoint.config:
        raise UnsupportedError(
            f"{checkpoint.path}: has no config.json, which says what model its matrices are of; "
            "put the model's own beside them"
        )
    recorded = recorded_digests(checkpoint.path) if compared else None
    for finding in check_digests(checkpoint.path, recorded, {}) if recorded is not None else ():
        if finding.severity == "error":
            raise FormatError(f"{checkpoint.path}: {finding.message}")


def _tensor(artifact: Artifact, entry: Entry) -> Tensor:
    if entry.scheme is None:
        raw = partial(artifact.checkpoint.raw, entry.stored[0])
        return Tensor(entry.name, entry.shape, entry.dtype, entry.dtype, raw=raw)
    if entry.stacked:
        stack = partial(ExpertStack, artifact, entry.name)
        return Tensor(entry.name, entry.shape, entry.dtype, str(entry.scheme), read=stack)
    assert isinstance(entry.scheme, Scheme)  # the caller has seen to it
    read = partial(_read, artifact, entry.name)
    scheme = entry.scheme
    return Tensor(
        entry.name,
        entry.shape,
        entry.dtype,
        str(scheme),
        scheme.group_size,
        scheme.scale_dtype,
        read,
    )


def _read(artifact: Artifact, name: str) -> Quantized:
    value = artifact.read(name)
    assert not isinstance(value, np.ndarray)  # its entry has a scheme
    return value


def _dtype(checkpoint: Checkpoint, entries: Sequence[Entry]) -> str:
    """The dtype that config.json gives, or that most dense numbers have."""
    text = structure.text_config(checkpoint.config)
    for config in (checkpoint.config, text):
        for key in ("dtype", "torch_dtype"):
            if (found := DTYPES.get(str(config.get(key)))) is not None:
                return found
    sizes = {"F16": 0, "BF16": 0, "F32": 0}
    for entry in entries:
        if entry.scheme is None and entry.dtype in sizes:
            sizes[entry.dtype] += entry.parameters
    return max(sizes, key=lambda dtype: sizes[dtype])


def _side_files(checkpoint: Checkpoint) -> Iterable[tuple[str, bytes]]:
    for relative in checkpoint.side_files:
        yield relative.as_posix(), (checkpoint.folder / relative).read_bytes()


def _in_order(artifact: Artifact) -> list[Entry]:
    """Entries in the order in which they were planned, as far as the files tell.

    Within a file wide dtypes come first, so a matrix has parts in several places, with dense
    tensors between them. A dense tensor follows the matrix whose part of the same width precedes
    it, or by its name where there is none; so converting there and back puts every tensor where
    it was.
    """
    tensors = artifact.checkpoint.tensors
    files = {file: number for number, file in enumerate(artifact.checkpoint.files)}
    file_of = {name: files[artifact.checkpoint.file_of(name)] for name in tensors}
    entries = list(artifact.entries.values())
    packed = [entry for entry in entries if entry.scheme is not None]
    dense = [entry for entry in entries if entry.scheme is None]
    names = [entry.name for entry in packed]
    by_name = names == sorted(names)
    number_of = {id(entry): number for number, entry in enumerate(packed)}

    def key(name: str) -> tuple[int, int, int]:
        info = tensors[name]
        return file_of[name], -DTYPE_BITS[info.dtype], info.start

    # (file, width, position) of every part of a matrix, with the matrix's number
    parts = sorted((key(name), number_of[id(e)]) for e in packed for name in e.stored)
    positions = [position for position, _ in parts]
    begun = [min(file_of[name] for name in entry.stored) for entry in packed]
    before = [sum(1 for file in begun if file < number) for number in range(len(files))]

    def rank(entry: Entry) -> tuple[int, int, tuple[int, int, int]]:
        place = key(entry.stored[0])
        at = bisect_left(positions, place) - 1
        if at >= 0 and positions[at][:2] == place[:2]:
            return parts[at][1], 1, place
        if by_name:  # as transformers saves a model
            return bisect_left(names, entry.name) - 1, 1, place
        return before[place[0]] - 1, 1, place

    ranked = [((number, 0, (0, 0, 0)), entry) for number, entry in enumerate(packed)]
    ranked += [(rank(entry), entry) for entry in dense]
    return [entry for _, entry in sorted(ranked, key=lambda pair: pair[0])]
