"""Scales of activations: stored where the config says that they are not found at run time."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from qtool.artifacts.stored_config import quantization_config
from qtool.formats.compressed_tensors_config import group_of
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some, verb
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

CHECK = "input-scales"
_NAMES = ("input_scale", "input_global_scale")
_SMALL = 1 << 16  # numbers: a scale for each channel at most


def check_inputs(subject: Subject) -> Iterator[Finding]:
    """input-scales: there where promised, finite and positive."""
    tensors = subject.artifact.checkpoint.tensors
    lost: dict[str, list[str]] = defaultdict(list)
    for entry in subject.entries.values():
        wanted = None if entry.scheme is None else _wanted(subject, entry.module)
        if wanted is not None and f"{entry.module}.{wanted}" not in tensors:
            lost[wanted].append(entry.module)
    for name, modules in lost.items():
        yield Finding(
            "error", CHECK, f"{modules[0]}.{name}",
            f"the config says that scales of activations are stored, and {name} of "
            f"{counted(len(modules), 'matrix')} is missing: {some(modules)}; calibrate anew, or "
            "choose dynamic activations",
        )  # fmt: skip
    wrong = [
        name
        for name, info in tensors.items()
        if name.rpartition(".")[2] in _NAMES
        and info.dtype in ("F32", "F16", "BF16")
        and info.size <= _SMALL
        and not _sane(subject, name)
    ]
    if wrong:
        yield Finding(
            "error", CHECK, wrong[0],
            f"{counted(len(wrong), 'scale')} of activations {verb(len(wrong), 'are', 'is')} NaN, "
            "infinite or not "
            f"positive: {some(wrong)}; calibrate anew, with text that reaches these layers",
        )  # fmt: skip


def _sane(subject: Subject, name: str) -> bool:
    values = subject.artifact.checkpoint.float32(name)
    return bool((np.isfinite(values) & (values > 0)).all())


def _wanted(subject: Subject, module: str) -> str | None:
    """The tensor that a quantized matrix needs for its inputs, or None."""
    found = subject.artifact.found
    if found.format == "compressed-tensors" and found.groups:
        inputs = group_of(module, found).activations
        if inputs is None or inputs.get("dynamic") is True:
            return None
        return "input_global_scale" if inputs.get("dynamic") == "local" else "input_scale"
    config = quantization_config(subject.artifact.checkpoint)
    if found.format == "fp8" and config.get("activation_scheme") == "static":
        return "input_scale"
    return None
