"""What a quantized checkpoint has beside its weights, and what no conversion carries over.

A conversion is of weights. Where engines quantize the inputs of a layer too (W8A8, FP8), or keep
their KV cache in few bits, the output's config says nothing of it, and the scales that were stored
for it are left out: each by name, in the certificate.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from qtool.artifacts.artifact import Artifact
from qtool.formats.modelopt import WEIGHTS_ALONE

ACTIVATIONS = "activations"  # the name under which a certificate has them among what is dropped
_INPUTS = ("input_scale", "input_zero_point", "input_global_scale")
_OUTPUTS = ("output_scale", "output_zero_point")
_CACHE = ("q_scale", "k_scale", "v_scale", "kv_scale")
_WHY = {
    **dict.fromkeys(_INPUTS, "of quantized inputs, of which the output's config says nothing"),
    **dict.fromkeys(_OUTPUTS, "of quantized outputs, of which the output's config says nothing"),
    **dict.fromkeys(_CACHE, "a scale of the KV cache, of which the output's config says nothing"),
}


def reason(name: str) -> str | None:
    """Why a stored tensor is left out, or None where it is part of a weight."""
    return _WHY.get(name.rpartition(".")[2])


def activations(artifact: Artifact) -> str | None:
    """How engines quantize the inputs of its matrices, in words; None where they do not."""
    found = artifact.found
    kinds = {_words(group.activations) for group in found.groups if group.activations is not None}
    if found.format == "fp8":
        kinds = {f"float8, {'static' if found.layout == 'static' else 'dynamic'}"}
    elif found.format == "bitsandbytes" and found.scheme is not None:
        kinds = {"int8, dynamic, outliers apart"}
    elif found.format == "qserve":
        kinds = {"int8, dynamic, one scale a token"}
    elif found.format == "modelopt" and found.layout != WEIGHTS_ALONE:
        kinds = {f"as ModelOpt's {found.layout} does"}
    return "; ".join(sorted(kinds)) or None


def _words(arguments: Mapping[str, Any]) -> str:
    """QuantizationArgs, short."""
    parts = [f"{arguments.get('type') or 'int'}{arguments.get('num_bits') or 8}"]
    parts.append("dynamic" if arguments.get("dynamic") else "static")
    if arguments.get("strategy"):
        parts.append(f"one scale a {arguments['strategy']}")
    return ", ".join(parts)


def named(inputs: str | None) -> tuple[tuple[str, str], ...]:
    """The inputs' own line in a certificate."""
    if inputs is None:
        return ()
    why = f"the source has inputs quantized, too ({inputs}); the output says nothing of them"
    return ((ACTIVATIONS, why),)


def warnings(inputs: str | None, dropped: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The same in sentences."""
    found = []
    if inputs is not None:
        found.append(
            f"the source has quantized activations, too ({inputs}); the output has its weights "
            "alone"
        )
    for what, ends in (("quantized activations", _INPUTS + _OUTPUTS), ("the KV cache", _CACHE)):
        names = [name for name, _ in dropped if name.rpartition(".")[2] in ends]
        if names:
            many = "scale of {} is" if len(names) == 1 else "scales of {} are"
            found.append(f"{len(names)} {many.format(what)} dropped ({names[0]} is the first)")
    return tuple(found)
