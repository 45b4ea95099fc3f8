"""Whether vLLM and SGLang have a kernel for the weights, and whether it is the fast one.

    Marlin          4 and 8 bits, for GPTQ symmetric ones; groups of -1, 32, 64 and 128;
                    out_features in multiples of 64 and in_features of 128, or of 128 and 64
                    (vLLM pads what does not fit; of experts only the inner width)
    else            AWQ has a slow kernel of its own, GPTQ none (in SGLang since 0.5.20)
    fp8             one scale a matrix, or blocks of 128x128, as in compressed-tensors; SGLang
                    leaves those of another width to Triton
    compressed-     compressed, schemes
    tensors
    auto-round      auto_round_config

Sources: vLLM 0.33 (auto_awq, auto_gptq, gptq_utils, marlin_utils, moe_wna16,
kernels/linear/mixed_precision), SGLang 0.5.23 (quantization/gptq, awq, marlin_utils, fp8_utils).
"""

from collections.abc import Iterator

from qtool.checkpoints import padding
from qtool.formats import auto_round
from qtool.verification.engines import auto_round_config
from qtool.verification.engines.compressed import compressed_findings, packing
from qtool.verification.engines.schemes import BLOCK, other_block
from qtool.verification.engines.split import GROUP_SIZES, block_size, ranks_of
from qtool.verification.engines.view import EngineView, Layer, alike, fused_layers
from qtool.verification.finding import Finding, Severity

MARLIN_OUT, MARLIN_IN = 64, 128
BFLOAT_ONLY = ("gemma2", "gemma3", "gemma3_text", "glm4")  # overflow in float16


# What vLLM's from_config asks for, under one name or another (0.33, quantization/auto_awq.py and
# auto_gptq.py).
_ASKED = {
    "awq": (("w_bit", "bits"), ("q_group_size", "group_size"), ("zero_point",)),
    "gptq": (("bits",), ("group_size",), ("desc_act",), ("sym",)),
}


def kernel_findings(view: EngineView, engine: str, who: str, tp: int) -> Iterator[Finding]:
    """What of the weights has no kernel, or a slow one."""
    method = str(view.quantization.get("quant_method")).lower()
    for keys in _ASKED.get(method, ()) if engine == "vllm" else ():
        if all(view.quantization.get(key) is None for key in keys):
            yield Finding(
                "error", "engine-config", keys[-1],
                f"{who} will refuse a quantization_config without {keys[-1]}: put back the config "
                "that the model was quantized with",
            )  # fmt: skip
    if view.format == "awq":
        yield from _awq(view, engine, who)
    elif view.format == "gptq":
        yield from _gptq(view, engine, who, tp)
    elif view.format == "compressed-tensors":
        yield from compressed_findings(view, engine, who)
    elif view.format == "fp8":
        yield from _fp8(view, engine, who)
    elif view.format == auto_round.NAME:
        yield from auto_round_config.kernel_findings(view, engine, who)
    yield from _tiles(view, engine, who, tp)
    yield from _experts(view, engine, who, tp)


def _fp8(view: EngineView, engine: str, who: str) -> Iterator[Finding]:
    own = str(view.quantization.get("quant_method")).lower() == "fp8"  # and not FBGEMM's

    def refused(layer: Layer) -> str | None:
        if own and str(layer.stored).endswith(" channel"):
            return (
                "a scale a row, where it reads one a matrix or block of quant_method fp8; put "
                "back the config that the artifact was made with"
            )
        block = block_size(view, layer)
        known = None if block is None else other_block(*block, triton=engine == "sglang")
        return None if known is None or block is None else (
            f"8-bit float weights per block of {block[0]}x{block[1]} have no kernel; {known}"
        )  # fmt: skip

    def slow(layer: Layer) -> str | None:
        block = block_size(view, layer)
        if block is None or block == BLOCK or refused(layer) is not None:
            return None
        return f"blocks of {block[0]}x{block[1]} are for Triton's kernels"

    yield from alike("error", "engine-scheme", view.quantized, refused, who + " will refuse {}")
    yield from alike("warning", "engine-slow", view.quantized, slow, who + " will be slow with {}")


def _for_marlin(view: EngineView, layer: Layer) -> bool:
    """Whether integers are multiplied by activations as they are; INT8 on both sides is not."""
    if layer.stored is None or layer.stored.kind != "int":
        return False
    return packing(view, layer) in ("awq", "gptq", "pack-quantized")


def fits_marlin(out_features: int, in_features: int) -> bool:
    """Whether Marlin takes a matrix as it is."""
    return out_features % MARLIN_OUT == 0 and in_features % MARLIN_IN == 0


def _awq(view: EngineView, engine: str, who: str) -> Iterator[Finding]:
    if view.layout not in ("gemm", "marlin", ""):
        yield Finding(
            "error", "engine-format", "",
            f"{who} will not load the AWQ layout {view.layout}: it reads gemm only; store the "
            "artifact with awq.layout=gemm, or turn it: `qtool convert ARTIFACT --to awq`",
        )  # fmt: skip
    yield from alike(
        "error", "engine-scheme", view.quantized,
        lambda layer: None if layer.stored is None or layer.stored.bits == 4 else (
            f"{layer.stored.bits}-bit AWQ has no kernel, 4 bits have; use another format"
        ),
        who + " will refuse {}",
    )  # fmt: skip
    slow = ""
    if odd := sorted({x.stored.group_size for x in view.quantized if x.stored} - {*GROUP_SIZES}):
        slow = f"group_size {', '.join(map(str, odd))} is none of -1, 32, 64 and 128"
    elif view.quantization.get("zero_point") is False:
        slow = "its config says zero_point: false, which Marlin has no AWQ kernel for"
    if slow and view.quantized:
        yield Finding(
            "warning", "engine-slow", "", f"{who} will serve it with AWQ's slow kernels: {slow}"
        )
    kind = view.config.get("model_type")
    if kind in BFLOAT_ONLY:
        gravest: Severity = "error" if slow and engine == "sglang" else "warning"
        yield Finding(
            gravest, "engine-dtype", "",
            f"{kind} overflows in float16, and AWQ's own kernels compute in float16 alone: only "
            f"where {who} has Marlin (Ampere and later, groups of -1, 32, 64, 128) can it be "
            "served, with --dtype bfloat16; compressed-tensors has no such limit",
        )  # fmt: skip


def _gptq(view: EngineView, engine: str, who: str, tp: int) -> Iterator[Finding]:
    ordered = bool(view.quantization.get("desc_act"))

    def refused(layer: Layer) -> str | None:
        stored = layer.stored
        if stored is None:
            return None
        if stored.bits not in (4, 8) or not stored.symmetric:
            kind = f"{stored.bits}-bit {'symmetric' if stored.symmetric else 'asymmetric'} GPTQ"
            return (
                f"{kind}, where 4 and 8 bits, symmetric, have a kernel; quantize with "
                "weights.symmetric=true and 4 or 8 bits, or use transformers"
            )
        if stored.group_size not in GROUP_SIZES:
            return (
                f"group_size {stored.group_size}, where -1, 32, 64 and 128 have a kernel; "
                "quantize with one of these"
            )
        if engine == "vllm" and ordered and stored.group_size > 0:
            return (
                "desc_act: true, groups out of order, which it gave up; quantize with "
                "gptq.static_groups=true"
            )
        return None

    yield from alike("error", "engine-scheme", view.quantized, refused, who + " will refuse {}")
    if engine == "sglang" and ordered and tp > 1:
        yield Finding(
            "warning", "engine-order", "",
            f"{who} keeps the scales of all groups on every rank, since desc_act is true: slower, "
            "and wrong answers were seen on AMD; quantize with gptq.static_groups=true",
        )  # fmt: skip


def _tiles(view: EngineView, engine: str, who: str, tp: int) -> Iterator[Finding]:
    """Fused layers that are no whole number of Marlin's tiles."""

    def why(layer: Layer) -> str | None:
        ranks = ranks_of(view, layer, tp)
        out, width = sums[layer.module], layer.in_features
        if layer.input_split:
            width //= ranks
        if fits_marlin(out, width) or (out % MARLIN_IN == 0 and width % MARLIN_OUT == 0):
            return None
        shape = f"[{out}, {width}]" + (" a rank" if tp > 1 else "")
        start = f"{shape} is not of {MARLIN_OUT} rows and {MARLIN_IN} columns or multiples"
        if engine == "vllm":
            return f"{start}, so that its inputs and outputs are padded at every step"
        if view.format == "awq":
            return f"{start}, so that AWQ's slow kernels serve it"
        hidden, inner = (out, width) if layer.input_split else (width, out)
        helps = layer.paddable and inner % MARLIN_IN and hidden % MARLIN_IN == 0
        pad = f"{padding.advice(MARLIN_IN * tp)}, or " if helps else ""
        return f"{start}, and nothing is padded while it runs; {pad}leave it dense"

    sums: dict[str, int] = {}
    first: list[Layer] = []
    candidates = [x for x in view.quantized if not x.expert and _for_marlin(view, x)]
    for parts in fused_layers(candidates).values():
        rows = [
            x.out_features if x.input_split else x.out_features // ranks_of(view, x, tp)
            for x in parts
        ]
        sums[parts[0].module] = sum(rows)
        shared = all(_shares(x, ranks_of(view, x, tp)) for x in parts)
        if shared and all(map(_fit_for_tiles, parts)):
            first.append(parts[0])
    if engine == "sglang" and view.format != "awq":
        yield from alike("error", "engine-shape", first, why, who + " will refuse {}")
    else:
        yield from alike("warning", "engine-slow", first, why, who + " will be slow with {}")


def _shares(layer: Layer, ranks: int) -> bool:
    return (layer.in_features if layer.input_split else layer.out_features) % ranks == 0


def _fit_for_tiles(layer: Layer) -> bool:
    """Whether a matrix goes to Marlin but for its shape."""
    stored = layer.stored
    return stored is not None and stored.bits in (4, 8) and stored.group_size in GROUP_SIZES


def _experts(view: EngineView, engine: str, who: str, tp: int) -> Iterator[Finding]:
    """Experts of a block are one layer with kernels of its own."""

    def shapes(layer: Layer) -> tuple[int, int, int] | None:
        """hidden, inner of a rank, group"""
        if layer.stored is None or layer.in_features % tp:
            return None
        return layer.out_features, layer.in_features // tp, layer.stored.group_size

    def refused(layer: Layer) -> str | None:
        if (found := shapes(layer)) is None:
            return None
        hidden, inner, size = found
        if view.format == "compressed-tensors" and size > 0 and hidden % size:
            return f"the hidden width {hidden} is not a multiple of its group size {size}"
        smallest = size
        while smallest > 0 and (inner % smallest or hidden % smallest):
            smallest //= 2
        if view.format != "compressed-tensors" and 0 < smallest < 32:
            return (
                f"widths {hidden} and {inner} of an expert have no common group of 32 or more, "
                "which its kernels for experts need"
            )
        if engine == "sglang" and view.format == "gptq" and not fits(found):
            step = max(64, size)
            way = padding.advice(step * tp) if hidden % 128 == 0 else "leave experts dense"
            return (
                f"an expert's widths {hidden} and {inner} are not what Marlin takes (multiples of "
                f"128 and of {step}); {way}"
            )
        return None

    def fits(found: tuple[int, int, int]) -> bool:
        hidden, inner, size = found
        if size not in GROUP_SIZES or hidden % 128:
            return False
        return inner % (max(size, 1) if engine == "vllm" else max(64, size)) == 0

    def slow(layer: Layer) -> str | None:
        if (found := shapes(layer)) is None or fits(found) or refused(layer):
            return None
        hidden, inner, size = found
        group = f"groups of {size}" if size > 0 else "one group a row"
        return f"widths {hidden} and {inner} with {group} are for Triton's kernels, not for Marlin"

    down = [x for x in view.quantized if x.expert and x.input_split and _for_marlin(view, x)]
    yield from alike("error", "engine-experts", down, refused, who + " will refuse {}")
    yield from alike("warning", "engine-slow", down, slow, who + " will be slow with {}")
