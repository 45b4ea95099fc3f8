"""What vLLM and SGLang load of compressed-tensors, layer by layer.

    vLLM      integers of 2 to 8 bits, but its own kernels are for 4 and 8
    SGLang    4 and 8 bits; of packed experts the `format` of the whole config counts; an
              activation order that leaves groups out of order where weights are symmetric, as
              compressed-tensors has it up to 0.18, which SGLang asks for
    neither   sparse formats

Which weights go with which inputs is in schemes.

Sources: vLLM 0.33 (compressed_tensors, kernels/linear/mixed_precision), SGLang 0.5.23
(quantization/compressed_tensors), compressed-tensors 0.20 (ActivationOrdering).
"""

from collections.abc import Iterator, Mapping

from qtool.formats import auto_round
from qtool.verification.engines import schemes
from qtool.verification.engines.split import GROUP_SIZES
from qtool.verification.engines.targets import group_of, weight_arguments
from qtool.verification.engines.view import EngineView, Layer, alike
from qtool.verification.finding import Finding

_OUT_OF_ORDER = ("group", "dynamic")
_OLD_FORMATS = ("marlin-24", "sparse-24-bitmask", "sparse-bitmask")


def packing(view: EngineView, layer: Layer) -> str:
    """The format of a layer's own in compressed-tensors, else that of the artifact."""
    if view.format == auto_round.NAME:
        return "awq" if view.layout == "gemm" else "gptq"
    if view.format != "compressed-tensors":
        return view.format
    group = group_of(view.quantization, layer.module) or {}
    return str(group.get("format") or view.quantization.get("format") or view.layout)


def _pair(view: EngineView, layer: Layer, engine: str) -> schemes.Pair | None:
    """What a layer multiplies with what; SGLang goes by one format for all packed experts."""
    if layer.stored is None:
        return None
    layout = packing(view, layer)
    if engine == "sglang" and layer.expert and layout == "pack-quantized":
        layout = str(view.quantization.get("format") or view.layout)
    group = group_of(view.quantization, layer.module) or {}
    return schemes.pair_of(group, layout, layer.expert)


def _sparse(said: object) -> bool:
    """Whether a sparsity_config is more than a record of how many weights happen to be 0."""
    if not isinstance(said, Mapping):
        return bool(said)
    return bool(said.get("targets")) or str(said.get("format") or "dense") != "dense"


def compressed_findings(view: EngineView, engine: str, who: str) -> Iterator[Finding]:
    """What has no kernel, a slow one, or one that rounds inputs otherwise."""
    inner = str(view.quantization.get("format") or view.layout)
    if inner in _OLD_FORMATS or _sparse(view.quantization.get("sparsity_config")):
        yield Finding(
            "error", "engine-format", "",
            f"{who} will not load it: compressed-tensors gave sparse formats up "
            f"({inner}); compress the model anew without sparsity",
        )  # fmt: skip
        return

    def refused(layer: Layer) -> str | None:
        arguments, stored = weight_arguments(view.quantization, layer.module), layer.stored
        if stored is None:
            return None
        if stored.kind != "int":
            return no_kernel(layer)
        ordered = arguments.get("actorder") in _OUT_OF_ORDER
        if ordered and engine == "vllm":
            return "actorder group, which it gave up; compress it anew with actorder weight or none"
        if ordered and not stored.symmetric:
            return "actorder group with zero points, which have no kernel; make it symmetric"
        if not 2 <= stored.bits <= 8:
            return f"num_bits {stored.bits}, where 2 to 8 have a kernel"
        return no_kernel(layer)

    def no_kernel(layer: Layer) -> str | None:
        pair = _pair(view, layer, engine)
        why = None if pair is None else schemes.refused(pair, engine)
        return None if why is None else f"{pair} {why}"

    def otherwise(layer: Layer) -> str | None:
        pair = _pair(view, layer, engine)
        if pair is None or refused(layer) is not None:
            return None
        how = schemes.otherwise(pair, engine)
        return None if how is None else f"in {who} {how}"

    def slow(layer: Layer) -> str | None:
        stored = layer.stored
        if stored is None or stored.kind != "int" or inner != "pack-quantized":
            return None
        if engine == "sglang":
            arguments = weight_arguments(view.quantization, layer.module)
            if arguments.get("actorder") not in _OUT_OF_ORDER or refused(layer) is not None:
                return None
            return (
                "actorder group puts inputs in another order at every step, and compressed-tensors "
                "gave it up with 0.19; compress it anew with actorder weight or none"
            )
        if stored.bits not in (4, 8):
            return f"{stored.bits} bits need the humming kernels, which are a package of their own"
        if not stored.symmetric and stored.bits == 8:
            return "8 bits with zero points have a kernel on Hopper alone, elsewhere none"
        if stored.group_size not in GROUP_SIZES:
            return f"group_size {stored.group_size} is not Marlin's: slow kernels, of float16"
        return None

    yield from alike("error", "engine-scheme", view.quantized, refused, who + " will refuse {}")
    yield from alike("warning", "engine-slow", view.quantized, slow, who + " is in doubt about {}")
    yield from alike("warning", "engine-inputs", view.quantized, otherwise, "{}")
