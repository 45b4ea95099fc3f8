"""What engines load of AutoRound's own config, whatever the layout of its matrices.

    vLLM           (as its method inc) packed as auto_round:auto_gptq or auto_round:auto_awq alone;
                   GPTQ's layout as it does GPTQ, with the humming kernels for 2 and 3 bits; AWQ's
                   with Marlin where it has zeros, else with AWQ's slow kernel
    SGLang         the same two packings, GPTQ's where Marlin has it and AWQ's at 4 bits;
                   expressions of extra_config from end to end of a name; an AWQ matrix that has
                   no Marlin kernel for its shape is not padded
    transformers   through the package auto-round, which has kernels of its own for all but
                   AWQ's packing and asymmetric auto_round:auto_gptq: where no other package has
                   one, 0.16 puts a layer there that reads a plain weight, and none is stored

An engine takes a layer for quantized unless extra_config gives it more than 8 bits or it lies
outside of block_name_to_quantize.
Sources: vLLM 0.33 (quantization/inc), SGLang 0.5.23 (quantization/auto_round, gptq, awq),
transformers 5.24 (AutoRoundConfig), AutoRound 0.16 (inference/backend).
"""

from collections.abc import Iterator

from qtool.formats.auto_round import NAME, left_dense
from qtool.verification.engines.split import GROUP_SIZES
from qtool.verification.engines.view import EngineView, Layer, alike
from qtool.verification.finding import Finding
from qtool.verification.skip_lists import setting

_PACKINGS = ("auto_round:auto_gptq", "auto_round:auto_awq")
_BACKENDS = ("auto", "gptq", "gptq:marlin", "awq", "awq:marlin", "marlin")


def config_findings(view: EngineView, engine: str, who: str) -> Iterator[Finding]:
    """What of the config an engine does not know."""
    method = view.quantization.get("quant_method")
    packing = str(view.quantization.get("packing_format") or _PACKINGS[0])
    backend = view.quantization.get("backend", "auto")
    why = ""
    if method != NAME:
        why = f"quant_method {str(method)[:40]!r}, where it knows {NAME}"
    elif engine != "transformers" and packing not in _PACKINGS:
        why = f"packing_format {packing[:40]!r}, where it knows {' and '.join(_PACKINGS)}"
    elif engine != "transformers" and backend not in _BACKENDS:
        why = f"backend {str(backend)[:40]!r}, where it knows {', '.join(_BACKENDS)}"
    if why:
        yield Finding(
            "error", "engine-format", "",
            f"{who} will not load {why}; store the artifact as GPTQ, AWQ or compressed-tensors "
            "with `qtool convert --to`",
        )  # fmt: skip


def kernel_findings(view: EngineView, engine: str, who: str) -> Iterator[Finding]:
    """What of the weights has no kernel in vLLM and SGLang, or a slow one."""
    yield from config_findings(view, engine, who)
    awq = view.layout == "gemm"

    def refused(layer: Layer) -> str | None:
        stored = layer.stored
        if stored is None or (engine == "vllm" and (awq or stored.bits in (2, 3))):
            return None
        if awq:
            return None if stored.bits == 4 else (
                f"{stored.bits} bits in AWQ's packing, where 4 have a kernel; use transformers"
            )  # fmt: skip
        if stored.bits not in (4, 8):
            return f"{stored.bits} bits, where 4 and 8 have a kernel; use vLLM or transformers"
        if not stored.symmetric or stored.group_size not in GROUP_SIZES:
            return (
                f"{stored}, where symmetric ones in groups of -1, 32, 64 and 128 have a kernel; "
                "quantize with these, or use transformers"
            )
        return None

    def slow(layer: Layer) -> str | None:
        stored = layer.stored
        if stored is None or refused(layer) is not None:
            return None
        if awq:
            marlin = stored.group_size in GROUP_SIZES and not stored.symmetric
            return None if marlin else f"{stored} is for AWQ's slow kernels, not for Marlin"
        if stored.bits in (2, 3):
            return f"{stored.bits} bits need the humming kernels, which are a package of their own"
        return None

    yield from alike("error", "engine-scheme", view.quantized, refused, who + " will refuse {}")
    yield from alike("warning", "engine-slow", view.quantized, slow, who + " is in doubt about {}")


def transformers_findings(view: EngineView) -> Iterator[Finding]:
    """What has to be installed, and what that takes."""
    yield from config_findings(view, "transformers", "transformers")
    yield Finding(
        "note", "engine-route", "", "transformers loads auto-round through the package auto-round"
    )
    yield from alike(
        "warning", "engine-route", view.quantized, lambda layer: _borrowed(view, layer),
        "transformers is in doubt about {}",
    )  # fmt: skip


def _borrowed(view: EngineView, layer: Layer) -> str | None:
    """For what auto-round has no kernel of its own."""
    if layer.stored is None or (view.layout != "gemm" and layer.stored.symmetric):
        return None
    if view.layout == "gemm":
        what, whose = "AWQ's packing", "gptqmodel or auto-round-lib (4 bits), or humming (GPUs)"
    elif view.layout == "v1":
        what, whose = "auto_round:auto_gptq", "gptqmodel (4 bits, GPUs) or auto-round-lib (CPUs)"
    else:
        return None
    return (
        f"{layer.stored} in {what} has kernels of other packages alone: without {whose} auto-round "
        "0.16 makes up the weights, which only the report of loading tells; install one of these"
    )


def skip_findings(view: EngineView, engine: str, who: str) -> Iterator[Finding]:
    """Layers that the engine takes for quantized and are not, or the other way round."""

    def wrong(layer: Layer) -> str | None:
        dense = left_dense(view.quantization, layer.module, entire=engine == "sglang")
        if dense is None or dense is (layer.stored is None):
            return None
        if dense:
            return (
                f"quantized, and {who} leaves it unquantized by extra_config and "
                "block_name_to_quantize: give it its bits in extra_config"
            )
        return (
            f"not quantized, and {who} looks for codes of it: name it in extra_config with bits 16"
        )

    layers = [layer for layer in view.layers if layer.role != "router"]
    lists = frozenset({setting("extra_config")})
    yield from alike("error", "engine-skip-list", layers, wrong, "{}", lists)
