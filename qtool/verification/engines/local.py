"""What transformers, ExLlamaV2 and llama.cpp make of an artifact.

    transformers 5  AWQ and GPTQ through the package gptqmodel (GPTQ with optimum); FP8 on GPUs of
                    compute capability 8.9 and later, else as bfloat16; compressed-tensors through
                    the package of that name, decompressed when it is loaded; its scheme of keys
                    and values is asked of attention that takes past_key_values, which
                    transformers 5.24 calls cache, so that nothing is rounded there
    ExLlamaV2       EXL2, 4-bit GPTQ and float16 models; rows and columns in multiples of 32. It
                    tells them by the names of tensors, so that it takes an AWQ file for GPTQ;
                    gptq_v2 it turns into v1 word by word, which borrows wherever a zero is 0
    llama.cpp       GGUF only; an architecture and block types that it has code for

    vLLM            of GGUF the NVFP4 files of Flint alone (models/flint of 0.33)

Sources: transformers 5.24 (quantizers, models/llama), compressed-tensors 0.20 (quantization/
lifecycle/initialize), GPTQModel 7.7 (nn_modules/qlinear), exllamav2 (module.py, ext.py,
config.py), llama.cpp by the gguf package's MODEL_ARCH_NAMES.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from qtool.checkpoints.structure import text_config
from qtool.formats import auto_round
from qtool.gguf_types import BY_NAME, FLOATS, BlockType
from qtool.verification.engines import auto_round_config
from qtool.verification.engines.kernels import BFLOAT_ONLY
from qtool.verification.engines.view import EngineView, alike, some
from qtool.verification.finding import Finding

_EXLLAMA_STEP = 32
_LOADED = {
    "gptq": "through the packages gptqmodel and optimum",
    "awq": "through the packages gptqmodel and accelerate",
    "compressed-tensors": (
        "through the package compressed-tensors, which decompresses it: no speed is won"
    ),
    "fp8": "on GPUs of compute capability 8.9 and later; elsewhere it is turned into bfloat16",
    "bitsandbytes": "through the package bitsandbytes",
}
# By any of these it finds the scales of its format fp8.
_FP8_SCALES = ("weight_scale_inv", "scale", "qscale_weight")
# What it has a loader for beside formats that are told of below; of others it reads the tensors as
# a plain model's, with a warning (quantizers/auto.py).
_METHODS = frozenset({
    "aqlm", "auto-round", "awq", "bitnet", "bitsandbytes", "compressed-tensors", "eetq",
    "fbgemm_fp8", "fouroversix", "fp8", "fp_quant", "gemma", "gguf", "gptq", "higgs", "hqq",
    "metal", "mxfp4", "mxfp8", "nvfp4", "quanto", "quark", "sinq", "spqr", "torchao", "vptq",
})  # fmt: skip
EXPERTS = "engine-experts"
_INSTEAD = {
    "gptq": "serve it with vLLM or SGLang, or load it with GPTQModel itself",
    "awq": "serve it with vLLM or SGLang, or load it with GPTQModel itself",
    "bitsandbytes": "use fp8-block-hf or w8a16-ct where its class takes experts one by one "
    "(`qtool plan --engine transformers` tells), or q8_0 for llama.cpp",
}
_GPTQ_GROUPS = (-1, 16, 32, 64, 128, 256, 512, 1024)


def instead_for_experts(format_: str, config: Mapping[str, Any]) -> str | None:
    """What to do with experts in a format that transformers loads into linear layers alone; None
    of one that it loads experts of. Those of Llama 4 it takes apart for bitsandbytes."""
    patched = str(text_config(config).get("model_type")).startswith("llama4")
    return None if patched and format_ == "bitsandbytes" else _INSTEAD.get(format_)


def transformers_findings(view: EngineView) -> Iterator[Finding]:
    """What has to be installed, and what these packages take."""
    if view.format == "qserve":
        yield Finding(
            "error", "engine-format", "",
            "transformers has no loader for qserve, whose tensors OmniServe reads on NVIDIA GPUs",
        )  # fmt: skip
    if view.format == "mlx":
        yield Finding(
            "error", "engine-format", "",
            "transformers has no loader for mlx, whose codes mlx-lm reads on Apple's machines",
        )  # fmt: skip
    method = view.quantization.get("quant_method")
    if view.format not in ("qserve", "mlx", "dense", auto_round.NAME) and method is not None:
        yield from _unknown_method(method)
    if view.format == "fp8" and method == "fp8":
        yield from _fp8_scales(view)
    if view.format in _LOADED:
        yield Finding(
            "note", "engine-route", "",
            f"transformers loads {view.format} {_LOADED[view.format]}",
        )  # fmt: skip
    if view.format == "awq" and view.layout not in ("gemm", ""):
        yield Finding(
            "warning", "engine-slow", "",
            f"transformers has kernels for the AWQ layout {view.layout} on NVIDIA GPUs alone; "
            "gemm loads everywhere",
        )  # fmt: skip
    status = view.quantization.get("quantization_status")
    if view.format == "compressed-tensors" and view.quantized and status != "compressed":
        said = "without a quantization_status" if status is None else f"by that of {status!r}"
        yield Finding(
            "error", "engine-format", "quantization_status",
            f"transformers loads the codes as if they were weights, or none, {said}: set "
            "quantization_status to compressed",
        )  # fmt: skip
    if view.format == auto_round.NAME:
        yield from auto_round_config.transformers_findings(view)
    experts = [layer.module for layer in view.quantized if layer.expert]
    if experts and (instead := instead_for_experts(view.format, view.config)) is not None:
        yield Finding(
            "error", EXPERTS, experts[0],
            f"transformers 5 has the experts of a block in one parameter, in which codes of "
            f"{view.format} have no place ({some(experts)}); {instead}",
        )  # fmt: skip
    if view.format in ("awq", "gptq"):
        largest = 128 if view.format == "awq" else 1024
        yield from alike(
            "error", "engine-scheme", view.quantized,
            lambda layer: None
            if layer.stored is None
            or (layer.stored.group_size in _GPTQ_GROUPS and layer.stored.group_size <= largest)
            else f"gptqmodel has no kernel for group_size {layer.stored.group_size}",
            "transformers will refuse {}",
        )  # fmt: skip
    if view.format == "awq" and view.config.get("model_type") in BFLOAT_ONLY:
        yield Finding(
            "warning", "engine-dtype", "",
            f"{view.config['model_type']} overflows in float16, which transformers casts AWQ "
            "models to on GPUs; use GPTQ or compressed-tensors",
        )  # fmt: skip
    if view.format == "gptq" and view.layout not in ("v1", "v2"):
        yield Finding(
            "error", "engine-format", "",
            f"transformers loads gptq and gptq_v2, not checkpoint_format {view.layout}",
        )  # fmt: skip


def _unknown_method(method: object) -> Iterator[Finding]:
    if method in _METHODS:
        return
    yield Finding(
        "error", "engine-format", "quant_method",
        f"transformers knows no quant_method {str(method)[:40]!r}, takes the model for one that "
        "is not quantized, and makes up its weights: put back the config that the artifact was "
        "made with",
    )  # fmt: skip


def _fp8_scales(view: EngineView) -> Iterator[Finding]:
    named = [layer.module for layer in view.quantized if not layer.expert]
    lost = [m for m in named if not any(f"{m}.{end}" in view.names for end in _FP8_SCALES)]
    if lost:
        yield Finding(
            "error", "engine-format", lost[0],
            f"transformers looks for weight_scale_inv of {some(lost)}, and takes 1 where there is "
            "none; put back the config that the artifact was made with, or rename the scales",
        )  # fmt: skip


def cache_findings(view: EngineView) -> Iterator[Finding]:
    """Keys and values that a config of compressed-tensors has rounded."""
    scheme = view.quantization.get("kv_cache_scheme")
    if view.format == "compressed-tensors" and isinstance(scheme, Mapping):
        yield Finding(
            "warning", "engine-route", "",
            "transformers 5.24 keeps keys and values as they are, whatever kv_cache_scheme says: "
            "compressed-tensors, up to 0.20.1 at least, does not know its attention, and takes the "
            "scales for unexpected tensors; transformers 5.23 rounds them",
        )  # fmt: skip


def exllama_findings(view: EngineView) -> Iterator[Finding]:
    """GPTQ of 4 bits, in steps of 32."""
    if view.format not in ("gptq", "exl2", "dense"):
        taken = " and would take it for GPTQ" if view.format == "awq" else ""
        yield Finding(
            "error", "engine-format", "",
            f"ExLlamaV2 reads EXL2 and 4-bit GPTQ, not {view.format}{taken}; quantize with "
            "format gptq, 4 bits",
        )  # fmt: skip
        return
    yield from alike(
        "error", "engine-scheme", view.quantized,
        lambda layer: None
        if layer.stored is None or layer.stored.bits in (0, 4)
        else f"{layer.stored.bits}-bit GPTQ, where it reads 4 bits; quantize with 4 bits",
        "ExLlamaV2 will refuse {}",
    )  # fmt: skip
    yield from alike(
        "error", "engine-shape", view.quantized,
        lambda layer: None
        if layer.out_features % _EXLLAMA_STEP == 0 == layer.in_features % _EXLLAMA_STEP
        else f"[{layer.out_features}, {layer.in_features}] is not in steps of {_EXLLAMA_STEP}; "
        "leave it dense",
        "ExLlamaV2 will refuse {}",
    )  # fmt: skip
    skewed = [x for x in view.quantized if x.stored is not None and not x.stored.symmetric]
    if view.layout == "v2" and skewed:
        yield Finding(
            "warning", "engine-zeros", skewed[0].module,
            f"ExLlamaV2 takes 1 from every zero of gptq_v2 by a subtraction from the whole word, "
            f"which spoils the neighbours of a zero point 0 ({some([x.module for x in skewed])}); "
            "store it as v1, or quantize with weights.symmetric=true",
        )  # fmt: skip


def gguf_findings(
    architecture: str | None, types: Mapping[str, BlockType], engine: str, who: str
) -> Iterator[Finding]:
    """A GGUF file with any engine, or (architecture None) any other artifact with llama.cpp."""
    if architecture is None:
        yield Finding(
            "error", "engine-format", "",
            "llama.cpp reads GGUF only; `qtool convert --to` or `qtool quantize` with a GGUF "
            "recipe makes such a file",
        )  # fmt: skip
        return
    if engine != "llama.cpp":
        if engine == "exllama":
            yield Finding("error", "engine-format", "", f"{who} reads no GGUF file")
        elif engine == "vllm":
            yield Finding(
                "error", "engine-format", "",
                "vLLM 0.33 has no GGUF loader of its own but for one model (Flint in NVFP4); "
                "convert the file, or use llama.cpp",
            )  # fmt: skip
        else:
            yield Finding(
                "warning", "engine-route", "",
                f"{who} reads GGUF through the package gguf and knows few architectures; "
                "llama.cpp is what such files are made for",
            )  # fmt: skip
        return
    if architecture not in _architectures():
        yield Finding(
            "error", "engine-architecture", "",
            f"llama.cpp has no code for the architecture {architecture!r} "
            "(general.architecture), as far as the gguf package tells; convert the model with "
            "the name that llama.cpp gives it, or update llama.cpp and gguf",
        )  # fmt: skip
    known = {*BY_NAME, *(kind.name for kind in FLOATS)}
    strange = [name for name, kind in types.items() if kind.name not in known]
    matrices = [name for name in strange if name.endswith(".weight")]
    if matrices:
        yield Finding(
            "error", "engine-types", matrices[0],
            f"llama.cpp does not multiply by {types[matrices[0]].name}, the type of "
            f"{some(matrices)}; quantize the model anew",
        )  # fmt: skip


def _architectures() -> set[str]:
    """All that llama.cpp has names for."""
    from gguf.constants import MODEL_ARCH_NAMES

    from qtool.gguf.architectures import TABLE

    return {*MODEL_ARCH_NAMES.values(), *(row.name for row in TABLE.values())}
