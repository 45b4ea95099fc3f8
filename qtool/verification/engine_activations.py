"""Which inputs of whole numbers vLLM multiplies with which weights of compressed-tensors.

    int-quantized    8 bits, a scale a row or matrix:    inputs of 8 bits, static with one scale for
                                                         all, or dynamic with one a token
                     4 bits, a scale a row or group:     inputs of 8 bits, dynamic, one a token
    pack-quantized   a scale a row or group:             symmetric inputs of 4 or 8 bits, dynamic,
                                                         one a token or group (humming)

No others: not SmoothQuant's dynamic scale for all tokens (O2), nor ZeroQuant's 8-bit groups.

Source: vLLM 0.32, compressed_tensors/compressed_tensors.py.
"""

from collections.abc import Mapping
from typing import Any

_ROWS = ("tensor", "channel")
_RUNS = ("channel", "group")


def refused(group: Mapping[str, Any], layout: str) -> str | None:
    """Why vLLM has no kernel for a group with inputs of whole numbers; None where it has, and for
    other groups."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping) or not isinstance(inputs, Mapping):
        return None
    if any(str(arguments.get("type") or "int") != "int" for arguments in (weights, inputs)):
        return None
    kind = (weights.get("num_bits", 8), _strategy(weights, "tensor"))
    given = (inputs.get("num_bits", 8), _strategy(inputs, "tensor"), bool(inputs.get("dynamic")))
    if layout == "pack-quantized":
        fits = (
            kind[1] in _RUNS
            and given[0] in (4, 8)
            and given[1] in ("token", "group")
            and given[2]
            and inputs.get("symmetric", True) is not False
        )
        known = "symmetric inputs of 4 or 8 bits, dynamic, with a scale a token or group, do"
    elif kind[0] == 4:
        fits = kind[1] in _RUNS and given == (8, "token", True)
        known = "inputs of 8 bits, dynamic, with a scale a token, do, and weights a scale a group"
    else:
        fits = kind[0] == 8 and kind[1] in _ROWS
        fits = fits and given in ((8, "tensor", False), (8, "token", True))
        known = (
            "inputs of 8 bits, static with one scale for all or dynamic with one a token, do, and "
            "8-bit weights with a scale a row"
        )
    if fits:
        return None
    when = "dynamic" if given[2] else "static"
    return (
        f"{kind[0]}-bit weights per {kind[1]} with {when} {given[0]}-bit inputs per {given[1]} "
        f"have no kernel; {known}"
    )


def _strategy(arguments: Mapping[str, Any], default: str) -> str:
    """As compressed-tensors completes it."""
    said = str(arguments.get("strategy") or "").lower()
    size = arguments.get("group_size")
    if said:
        return said
    return default if size is None else "channel" if size == -1 else "group"
