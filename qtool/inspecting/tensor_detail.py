"""One matrix of an artifact, read: what `inspect --tensor` tells of its codes and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qtool.artifacts.artifact import Artifact, one_by_one
from qtool.artifacts.entry import Entry
from qtool.formats.layer_names import experts_of
from qtool.formats.safetensors_file import FLOAT_DTYPES
from qtool.inspecting.histogram import finite_or_none, of_scales, of_values, scale_lines
from qtool.messages.printable import printable
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np


def row_of(entry: Entry) -> dict[str, Any]:
    """What its header tells."""
    return {
        "name": entry.name,
        "shape": list(entry.shape),
        "dtype": entry.dtype,
        "scheme": None if entry.scheme is None else str(entry.scheme),
        "bits_per_weight": entry.bits_per_weight,
        "bytes": entry.nbytes,
    }


def tensor_detail(artifact: Artifact, name: str) -> dict[str, Any]:
    """One matrix, read: its row, its stored tensors, and the ranges of what is in it."""
    if experts_of(name) is not None:
        artifact = one_by_one(artifact)
    entry = artifact.entry(name)
    tensors = artifact.checkpoint.tensors
    detail = row_of(entry)
    detail["stored"] = [
        {"name": n, "dtype": tensors[n].dtype, "shape": list(tensors[n].shape)}
        for n in entry.stored
    ]
    detail["file"] = artifact.checkpoint.file_of(entry.stored[0]).name
    if entry.scheme is None and entry.dtype not in FLOAT_DTYPES:
        return detail
    if entry.scheme is not None and not isinstance(entry.scheme, Scheme):
        return detail
    value = artifact.read(name)
    return detail | (of_quant(value) if isinstance(value, GroupQuant) else of_floats(value))


def of_quant(value: GroupQuant) -> dict[str, Any]:
    """What is said of a quantized matrix: its codes and scales."""
    scales = of_scales(value.scale)
    found: dict[str, Any] = {
        "scheme": str(value.scheme),
        "groups": value.scheme.groups(value.shape[1]) if value.shape[1] else 0,
        "act_order": value.g_idx is not None,
        "scale_range": scales.get("range"),
        "scales": scales,
    }
    if value.outer is not None:
        found["outer_scale"] = finite_or_none(float(value.outer))
    counts = np.bincount(value.codes.reshape(-1), minlength=1 << value.scheme.bits)
    if not value.scheme.is_float:
        if value.zero.size:
            found["zero_range"] = [int(value.zero.min()), int(value.zero.max())]
        found["code_values"] = list(range(1 << value.scheme.bits))
        found["code_counts"] = [int(n) for n in counts]
        return found
    from qtool.float_codes import TABLES

    spelled = TABLES[value.scheme.book][: len(counts)]
    order = np.argsort(spelled, kind="stable")
    order = order[np.isfinite(spelled[order])]
    found["not_finite"] = int(counts[~np.isfinite(spelled)].sum())
    found["code_values"] = [float(number) for number in spelled[order]]
    found["code_counts"] = [int(n) for n in counts[order]]
    return found


def of_floats(value: NDArray[np.float32]) -> dict[str, Any]:
    """What is said of a dense tensor."""
    if not value.size:
        return {}
    finite = value[np.isfinite(value)]
    found: dict[str, Any] = {"not_finite": int(value.size - finite.size)}
    if finite.size:
        found["range"] = [float(finite.min()), float(finite.max())]
        found["mean"] = float(finite.mean(dtype=np.float64))
        found["std"] = float(finite.std(dtype=np.float64))
        found["histogram"] = of_values([finite], *found["range"])
    return found


def detail_lines(detail: Mapping[str, Any]) -> list[str]:
    """The same for a person, without the histograms."""
    lines = [printable(str(detail["name"]))]
    lines.append(f"  shape            {'x'.join(map(str, detail['shape'])) or '1'}")
    lines.append(f"  scheme           {detail['scheme'] or 'dense'}")
    lines.append(f"  stored           {detail['bytes']:,} bytes in {printable(detail['file'])}")
    for stored in detail["stored"]:
        shape = "x".join(map(str, stored["shape"])) or "1"
        lines.append(f"    {printable(stored['name'])}  {stored['dtype']} {shape}")
    lines.append(f"  bits per weight  {detail['bits_per_weight']:.3f}")
    if "scales" in detail:
        lines += scale_lines(detail["scales"])
        lines.append(f"  groups           {detail['groups']} in a row")
        if detail.get("outer_scale") is not None:
            lines.append(f"  outer scale      {detail['outer_scale']:.6g}")
        if "zero_range" in detail:
            low, high = detail["zero_range"]
            lines.append(f"  zeros            {low} to {high}")
        if detail["act_order"]:
            lines.append("  columns          out of group order (g_idx)")
    if "range" in detail:
        lines.append(f"  values           {detail['range'][0]:.6g} to {detail['range'][1]:.6g}")
        lines.append(f"  mean, deviation  {detail['mean']:.6g}, {detail['std']:.6g}")
    if detail.get("not_finite"):
        lines.append(f"  not finite       {detail['not_finite']:,}")
    return lines
