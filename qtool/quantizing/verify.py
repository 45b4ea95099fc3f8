"""Reading back what was written, before the artifact gets its final name.

Three things must hold: the folder holds exactly the tensors of the plan, each with its dtype and
shape; every byte is the one that was packed (CRC-32, computed while writing); and every quantized
matrix reads back under the plan's scheme, with scales that are finite and positive. Then the whole
has to pass what `qtool verify` says of headers and configs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qtool.artifacts.artifact import Artifact, one_by_one
from qtool.errors import FormatError
from qtool.formats.safetensors_file import checksum
from qtool.planned import Planned
from qtool.planning.plan import Plan
from qtool.scheme import GroupQuant, Scheme
from qtool.verification.matrix import Measured, measure
from qtool.verification.written import check_written


@dataclass(frozen=True)
class Report:
    """What was read back."""

    tensors: int
    matrices: int  # quantized ones
    nbytes: int


def verify(folder: Path, plan: Plan, checksums: Mapping[str, int]) -> Report:
    """Read an artifact back; FormatError names the first thing that is not as planned.

    checksums: the CRC-32 of every stored tensor, as `StreamWriter.checksums` has it.
    """
    artifact = one_by_one(Artifact.open(folder))
    if artifact.found.format != plan.format:
        raise FormatError(
            f"{folder}: its config says format {artifact.found.format}; planned was {plan.format}"
        )
    _compare_layout(artifact, plan)
    nbytes = 0
    matrices: list[Measured] = []
    for planned in plan.tensors:
        if (found := _measured(artifact, planned)) is not None:
            matrices.append(found)
        nbytes += _read_again(artifact, planned, checksums)
    check_written(folder, artifact, matrices)
    return Report(len(artifact.checkpoint.tensors), len(matrices), nbytes)


def _measured(artifact: Artifact, planned: Planned) -> Measured | None:
    """What is in a quantized matrix; None of another tensor."""
    if not isinstance(planned.action, Scheme):
        return None
    quant = _check_matrix(artifact, planned, planned.action)
    return measure(artifact, artifact.entries[planned.name], quant)


def _read_again(artifact: Artifact, planned: Planned, checksums: Mapping[str, int]) -> int:
    """The bytes that are stored of a tensor, a part in memory at a time."""
    nbytes = 0
    for spec in planned.outputs:
        file, info = artifact.checkpoint.file_of(spec.name), artifact.checkpoint.tensors[spec.name]
        nbytes += info.nbytes
        if checksum(file, info) != checksums.get(spec.name):
            raise FormatError(
                f"{file}: tensor {spec.name!r} reads back with other bytes than were written; the "
                "disk or the memory is faulty"
            )
    return nbytes


def _compare_layout(artifact: Artifact, plan: Plan) -> None:
    """Exactly the planned tensors, each in its file with its dtype, shape and place."""
    checkpoint = artifact.checkpoint
    planned = {n: (f.name, info) for f in plan.layout.files for n, info in f.tensors.items()}
    for name in planned.keys() ^ checkpoint.tensors.keys():
        problem = "is missing" if name in planned else "was not planned"
        raise FormatError(f"{checkpoint.path}: tensor {name!r} {problem}")
    for name, (file, info) in planned.items():
        if checkpoint.tensors[name] != info or checkpoint.file_of(name).name != file:
            raise FormatError(
                f"{checkpoint.file_of(name)}: tensor {name!r} is {checkpoint.tensors[name]}; "
                f"planned was {info} in {file}"
            )


def _check_matrix(artifact: Artifact, planned: Planned, scheme: Scheme) -> GroupQuant:
    """One quantized matrix: scheme, shape, scales, zeros."""
    quant = artifact.read(planned.name)
    if not isinstance(quant, GroupQuant):
        raise FormatError(f"{planned.name}: reads back dense; planned was {scheme}")
    if quant.scheme != scheme or quant.shape != planned.shape:
        raise FormatError(
            f"{planned.name}: reads back as {quant.scheme} {list(quant.shape)}; "
            f"planned was {scheme} {list(planned.shape)}"
        )
    check_scales(planned.name, quant.row_scale() if scheme.outer == "rows" else quant.scale)
    middle = 1 << (scheme.bits - 1)
    if scheme.symmetric and not scheme.is_float and (quant.zero != middle).any():
        raise FormatError(f"{planned.name}: symmetric, but not every zero is {middle}")
    return quant


def check_scales(name: str, scale: NDArray[np.floating]) -> None:
    """FormatError where a scale [out, groups] is not finite and positive."""
    good = np.isfinite(scale) & (scale > 0)
    if not good.all():
        row, group = (int(i) for i in np.argwhere(~good)[0])
        raise FormatError(
            f"{name}: the scale of row {row}, group {group} is {float(scale[row, group])}; "
            "scales must be finite and positive"
        )
