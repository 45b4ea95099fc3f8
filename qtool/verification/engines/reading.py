"""Whether vLLM and SGLang read a config.json at all: by classes of their own, or transformers'.

Both ask transformers for the class of a model type, which checks the type of every setting, and
have classes of their own for the types below. Of a repository's own code (auto_map), which they
run where they are told to, and of Mistral's own params.json nothing is known.

Sources: vLLM 0.33 (transformers_utils/config), SGLang 0.5.23 (utils/hf_transformers, configs);
transformers is asked itself, the version that is installed.
"""

from collections.abc import Iterator, Mapping

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import SourceError
from qtool.verification.classes import has_code, installed
from qtool.verification.engines import plain
from qtool.verification.engines.modules import refused_without
from qtool.verification.finding import Finding, of_setting

CHECK = "engine-class"
# Of this version on, transformers has whatever these versions of vLLM and SGLang take from it.
_TRANSFORMERS = (5, 24)
_VERSIONS = {"vllm": "vLLM 0.33", "sglang": "SGLang 0.5.23"}
OWN: Mapping[str, frozenset[str]] = {
    "vllm": frozenset({
        "RefinedWeb", "RefinedWebModel", "alpamayo2_super", "bagel", "bailing_moe_v3_vl", "beam",
        "chatglm", "colqwen3", "deepseek_v32", "deepseek_v41", "deepseek_vl_v2", "dory",
        "dots3_note", "eagle", "flint", "funaudiochat", "hy_v4", "hyperclovax", "inkling_mm_model",
        "inkling_model", "isaac", "k3_dspark", "kimi_k2", "kimi_k25", "kimi_k3", "kimi_linear",
        "kimi_vl", "midashenglm", "minimax_m3_mtp", "minimax_m3_vl", "moondream3",
        "moss_transcribe_diarize", "muse_spark", "muse_spark_audio", "muse_spark_dspark",
        "muse_spark_text", "muse_spark_vision", "musespark1x_text", "openvla", "ops_colqwen3",
        "ovis", "qwen3_asr", "qwen3_vl_nemotron_embed", "speculators", "step3_text", "step3_vl",
        "step3p5", "step5", "step5_vl", "ultravbert", "ultravox", "unlimited-ocr", "unlimited_ocr",
    }),
    "sglang": frozenset({
        "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "afmoe", "bailing_hybrid",
        "bailing_moe_v3_vl", "bailingmm_moe_v2_lite", "beam", "chatglm", "cohere2_moe",
        "cosmos3_edge", "cosmos3_edge_projector", "cosmos3_edge_text", "cosmos3_edge_vision",
        "dbrx", "deepseek-ocr", "deepseek_v32", "deepseek_v4", "deepseek_v41", "deepseek_v41_text",
        "deepseek_v41_vision", "deepseek_vl_v2", "dots3_note", "dots_ocr", "dots_vlm", "exaone",
        "falcon_h1", "falcon_mamba", "gemma4_unified", "gigachat3_5", "glm5_next",
        "glm5_next_text", "granitemoehybrid", "hy_v4", "inkling_audio_model", "inkling_mm_model",
        "inkling_model", "inkling_vision_model", "intern_s2_preview", "interns2_mobius",
        "interns2_mobius_text", "internvl_chat", "iquest_q1", "iquest_q1_mtp", "jet_nemotron",
        "jet_vlm", "k2_horizon", "kimi_k2", "kimi_k25", "kimi_k3", "kimi_linear", "kimi_vl",
        "laguna", "lfm2", "lfm2_moe", "lfm2_vl", "locateanything", "longcat_flash", "mamba",
        "mamba2", "mellum", "minicpm_sala", "minicpmv4_6", "minicpmv4_6_vision", "minicpmv4_7",
        "minimax_m3_vl", "multi_modality", "muse_glimmer", "muse_glimmer_assistant", "muse_spark",
        "muse_spark_audio", "muse_spark_text", "muse_spark_vision", "nanbeige", "nemotron_h",
        "nemotron_h_omni", "nemotron_h_puzzle", "olmo3", "qwen3_5", "qwen3_5_moe",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_asr", "qwen3_asr_thinker", "qwen3_next",
        "qwen4_exp", "qwen4_exp_text", "spark2_5", "step3_vl", "step3p5", "step3p7",
        "unlimited-ocr", "xllm", "zaya",
    }),
}  # fmt: skip
# Classes that are read without a model type, or whatever it is.
_WITHOUT_TYPE = {
    "vllm": ("LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM"),
    "sglang": ("LongcatCausalLM", "LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM"),
}
# Types whose settings vLLM changes before transformers checks them, or that it has checked less.
_EASED = ("sarvam_mla", "laguna", "gemma4_text", "vlm", "longcat_flash")


def reading_findings(
    checkpoint: Checkpoint, engine: str, who: str, wrong: frozenset[str]
) -> Iterator[Finding]:
    """engine-class: that it has no class for the model type, or that class refuses the config.

    wrong: settings of which it is said already that they make no sense.
    """
    config = checkpoint.config
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    kind = config.get("model_type")
    if first in _WITHOUT_TYPE[engine] or "speculators_config" in config:
        return
    if (checkpoint.folder / "params.json").is_file():
        return
    if has_code(config):
        yield from _lost_code(checkpoint, engine, who)
    elif kind is None:
        if first is not None:  # of a config that names neither, no model is known
            yield Finding(
                "error", CHECK, "model_type",
                f"{who} will refuse a config.json without a model_type: put back the model's own",
                of_setting("model_type"),
            )  # fmt: skip
    elif isinstance(kind, str) and kind not in OWN[engine] and not plain.reads(config):
        yield from _unknown(kind, engine, who) or _refused(checkpoint, who, wrong)


def _lost_code(checkpoint: Checkpoint, engine: str, who: str) -> Iterator[Finding]:
    """Code of which config.json says that it lies beside it."""
    from transformers import CONFIG_MAPPING

    kind, said = checkpoint.config.get("model_type"), checkpoint.config["auto_map"]["AutoConfig"]
    if not isinstance(said, str):
        yield Finding(
            "error", CHECK, "auto_map",
            f"{who} will refuse config.json: its auto_map says AutoConfig {str(said)[:60]}, and no "
            "name of a class; put back the model's own",
        )  # fmt: skip
        return
    if "--" in said:  # which names another repository
        return
    file = f"{said.rpartition('.')[0]}.py"
    known = isinstance(kind, str) and (kind in OWN[engine] or kind in CONFIG_MAPPING)
    if known or (checkpoint.folder / file).is_file():
        return
    yield Finding(
        "error", CHECK, "auto_map",
        f"{who} will refuse model_type {str(kind)[:60]!r}: config.json says that its class is in "
        f"{file[:60]} (auto_map), which is not there; put the model's own code beside it",
    )  # fmt: skip


def _unknown(kind: str, engine: str, who: str) -> list[Finding]:
    from transformers import CONFIG_MAPPING

    if kind in CONFIG_MAPPING:
        return []
    name = installed()
    return [
        Finding(
            "warning" if _is_old(name) else "error", CHECK, "model_type",
            f"{who} will refuse model_type {kind[:60]!r}, which neither {_VERSIONS[engine]} nor "
            f"{name}, through which it reads config.json, has a class for: put back the model's "
            "own, or use versions that know it",
            of_setting("model_type"),
        )
    ]  # fmt: skip


def _is_old(name: str) -> bool:
    """Whether a later version of transformers may be known to have what this one has not."""
    numbers = name.rpartition(" ")[2].split(".")[:2]
    return tuple(int(n) for n in numbers if n.isdigit()) < _TRANSFORMERS


def _refused(checkpoint: Checkpoint, who: str, wrong: frozenset[str]) -> Iterator[Finding]:
    if checkpoint.config["model_type"] in _EASED:
        return
    reason = _refusal(checkpoint)
    if reason is not None and wrong:
        reason = refused_without(checkpoint, wrong, _refusal)
    if reason is not None:
        yield Finding(
            "error", CHECK, "config.json",
            f"{who} reads config.json through transformers, which refuses it ({reason}, says "
            f"{installed()}): compare it with the published one",
        )  # fmt: skip


def _refusal(checkpoint: Checkpoint) -> str | None:
    """What transformers' class has against its settings."""
    from qtool.streaming.meta_model import refused_config

    try:
        return refused_config(checkpoint)
    except SourceError:  # counts that no model has, of which other checks tell
        return None
