"""Matrices that are packed, though no config says so: which a model that is dense has none of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtool.formats.dtypes import FLOAT_DTYPES

if TYPE_CHECKING:
    from qtool.artifacts.artifact import Artifact

_NO_METHOD = "unknown"
_MLX = "U32"  # the dtype of MLX's words, which no other format has
_SCALES = ("scales", "weight_scale", "weight_scale_inv", "SCB")
_SHOWN = 3


def untold(artifact: Artifact) -> list[str]:
    """Names of the codes: words, or numbers of 8 bits, beside scales. Of MLX, whose config names no
    method, also where it lacks what it is known by."""
    if artifact.found.format not in ("dense", _NO_METHOD):
        return []
    tensors = artifact.checkpoint.tensors
    found = []
    for name, info in tensors.items():
        module, _, last = name.rpartition(".")
        if artifact.found.format == _NO_METHOD and info.dtype != _MLX:
            continue
        if last == "weight_packed":
            found.append(name)
        elif last == "weight" and info.dtype not in FLOAT_DTYPES:
            found += [name] * any(f"{module}.{scales}" in tensors for scales in _SCALES)
    return found


def said_untold(artifact: Artifact) -> str | None:
    """That there are such, and what is missing; None where there are none."""
    names = untold(artifact)
    if not names:
        return None
    mlx = artifact.checkpoint.tensors[names[0]].dtype == _MLX
    key, how = ("quantization", " as MLX packs them") if mlx else ("quantization_config", "")
    config = artifact.checkpoint.config
    where = f"config.json has no {key}" if config else "there is no config.json"
    if artifact.found.format == _NO_METHOD or (mlx and config.get(key)):
        where = f"{key} of config.json lacks bits or group_size"
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    count = "1 matrix is" if len(names) == 1 else f"{len(names):,} matrices are"
    return (
        f"{count} packed{how} ({', '.join(names[:_SHOWN])}{more}), and {where}, which would say in "
        "how many bits and in what groups: put back that of the artifact"
    )
