"""How a quantized checkpoint says that engines round the inputs of a matrix."""

from collections.abc import Mapping
from typing import Any

from qtool.artifacts.artifact import Artifact
from qtool.formats.compressed_tensors_config import group_of
from qtool.formats.modelopt import WEIGHTS_ALONE
from qtool.scheme import Scheme


def input_arguments(
    artifact: Artifact, module: str, scheme: Scheme | str | None
) -> Mapping[str, Any] | None:
    """QuantizationArgs of a matrix's input; None where it is not rounded."""
    if not isinstance(scheme, Scheme):
        return None
    if artifact.found.format == "compressed-tensors":
        return group_of(module, artifact.found).activations
    if artifact.found.format == "fp8":
        if artifact.found.layout == "static":
            return {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
        size = scheme.group_size
        strategy = {"strategy": "group", "group_size": size} if size > 0 else {"strategy": "token"}
        return {"num_bits": 8, "type": "float", "dynamic": True, **strategy}
    if artifact.found.format == "qserve":
        return {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    if artifact.found.format == "modelopt":
        return _of_modelopt(artifact, module, scheme)
    return None


def _of_modelopt(artifact: Artifact, module: str, scheme: Scheme) -> Mapping[str, Any] | None:
    """ModelOpt quantizes inputs like weights; in a mixture, where an input_scale says so."""
    algorithm = artifact.found.layout
    if algorithm == WEIGHTS_ALONE:
        return None
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    if algorithm == "MIXED_PRECISION" and input_scale(module) not in artifact.checkpoint.tensors:
        return None
    if scheme.bits == 8:
        return {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    runs = {"strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    return {"num_bits": 4, "type": "float", **runs}


def input_scale(module: str) -> str:
    """The tensor that holds ModelOpt's scale of a matrix's inputs."""
    return f"{module}.input_scale"
