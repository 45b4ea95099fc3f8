"""What engines will make of an artifact that is planned, without one engine being named.

One sentence for each combination that some engine refuses or serves slowly; `--engine` asks the
same rules (qtool/verification/engines/rules.py) for one engine and a number of GPUs, and of these
sentences leaves those that are not about it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from qtool.checkpoints.structure import expert_of
from qtool.formats import FORMATS
from qtool.formats.facts import Facts
from qtool.messages.sentences import count, verb
from qtool.planned import Planned
from qtool.planning.fit import format_options
from qtool.recipe.recipe import Recipe
from qtool.verification.engines.head import length_refused
from qtool.verification.engines.kernels import MARLIN_IN, MARLIN_OUT, fits_marlin
from qtool.verification.engines.local import instead_for_experts
from qtool.verification.engines.schemes import Pair, other_block, otherwise, pair_of, refused
from qtool.verification.engines.split import GROUP_SIZES
from qtool.verification.engines.view import mixed_parts, planned_layers

_VLLM, _SERVERS, _TRANSFORMERS = ("vllm",), ("vllm", "sglang"), ("transformers",)
_ANY = (*_SERVERS, *_TRANSFORMERS, "llama.cpp", "exllama", "mlx-lm")
_Told = tuple[str, Sequence[str]]
# Of OmniServe's kernels (w4a8_per_group, w4a8_per_chn).
QSERVE_GROUPS = {128, -1}
# For those who choose, in `plan` and on the model card. A run does not repeat it: what it says at
# its end is how to serve the artifact, which works either way.
ROUNDED_SCALES = (
    "note: scales are stored in float16; vLLM and SGLang run a bfloat16 model in bfloat16 and "
    "round them to it (8 bits of precision for 11), unless told --dtype float16"
)


def warnings(recipe: Recipe, tensors: Sequence[Planned], config: Mapping[str, Any]) -> list[str]:
    """One sentence for each combination that some engine refuses or serves slowly."""
    found = [text for text, _ in _told(recipe, tensors, config)]
    fused = [tensor.name for tensor in tensors if tensor.fused]
    if fused and any(tensor.scheme is not None for tensor in tensors):
        found.append(
            f"{count(len(fused), 'tensor')} of fused experts stay dense (the first: {fused[0]}), "
            "which may be most of the model"
        )
    return found


def besides(
    recipe: Recipe, tensors: Sequence[Planned], config: Mapping[str, Any], engine: str
) -> list[str]:
    """Those of the sentences that are about other engines, or that --engine says itself."""
    return [text for text, about in _told(recipe, tensors, config) if engine not in about]


def _told(recipe: Recipe, tensors: Sequence[Planned], config: Mapping[str, Any]) -> list[_Told]:
    """Sentences, each with the engines that it is about and that do not say it themselves."""
    quantized = [tensor for tensor in tensors if tensor.scheme is not None]
    if not quantized or recipe.format == "mlx":  # which only mlx-lm reads
        return _about(_SERVERS, [] if quantized else _cache(recipe))
    return [
        *_about(_SERVERS, _cache(recipe)),
        *_fp4_inputs(recipe),
        *_format(recipe, quantized, config),
        *_about(_SERVERS, _groups(quantized)),
        *_about(_SERVERS, _fused(recipe, tensors)),
        *_head(recipe, quantized),
        *_about(_VLLM, _marlin(recipe, quantized)),
        *_about(_SERVERS, _bfloat16(quantized) if recipe.activations is None else []),
        *_about((), _told_of_one(recipe, quantized)),
    ]


def _about(engines: Sequence[str], sentences: Sequence[str]) -> list[_Told]:
    return [(text, engines) for text in sentences]


def _fp4_inputs(recipe: Recipe) -> list[_Told]:
    if recipe.activations is None or recipe.activations.type not in ("nvfp4", "mxfp4"):
        return []
    nvfp4 = recipe.activations.type == "nvfp4"
    does = "vLLM and SGLang round inputs to NVFP4" if nvfp4 else "vLLM rounds inputs to MXFP4"
    return _about(_SERVERS if nvfp4 else _VLLM, [
        f"of NVIDIA's GPUs {does} on Blackwell alone; on older ones weights are multiplied by "
        "inputs as they are"
    ])  # fmt: skip


def _told_of_one(recipe: Recipe, quantized: Sequence[Planned]) -> list[str]:
    """Those of the sentences that --engine says for its engine: rotations, and kernels."""
    kernels = _kernels(recipe, quantized)
    if "rotate" not in recipe.transform_chain or not recipe.rotate.online:
        return kernels
    heads = "no engine rotates queries and keys (rotate.r3)"
    if not recipe.rotate.r4:
        return [f"{heads}; `qtool eval` does", *kernels]
    alone = "alone rotates inputs of the MLP's last matrix as it runs (rotate.r4)"
    heads = f"{heads}; " if recipe.rotate.r3 else ""
    for pair in _pairs(recipe, quantized):
        if (why := refused(pair, "vllm")) is not None:
            return [
                f"no engine runs it: vLLM, which {alone}, refuses {pair}, which {why}; {heads}"
                "`qtool eval` measures it"
            ]
    return [f"vLLM {alone}, on one NVIDIA GPU; {heads}`qtool eval` does it too", *kernels]


def _cache(recipe: Recipe) -> list[str]:
    kept = recipe.kv_cache
    if kept is None or kept.dynamic or kept.type == "float":
        return []
    return [
        f"vLLM keeps keys and values in FP8 only and refuses int{kept.bits}, SGLang passes over "
        "such scales, and transformers 5.24 too; transformers 5.23 with compressed-tensors, and "
        "`qtool eval`, round them so"
    ]


def _format(recipe: Recipe, quantized: Sequence[Planned], config: Mapping[str, Any]) -> list[_Told]:
    schemes = {tensor.scheme for tensor in quantized if tensor.scheme is not None}
    found: list[_Told] = []
    instead = instead_for_experts(recipe.format, config)
    if instead is not None and any(expert_of(tensor.name) for tensor in quantized):
        grave = "" if recipe.format == "bitsandbytes" else "note: "
        found += _about(_TRANSFORMERS, [
            f"{grave}transformers 5 has the experts of a block in one parameter, which takes no "
            f"codes of {recipe.format}; {instead}"
        ])  # fmt: skip
    if recipe.format == "awq" and recipe.awq.layout != "gemm":
        found += _about((*_SERVERS, *_TRANSFORMERS), [
            f"no current engine loads the AWQ layout {recipe.awq.layout}: vLLM, SGLang and "
            "transformers read gemm; AutoAWQ's and TinyChat's own kernels read this one"
        ])  # fmt: skip
    if recipe.format == "gptq":
        if any(not scheme.symmetric for scheme in schemes):
            found += _about(_SERVERS, [
                "vLLM and SGLang refuse asymmetric GPTQ (sym: false, gptq_v2); GPTQModel and "
                "transformers load it; --set weights.symmetric=true makes it load everywhere"
            ])  # fmt: skip
        if slow := sorted({scheme.bits for scheme in schemes} & {2, 3}):
            bits = "/".join(map(str, slow))
            found += _about(_SERVERS, [
                f"{bits}-bit GPTQ has no Marlin kernel: current vLLM (0.33) and SGLang (0.5.20 and "
                "later) refuse it, older ones serve it with a slower float16 kernel; GPTQModel and "
                "transformers load it"
            ])  # fmt: skip
        if recipe.reorders_groups:
            found += _about(_ANY, [
                "act_order without static_groups leaves groups out of order (desc_act): slower "
                "everywhere and wrong in some engines under tensor parallelism"
            ])  # fmt: skip
    if recipe.format == "qserve":
        sizes = {scheme.group_size for scheme in schemes} - QSERVE_GROUPS
        found += _about(_ANY, [
            "OmniServe's kernels have groups of 128, or one scale a row (group_size -1), and would "
            f"read scales of groups of {size} in the wrong places; `qtool eval` measures it"
            for size in sorted(sizes)
        ])  # fmt: skip
    return found


def _kernels(recipe: Recipe, quantized: Sequence[Planned]) -> list[str]:
    """What vLLM and SGLang have no kernel for, or multiply otherwise, by the rules of --engine."""
    if recipe.format == "fp8":
        blocks = {(s.rows, s.group_size) for t in quantized if (s := t.scheme) and s.rows > 1}
        return [
            f"{'vLLM refuses' if triton else 'vLLM and SGLang refuse'} 8-bit float weights per "
            f"block of {rows}x{columns}, which have no kernel; {known}"
            for rows, columns in sorted(blocks)
            for triton in [other_block(rows, columns, triton=True) is None]
            if (known := other_block(rows, columns)) is not None
        ]
    if recipe.format != "compressed-tensors":
        return []
    said: dict[str, list[str]] = {}
    for engine, name in (("vllm", "vLLM"), ("sglang", "SGLang")):
        for pair in _pairs(recipe, quantized):
            if (why := refused(pair, engine)) is not None:
                of = " of experts" if pair.expert else ""
                said.setdefault(f"refuse {pair}{of}, which {why}", []).append(name)
            elif (how := otherwise(pair, engine)) is not None:
                said.setdefault(how, []).append(name)
    return [_of_engines(text, who) for text, who in said.items()]


def _of_engines(text: str, who: Sequence[str]) -> str:
    both = " and ".join(who)
    if not text.startswith("refuse "):
        return f"in {both} {text}"
    rest = text.removeprefix("refuse ")
    return f"{both} {'refuse' if len(who) > 1 else 'refuses'} {rest}; `qtool eval` measures it"


def _pairs(recipe: Recipe, quantized: Sequence[Planned]) -> list[Pair]:
    """What a plan multiplies with what, each once."""
    format_, options = FORMATS[recipe.format], format_options(recipe)
    inputs = None if recipe.activations is None else recipe.activations.model_dump()
    found: dict[Pair, None] = {}
    kinds = dict.fromkeys((t.scheme, expert_of(t.name) is not None) for t in quantized)
    for scheme, expert in kinds:
        if scheme is not None:
            config = format_.config(Facts({"of": scheme}, activations=inputs), options)
            pair = pair_of(config["config_groups"]["group_0"], config["format"], expert)
            if pair is not None:
                found[pair] = None
    return [*found]


def _bfloat16(quantized: Sequence[Planned]) -> list[str]:
    halves = [t for t in quantized if t.scheme and t.scheme.scale_dtype == "float16"]
    if all(tensor.dtype != "BF16" for tensor in halves):
        return []
    return [ROUNDED_SCALES]


def _groups(quantized: Sequence[Planned]) -> list[str]:
    schemes = {tensor.scheme for tensor in quantized if tensor.scheme is not None}
    sizes = {scheme.group_size for scheme in schemes if not scheme.is_float}
    odd = sorted(sizes.difference(GROUP_SIZES))
    if not odd:
        return []
    return [
        f"group_size {', '.join(map(str, odd))}: the fast kernels of vLLM and SGLang take "
        "-1, 32, 64 and 128 only"
    ]


def _fused(recipe: Recipe, tensors: Sequence[Planned]) -> list[str]:
    """Fused layers whose parts are stored differently."""
    mixed = mixed_parts(planned_layers(recipe.format, tensors, {}))
    if not mixed:
        return []
    example = ", ".join(f"{module} is {way}" for way, module in list(mixed[0].items())[:3])
    return [
        f"{count(len(mixed), 'layer')} that vLLM and SGLang fuse {verb(len(mixed), 'have', 'has')} "
        "parts stored differently, which they "
        f"refuse to load ({example}); give them one scheme"
    ]


def _head(recipe: Recipe, quantized: Sequence[Planned]) -> list[_Told]:
    """A quantized output head, which not every engine loads."""
    for tensor in quantized:
        if tensor.block is not None or tensor.scheme is None:
            continue
        scheme = tensor.scheme
        why = length_refused(
            recipe.format, tensor.shape[0], scheme.bits, scheme.symmetric, scheme.rows > 1
        )
        if why is not None:
            return _about(_SERVERS, [f"vLLM and SGLang refuse the head {tensor.module}: {why}"])
        if recipe.format == "compressed-tensors":
            return _about(_SERVERS, [
                "note: SGLang before August 2026 and vLLM before March 2026 read no quantized head "
                "of compressed-tensors"
            ])  # fmt: skip
        return _about(_TRANSFORMERS, [
            f"note: transformers loads no quantized head of {recipe.format}; vLLM and SGLang do"
        ])  # fmt: skip
    return []


def _marlin(recipe: Recipe, quantized: Sequence[Planned]) -> list[str]:
    if recipe.format in ("bitsandbytes", "qserve"):
        return []
    shapes: Counter[tuple[int, ...]] = Counter()
    for tensor in quantized:
        out, width = tensor.shape
        if tensor.scheme is not None and tensor.scheme.is_float:
            continue
        if not fits_marlin(out, width):
            shapes[tensor.shape] += 1
    if not shapes:
        return []
    example = ", ".join(f"{count} of {list(shape)}" for shape, count in list(shapes.items())[:3])
    experts = any(expert_of(tensor.name) is not None for tensor in quantized)
    return [
        f"note: {shapes.total()} of {count(len(quantized), 'matrix')} "
        f"{verb(shapes.total(), 'are', 'is')} no multiples of {MARLIN_OUT} "
        f"(out) and {MARLIN_IN} (in) ({example}): vLLM serves them with slower kernels than Marlin"
        + (", the experts with Triton's" if experts else "")
    ]
