"""What mlx-lm loads, told from headers and configs alone.

A model type needs a class of that name there. MLX's own codes are loaded as they are, AWQ's 4 bits
and gpt-oss as it is released are repacked. What it calls GPTQ it reads as AWQ packs, and refuses
where a g_idx is stored.
Experts lie stacked in its classes, as formats/mlx_experts.py stores those of many; of others those
that are stored one by one are stacked where the class does that for scales and biases too.

Source: mlx-lm 0.32.2 (utils.py, and sanitize() of models/).
"""

from collections.abc import Iterator, Mapping

from qtool.checkpoints.structure import expert_of
from qtool.formats.mlx import GROUPS
from qtool.formats.mlx_models import refused, takes_experts
from qtool.verification.engines.view import EngineView
from qtool.verification.finding import Finding

# Classes of models, by model_type; underscores stand for hyphens too.
_CLASSES = frozenset(
    """
    Klear afm7 afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear
    bailing_moe_v3 bitnet cohere cohere2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32
    deepseek_v41 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 gear gemma gemma2
    gemma3 gemma3_text gemma3n gemma4 gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2
    gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan
    hunyuan_v1_dense internlm2 internlm3 iquestloopcoder jamba kimi_k25 kimi_k3 kimi_linear kimi_vl
    laguna lfm2_vl lfm2 lfm2_moe llama llama4 llama4_text longcat_flash longcat_flash_ngram mamba
    mamba2 mellum mimo mimo_v2_flash minicpm minicpm3 minimax minimax_m3_vl ministral3 mistral3
    mistral4 mixtral muse_glimmer muse_spark nanbeige nanochat nemotron_nas nemotron nemotron_h olmo
    olmo2 olmo3 olmo_hybrid olmoe openelm phi phi3 phi3small phimoe phixtral pixtral plamo plamo2
    plamo3 qwen qwen2 qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl
    qwen3_vl_moe recurrent_gemma rwkv7 seed_oss smollm3 solar_open spark2_5 stablelm starcoder2
    step3p5 talkie telechat3 youtu_llm
    mistral llava falcon_mamba joyai_llm_flash kimi_k2 qwen2_5_vl minimax_m2 iquestcoder xverse
    gemma4_unified deepseek_v41_text phi_msft lille_130m prism_hadamard_qwen35
    """.split()  # noqa: SIM905
)


def mlx_findings(view: EngineView) -> Iterator[Finding]:
    """What mlx-lm will refuse."""
    kind = str(view.config.get("model_type") or "")
    if kind.replace("-", "_") not in _CLASSES:
        yield Finding(
            "error", "engine-model", "",
            f"mlx-lm 0.32 has no class for model_type {kind!r}; a later one may",
        )  # fmt: skip
    if view.format == "awq":
        yield from _awq(view)
    elif view.format not in ("mlx", "dense") and (view.format, kind) != ("mxfp4", "gpt_oss"):
        yield Finding(
            "error", "engine-format", "",
            f"mlx-lm is not known to load {view.format}; `qtool convert --to mlx` stores the same "
            "codes as mlx where these are integers",
        )  # fmt: skip
    if view.quantized and (why := refused(kind)) is not None:
        yield Finding("error", "engine-model", "", f"mlx-lm has no quantized {kind}: {why}")
    if view.format == "mlx":
        named = [
            name for name, table in view.quantization.items()
            if isinstance(table, Mapping) and f"{name}.scales" not in view.names
            and ".switch_mlp." not in name
        ]  # fmt: skip
        if named:
            yield Finding(
                "error", "engine-table", named[0],
                f"the table `quantization` names {named[0]}, which has no scales: mlx-lm asks for "
                "them",
            )  # fmt: skip
    experts = [layer for layer in view.quantized if expert_of(layer.module) is not None]
    if experts and view.format == "mlx" and not takes_experts(kind):
        yield Finding(
            "error", "engine-experts", experts[0].module,
            f"{experts[0].module} and {len(experts) - 1} more are quantized experts, which mlx-lm "
            f"has otherwise in {kind}",
        )  # fmt: skip


def _awq(view: EngineView) -> Iterator[Finding]:
    size = view.quantization.get("group_size")
    if view.layout not in ("gemm", ""):
        yield Finding(
            "error", "engine-layout", "",
            f"mlx-lm reads AWQ's words as gemm has them, not as {view.layout}",
        )  # fmt: skip
    elif size not in GROUPS:
        yield Finding(
            "error", "engine-groups", "",
            f"mlx-lm has kernels for groups of 32, 64 and 128, not of {size}",
        )  # fmt: skip
    else:
        yield Finding(
            "note", "engine-route", "",
            "mlx-lm repacks AWQ as it loads, and runs the model in float16; format mlx keeps the "
            "model's dtype",
        )  # fmt: skip
