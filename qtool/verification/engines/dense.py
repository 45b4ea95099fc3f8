"""Layers that vLLM builds without quantization, whatever a config says.

    indexer: wk, weights_proj      fused into one matrix (DeepSeek V3.2 and V4, GLM-5)
    compressor: wkv, wgate         likewise (DeepSeek V4)
    in_proj, x_proj, dt_proj and   of Mamba-1 layers (Mamba, FalconMamba, Jamba), which have x_proj;
    out_proj                       those of Mamba-2 take quantized ones

An indexer's wk in FP8 is turned into bfloat16 when it is loaded.
Source: vLLM 0.33 (models/deepseek_v2, models/deepseek_v4, layers/mamba/mamba_mixer).
"""

from collections.abc import Iterator

from qtool.verification.engines.view import EngineView, Layer, alike
from qtool.verification.finding import Finding

CHECK = "engine-dense"
_FUSED = {"wk", "weights_proj", "wkv", "wgate"}
_MAMBA = ("in_proj", "x_proj", "dt_proj", "out_proj")


def dense_findings(view: EngineView, engine: str, who: str) -> Iterator[Finding]:
    """Quantized layers that the engine has no place for."""
    if engine != "vllm":
        return
    mixers = {layer.module.rpartition(".")[0] for layer in view.layers if layer.last == "x_proj"}

    def why(layer: Layer) -> str | None:
        parent = layer.module.rpartition(".")[0]
        if parent in mixers and layer.last in _MAMBA:
            what = "the matrices of Mamba-1 layers"
        elif parent.endswith((".indexer", ".compressor")) and layer.last in _FUSED:
            if view.format == "fp8" and layer.last == "wk":
                return None
            what = "what an indexer is made of"
        else:
            return None
        override = f'{{match: "*.{parent.rpartition(".")[2]}.*", dense: true}}'
        return (
            f"{who} builds {what} without quantization and finds no weight for it; leave it dense "
            f"by an override ({override})"
        )

    yield from alike("error", CHECK, view.quantized, why, "{} is quantized")
