"""Biases of attention and of MLPs: there where config.json says so (attention_bias, mlp_bias).

vLLM leaves a bias that is not stored as it found the memory, transformers sets it to 0; one that
the config turns off all engines ignore. AutoGPTQ stored one of zeros for every layer.
Sources: transformers 5.24 (config.attention_bias in the models below), vLLM 0.33 (models/llama,
models/utils), SGLang 0.5.23 (models/llama).
"""

import re
from collections.abc import Iterator

from qtool.checkpoints.structure import OTHER_TOWERS, text_config
from qtool.formats.dtypes import FLOAT_DTYPES
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

CHECK = "biases"
_PART = re.compile(
    r"(?:.*\.)?(?:self_attn|self_attention|attention|attn|mixer)(?:\.\d+)?"
    r"\.(?:[qkv][a-z_]*proj\w*|query_key_value|w?qkv)\.(weight|bias)",
    re.IGNORECASE,
)
# Types of models whose classes read it for all three; of wrappers, those of the decoder inside.
READ = frozenset({
    "afmoe", "apertus", "arcee", "bamba", "chameleon", "cohere", "cohere2", "cohere2_moe", "dots1",
    "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "glm", "glm4", "glm4_moe",
    "glm4v_moe", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoehybrid", "granitemoeshared", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "hy_v3", "jais2", "laguna", "llama", "llama4", "mellum", "mimo_v2_flash", "muse_glimmer",
    "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe",
    "qwen3_next", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "seed_oss", "smollm3",
    "solar_open", "step3p7",
})  # fmt: skip


_MLP = re.compile(
    r"(?:.*\.)?(?:mlp|feed_forward)\.(?:gate|up|down|gate_up)_proj\.(weight|bias)", re.IGNORECASE
)
READ_MLP = frozenset({
    "arcee", "falcon_h1", "granite", "granite_swa", "helium", "hrm_text", "jais2", "llama",
    "nemotron", "seed_oss", "smollm3",
})  # fmt: skip


def check_biases(subject: Subject) -> Iterator[Finding]:
    """biases: stored where the config says so, and nowhere else."""
    yield from _check(subject, "attention_bias", "queries, keys or values", _PART, READ)
    yield from _check(subject, "mlp_bias", "an MLP", _MLP, READ_MLP)


def _check(
    subject: Subject, key: str, what: str, part: re.Pattern[str], types: frozenset[str]
) -> Iterator[Finding]:
    text = text_config(subject.config)
    said = text.get(key)
    if not isinstance(said, bool):
        return
    read = str(text.get("model_type")).removesuffix("_text") in types
    read = read and "auto_map" not in subject.config
    weights: list[str] = []
    biases: list[str] = []
    for name in sorted(subject.present):
        found = None if OTHER_TOWERS.search(name) else part.fullmatch(name)
        if found is not None:
            (weights if found[1].lower() == "weight" else biases).append(name)
    if said and weights and not biases:
        yield Finding(
            "error" if read else "warning", CHECK, key,
            f"config.json says {key} true, and no bias of {what} is stored; engines make them up "
            "or refuse the model: set it to false if the source has none, or fetch or make the "
            "artifact again",
        )  # fmt: skip
    if said or not read or text.get("bias"):
        return
    if biases := [name for name in biases if not _is_zero(subject, name)]:
        yield Finding(
            "error", CHECK, biases[0],
            f"config.json says {key} false, and {counted(len(biases), 'vector')} ({some(biases)}) "
            "of biases are stored, which engines ignore: set it to true",
        )  # fmt: skip


def _is_zero(subject: Subject, name: str) -> bool:
    """Whether a bias changes nothing."""
    entry = subject.entries[name]
    if entry.dtype not in FLOAT_DTYPES or len(entry.shape) != 1:
        return False
    return not subject.artifact.checkpoint.float32(entry.stored[0]).any()
