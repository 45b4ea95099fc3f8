"""Matrices whose stored shapes do not fit what the config says, told once for what is wrong once.

A single wrong number in quantization_config leaves every matrix of a model without a meaning. Where
another value of one setting makes sense of all of them, it is the setting that is told.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from qtool.artifacts.artifact import Artifact
from qtool.artifacts.stored_config import quantization_config
from qtool.errors import QtoolError
from qtool.messages.printable import in_json
from qtool.messages.sentences import AGAIN, some
from qtool.messages.sentences import count as counted
from qtool.scheme import Scheme
from qtool.verification.by_table import other_shapes, row_of
from qtool.verification.finding import Finding, of_setting
from qtool.verification.subject import Subject, module_of, subject_of

CHECK = "shapes"
_TABLES = ("quantization", "quantization_config")  # of config.json; MLX asks for the first
_MOST = 16  # settings that are tried
_BITS = (2, 3, 4, 5, 6, 8)
_SIZES = (16, 32, 64, 128, 256, 512, 1024, -1)
# What settings of any format may say instead, under the names that formats have for them.
_OTHERS: Mapping[str, Sequence[object]] = {
    "bits": _BITS,
    "w_bit": _BITS,
    "num_bits": _BITS,
    "group_size": _SIZES,
    "q_group_size": _SIZES,
    "version": ("gemm", "gemv", "gemv_fast", "llm-awq"),
    "quant_method": ("awq", "gptq"),
}


@dataclass(frozen=True)
class Setting:
    """A setting of quantization_config with which all shapes would make sense."""

    path: tuple[str, ...]  # of keys
    said: object
    fits: object


def check_shapes(subject: Subject, artifact: Artifact) -> Iterator[Finding]:
    """shapes: every quantized matrix has the shapes that the config gives it.

    artifact: with the broken modules, which `subject` lacks.
    """
    if not subject.broken:
        return
    names = [*subject.broken]
    if (found := other_setting(artifact, names)) is not None:
        whole = ".".join(found.path)
        yield Finding(
            "error", CHECK, names[0],
            f"config.json says {whole} {in_json(found.said)}, and the shapes of "
            f"{counted(len(names), 'matrix')} ({some(names)}) are those of {in_json(found.fits)}, "
            "with which every matrix fits: put that back",
            of_setting(whole),
        )  # fmt: skip
        return
    alike: dict[str, list[str]] = defaultdict(list)
    for module, why in subject.broken.items():
        alike[why.replace(module, "")].append(module)
    for modules in alike.values():
        why = subject.broken[modules[0]]
        if len(modules) == 1:
            yield Finding("error", CHECK, modules[0], why)
            continue
        yield Finding(
            "error", CHECK, modules[0],
            f"{counted(len(modules), 'matrix')} ({some(modules)}) do not fit the config; "
            f"{why}: correct the config, or {AGAIN}",
        )  # fmt: skip


def unread(failed: Sequence[Finding]) -> Iterator[Finding]:
    """Matrices that could not be read, of one reason in one finding."""
    alike: dict[str, list[Finding]] = defaultdict(list)
    for one in failed:
        alike[one.message.replace(one.name.removesuffix(".weight"), "")].append(one)
    for first, *others in alike.values():
        names = [one.name for one in (first, *others)]
        several = f"{counted(len(names), 'matrix')} ({some(names)}) cannot be read; "
        yield replace(first, message=several * bool(others) + first.message)


def other_setting(artifact: Artifact, broken: Sequence[str]) -> Setting | None:
    """The one setting that explains the shapes of every matrix with another value; None where there
    is none, or several are."""
    config = artifact.checkpoint.config
    meant = quantization_config(artifact.checkpoint)
    key = next((key for key in _TABLES if config.get(key) is meant), None)
    if key is None:
        return None
    first = _only(artifact, broken[0])
    found = []
    for path, said in islice(_settings(meant, broken[0]), _MOST):
        for value in _OTHERS[path[-1]]:
            changed = {**config, key: _with(meant, path, value)}
            if value != said and _fits(first, changed, broken[:1]):
                found += [Setting((key, *path), said, value)] * _fits(artifact, changed, broken)
    return found[0] if len(found) == 1 else None


def _settings(table: Mapping[str, Any], module: str) -> Iterator[tuple[tuple[str, ...], object]]:
    """Those that may be wrong, with their keys from the outside in; of tables for single modules
    that of this module alone."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            if "." not in key or key == module:
                yield from (((key, *path), said) for path, said in _settings(value, module))
        elif key in _OTHERS and table.get("type") != "float":
            yield (key,), value


def _with(table: Mapping[str, Any], path: Sequence[str], value: object) -> dict[str, Any]:
    """The table with one setting changed."""
    key, *rest = path
    return {**table, key: _with(table[key], rest, value) if rest else value}


def _only(artifact: Artifact, module: str) -> Artifact:
    """The artifact with the tensors of one module."""
    tensors = artifact.checkpoint.tensors
    own = {name: info for name, info in tensors.items() if module_of(name) == module}
    return replace(artifact, checkpoint=replace(artifact.checkpoint, tensors=own))


def _fits(artifact: Artifact, config: Mapping[str, Any], modules: Sequence[str]) -> bool:
    """Whether modules are matrices of codes by another config, and all others still are, of the
    shapes that the architecture has."""
    try:
        changed = Artifact.of(replace(artifact.checkpoint, config=config))
    except QtoolError:
        return False
    found = subject_of(Path(), changed, None)
    entries = (found.entries.get(f"{module}.weight") for module in modules)
    if found.broken or not all(one and isinstance(one.scheme, Scheme) for one in entries):
        return False
    row = row_of(config)
    return row is None or not any(other_shapes(found, *row))
