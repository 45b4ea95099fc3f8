"""Rotations that an artifact leaves to the engine (transform_config), and who computes them.

    vLLM           inputs of linear layers, by a kernel for CUDA, on one GPU, without a bias; in
                   attention it has no such step and leaves it out
    SGLang,        read no transform_config: inputs stay as they are, and the weights are those of
    transformers   another network

Sources: vLLM 0.33 (compressed_tensors/transform), transformers 5.24 (quantizers), SGLang 0.5.23
(quantization/compressed_tensors).
"""

from collections.abc import Iterator, Mapping

from qtool.errors import FormatError, UnsupportedError
from qtool.formats.compressed_tensors_transforms import OnlineRotation, online_rotations
from qtool.verification.engines.view import EngineView, some
from qtool.verification.finding import Finding

CHECK = "engine-rotation"


def rotation_findings(view: EngineView, engine: str, who: str, tp: int) -> Iterator[Finding]:
    """What of transform_config an engine does not do."""
    if view.format != "compressed-tensors":
        return
    try:
        found = online_rotations(view.quantization)
        inputs = [rotation for rotation in found if not rotation.heads]
        rotated = _rotated(view, inputs)
    except (FormatError, UnsupportedError) as problem:
        yield Finding("warning", CHECK, "", f"what {who} makes of it is not known: {problem}")
        return
    if inputs and engine != "vllm":
        yield Finding(
            "error", CHECK, "",
            f"{who} reads no transform_config, so that inputs of {some(rotated)} stay as they are "
            "and the model answers nonsense; quantize without rotate.r4, or serve it with vLLM",
        )  # fmt: skip
    elif inputs:
        yield from _in_vllm(view, who, tp, rotated)
    if len(found) > len(inputs):
        yield _heads(view, who)


def _rotated(view: EngineView, inputs: list[OnlineRotation]) -> list[str]:
    names = [layer.module for layer in view.layers]
    return [name for name in names if any(rotation.means(name) for rotation in inputs)]


def _in_vllm(view: EngineView, who: str, tp: int, rotated: list[str]) -> Iterator[Finding]:
    biased = [name for name in rotated if f"{name}.bias" in view.names]
    for wrong, why in (
        (biased, "which have a bias, and rotates inputs of layers without one only"),
        (rotated if tp > 1 else [], "whose inputs are rotated, and does that on one GPU only"),
    ):
        if wrong:
            yield Finding(
                "error", CHECK, wrong[0],
                f"{who} will refuse {some(wrong)}, {why}; quantize without rotate.r4",
            )  # fmt: skip
    yield Finding(
        "note", CHECK, rotated[0] if rotated else "",
        f"{who} rotates inputs with a kernel for CUDA, so that only its builds for GPUs of NVIDIA "
        "run this artifact",
    )  # fmt: skip


def _heads(view: EngineView, who: str) -> Finding:
    """Without its step in attention a model is the same, but its scales of keys are not."""
    if isinstance(view.quantization.get("kv_cache_scheme"), Mapping):
        return Finding(
            "error", CHECK, "",
            f"{who} does not rotate queries and keys, and k_scale was measured of rotated ones; "
            "quantize without rotate.r3",
        )  # fmt: skip
    return Finding(
        "note", CHECK, "",
        f"{who} does not rotate queries and keys, which changes nothing where they are not rounded",
    )  # fmt: skip
