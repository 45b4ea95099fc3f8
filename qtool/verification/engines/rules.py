"""What an engine will refuse, or serve slowly, told from headers and configs alone.

One body of rules for `verify --engine` and `plan --engine`. A refusal is an error, a slow path or
a doubtful one a warning; the sentence says what to do. The rules of each engine, and the sources
they were read in, are in the modules imported here.

    vllm, sglang     split (tensor parallelism), kernels, skips, dense,
                     rotations (those that are left to the engine), head,
                     reading (that config.json is read at all),
                     drawing (of generation_config.json), and here
                     what both ask: parts of fused layers stored alike, scales of the KV cache
    transformers     local: which package loads what, and what that package takes;
                     modules: its own class, where `verify` or `plan` is asked for it
    exllama          local: EXL2 and 4-bit GPTQ
    llama.cpp        local: GGUF, of an architecture and types that it knows
    mlx-lm           mlx: MLX's own format, and what is repacked to it
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from qtool.artifacts.artifact import Artifact
from qtool.engine_commands import order
from qtool.errors import UsageError
from qtool.gguf.source import GgufSource
from qtool.gguf_types import BlockType
from qtool.verification import classes
from qtool.verification.config import said_inside
from qtool.verification.engines.dense import dense_findings
from qtool.verification.engines.drawing import drawing_findings
from qtool.verification.engines.head import head_findings
from qtool.verification.engines.kernels import kernel_findings
from qtool.verification.engines.local import (
    cache_findings,
    exllama_findings,
    gguf_findings,
    transformers_findings,
)
from qtool.verification.engines.mlx import mlx_findings
from qtool.verification.engines.modules import (
    COMPARED,
    ClassModules,
    build_findings,
    class_modules,
    module_findings,
)
from qtool.verification.engines.reading import reading_findings
from qtool.verification.engines.rotations import CHECK as ROTATION
from qtool.verification.engines.rotations import rotation_findings
from qtool.verification.engines.skips import fused_findings, skip_findings, tower_findings
from qtool.verification.engines.split import split_findings
from qtool.verification.engines.view import EngineView, mixed_parts, some, view_of
from qtool.verification.files import SINGLE, unnamed
from qtool.verification.finding import Finding

ENGINES = {
    "vllm": "vLLM", "sglang": "SGLang", "transformers": "transformers",
    "llama.cpp": "llama.cpp", "exllama": "ExLlamaV2", "mlx-lm": "mlx-lm",
}  # fmt: skip
_SERVED = ("awq", "gptq", "compressed-tensors", "fp8", "modelopt", "mxfp4", "dense", "quark")
_MORE_SERVED = {
    "vllm": ("fbgemm_fp8", "torchao", "auto-round", "awq_marlin", "gptq_marlin"),
    "sglang": ("bitsandbytes", "auto-round"),
}
_KV_SCALES = (
    r"\.[kv]_scale$", r"\.kv_scale$", r"\.[qkv]_proj\.[qkv]_scale$", r"\.[qkv]_proj\.output_scale$",
    r"\.[kv]_cache\.scale$", r"\.q\.scale$", r"\.q_scale$", r"\.prob(_output)?_scale$",
)  # fmt: skip
# Parameters of what mixes streams of hidden states (DeepSeek V4, GLM-5.3, HY-V4).
_OTHER_SCALES = (".hc_attn_scale", ".hc_ffn_scale", ".hc_scale")
CACHE = "engine-kv-cache"
_OF_WEIGHTS = r"\.(weight|input|output|bias)_?(global_)?(scale|zero)"


def engine_findings(
    artifact: Artifact | GgufSource, engine: str, tp: int, wrong: frozenset[str] = frozenset()
) -> list[Finding]:
    """All that `engine` on `tp` GPUs has to say of an artifact; UsageError for another name.

    Parts of fused layers are left to the check `fused`, which asks no engine. wrong: settings of
    which is said already that they make no sense.
    """
    if isinstance(artifact, GgufSource):
        types = {tensor.name: tensor.type for tensor in artifact.tensors}
        return type_findings(artifact.architecture, types, engine, tp)
    view = view_of(artifact)
    modules = None
    if engine == "transformers":
        modules = class_modules(artifact.checkpoint, view)
    found = view_findings(view, engine, tp, modules)
    if engine in ("vllm", "sglang"):
        config = artifact.checkpoint.config
        found += classes.refused_by_servers(config, engine, ENGINES[engine])
        found += reading_findings(artifact.checkpoint, engine, ENGINES[engine], wrong)
    if engine in ("vllm", "sglang", "transformers"):
        found += drawing_findings(artifact.checkpoint, engine, ENGINES[engine], wrong)
    if engine == "transformers":
        beside = view.quantization and view.format != "mlx"
        if beside and not said_inside(artifact.checkpoint.config):
            found.append(_beside())
        found += classes.refused_by_transformers(artifact.checkpoint.config)
        if modules is None:
            found += build_findings(artifact.checkpoint, wrong)
        if (name := unnamed(artifact.checkpoint.path)) is not None:
            words = f"transformers will not find {name}: call it {SINGLE}"
            found.append(Finding("error", "engine-files", name, words))
    return [finding for finding in found if finding.check != "engine-fused"]


def _beside() -> Finding:
    return Finding(
        "error", "engine-format", "config.json",
        "transformers reads no quantization_config but that of config.json, which has none, and "
        "makes up the weights: put it there",
    )  # fmt: skip


def type_findings(
    architecture: str, types: Mapping[str, BlockType], engine: str, tp: int
) -> list[Finding]:
    """The same for a GGUF file, of which the types are known or planned."""
    check_engine(engine, tp)
    return list(gguf_findings(architecture, types, engine, ENGINES[engine]))


def view_findings(
    view: EngineView, engine: str, tp: int, modules: ClassModules | None = None
) -> list[Finding]:
    """The same for a view, gravest first. modules: what transformers' own class has, where it was
    asked, which takes a while; else its lists are compared with the checkpoint's names."""
    check_engine(engine, tp)
    who = ENGINES[engine] + (f" with --tp {tp}" if tp > 1 else "")
    if engine == "transformers":
        found = [
            *transformers_findings(view),
            *_skipped(view, engine, who, modules),
            *head_findings(view, engine, who),
            *rotation_findings(view, engine, who, tp),
            *cache_findings(view),
        ]
    elif engine == "exllama":
        found = list(exllama_findings(view))
    elif engine == "mlx-lm":
        found = list(mlx_findings(view))
    elif engine == "llama.cpp":
        found = list(gguf_findings(None, {}, engine, who))
    else:
        found = list(_served(view, engine, who, tp))
    if any(finding.severity == "error" for finding in found):
        # Which GPUs would rotate inputs says nothing of what is not loaded.
        found = [f for f in found if (f.severity, f.check) != ("note", ROTATION)]
    order = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _skipped(
    view: EngineView, engine: str, who: str, modules: ClassModules | None
) -> Iterator[Finding]:
    if modules is None or view.format not in COMPARED:
        yield from skip_findings(view, engine, who)
    if modules is not None:
        yield from module_findings(view, modules)


def loaders(view: EngineView) -> list[str]:
    """Engines of checkpoints that refuse nothing of an artifact, the best first: those that the
    format was made for, and last those that leave its KV cache as it is."""
    found = {engine: view_findings(view, engine, 1) for engine in order(view.format)}
    loads = [engine for engine in found if all(f.severity != "error" for f in found[engine])]
    return sorted(loads, key=lambda engine: any(f.check == CACHE for f in found[engine]))


def check_engine(engine: str, tp: int) -> None:
    """UsageError where there is no such engine, or no such number of GPUs."""
    if engine not in ENGINES:
        raise UsageError(f"--engine is {engine!r}; there are {', '.join(ENGINES)}")
    if tp < 1:
        raise UsageError(f"--tp is {tp}; it is a number of GPUs, from 1")


def _served(view: EngineView, engine: str, who: str, tp: int) -> Iterator[Finding]:
    if view.format not in _SERVED + _MORE_SERVED[engine]:
        yield Finding(
            "error", "engine-format", "",
            f"{who} has no loader for {view.format}; store the model as AWQ, GPTQ, "
            "compressed-tensors or FP8",
        )  # fmt: skip
        return
    if engine == "vllm" and view.format == "mxfp4" and view.model_dtype == "F16":
        yield Finding(
            "error", "engine-dtype", "",
            "vLLM will refuse float16 beside gpt-oss's MXFP4, which it multiplies in bfloat16 "
            "alone: start from bfloat16, or give it --dtype bfloat16",
        )  # fmt: skip
    yield from kernel_findings(view, engine, who, tp)
    yield from split_findings(view, who, tp)
    yield from _fused(view, who)
    yield from skip_findings(view, engine, who)
    if engine == "sglang":
        yield from fused_findings(view, who)
    yield from tower_findings(view, engine, who)
    yield from dense_findings(view, engine, who)
    yield from head_findings(view, engine, who)
    yield from _kv_cache(view, who)
    yield from rotation_findings(view, engine, who, tp)
    yield from _kinds_of_cache(view, engine, who)


def _fused(view: EngineView, who: str) -> Iterator[Finding]:
    """Parts of one layer of the engine that are stored differently."""
    if mixed := mixed_parts(view.layers):
        example = ", ".join(f"{module} is {way}" for way, module in [*mixed[0].items()][:3])
        more = f", and {len(mixed) - 1} more such layers" if len(mixed) > 1 else ""
        yield Finding(
            "error", "engine-fused", next(iter(mixed[0].values())),
            f"{who} makes one layer of these and will refuse parts stored differently: {example}"
            f"{more}; give them one scheme",
        )  # fmt: skip


def _kinds_of_cache(view: EngineView, engine: str, who: str) -> Iterator[Finding]:
    """compressed-tensors' scheme of the cache: vLLM has float8 with one scale a layer or head,
    SGLang with one a layer, and passes over others (quantization/compressed_tensors)."""
    scheme = view.quantization.get("kv_cache_scheme")
    if view.format != "compressed-tensors" or not isinstance(scheme, Mapping):
        return
    kind, strategy = f"{scheme.get('num_bits')}-bit {scheme.get('type')}", scheme.get("strategy")
    if engine == "sglang":
        exact = scheme.get("symmetric") is not False and not scheme.get("dynamic")
        if kind != "8-bit float" or strategy != "tensor" or not exact:
            yield Finding(
                "warning", CACHE, "",
                f"{who} passes over kv_cache_scheme's {kind} per {strategy} and its scales, as it "
                "knows stored scales of 8-bit float for a layer alone: keys and values are kept as "
                "--kv-cache-dtype says; make the artifact with kv_cache: {bits: 8, type: float}",
            )  # fmt: skip
        return
    if kind != "8-bit float" or strategy not in ("tensor", "attn_head"):
        yield Finding(
            "error", CACHE, "",
            f"{who} keeps keys and values in 8-bit float with stored scales only, and will refuse "
            f"kv_cache_scheme's {kind} per {strategy}; make the artifact with "
            "kv_cache: {bits: 8, type: float}, or without",
        )  # fmt: skip


def _kv_cache(view: EngineView, who: str) -> Iterator[Finding]:
    """Scales of the KV cache: there for each attention layer, under names that engines know."""
    scales = sorted(
        n for n in view.names
        if re.search(r"attn|attention|mixer", n) and re.search(r"scale$", n)
        and not re.search(_OF_WEIGHTS, n.replace("_proj.output_scale", "_proj.kv"))
        and f"{n.removesuffix('.scale')}.weight" not in view.names  # DeepSeek V4's matrices
    )  # fmt: skip
    strange = [
        n for n in scales
        if not any(re.search(known, n) for known in _KV_SCALES) and not n.endswith(_OTHER_SCALES)
    ]  # fmt: skip
    if strange:
        yield Finding(
            "warning", CACHE, strange[0],
            f"{who} knows no scale called {some(strange)}, so that it is not loaded; k_scale and "
            "v_scale beside k_proj and v_proj are what it looks for",
        )  # fmt: skip
    wanted = bool(view.quantization.get("kv_cache_scheme"))
    halves: dict[str, set[str]] = defaultdict(set)
    for name in scales:
        if found := re.search(
            r"^(.*?attn|.*?attention|.*?mixer)\..*?([kv])_?(scale|proj|cache)", name
        ):
            halves[found[1]].add(found[2])
    for layer in view.layers:
        if wanted and layer.last in ("k_proj", "qkv_proj"):
            halves.setdefault(layer.module.rpartition(".")[0], set())
    for kept, text in (
        (1, "has only one of k_scale and v_scale, which is then taken for both"),
        (0, "has neither k_scale nor v_scale, though kv_cache_scheme asks for them: 1.0 is taken"),
    ):
        bad = [name for name, found in halves.items() if len(found) == kept and kept + wanted]
        bad = [
            n for n in bad if not any(s.startswith(n) and s.endswith(".kv_scale") for s in scales)
        ]
        if bad:
            yield Finding(
                "warning", CACHE, bad[0],
                f"{who}: {some(bad)} {text}; calibrate the KV cache anew",
            )  # fmt: skip
