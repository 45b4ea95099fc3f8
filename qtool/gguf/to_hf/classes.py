"""Which class of transformers computes what a GGUF file does."""

from collections.abc import Callable
from typing import Any

from qtool.errors import UnsupportedError
from qtool.gguf.architectures import TABLE
from qtool.gguf.source import GgufSource

# model_type of transformers where it is not the architecture's name in llama.cpp.
MODEL_TYPES = {
    "MixtralForCausalLM": "mixtral", "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe", "Gemma3ForCausalLM": "gemma3_text",
    "GlmForCausalLM": "glm", "Glm4MoeForCausalLM": "glm4_moe", "Gemma4ForCausalLM": "gemma4_text",
    "Gemma3nForCausalLM": "gemma3n_text",
    "MiniMaxM2ForCausalLM": "minimax_m2", "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text", "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "GPTNeoXForCausalLM": "gpt_neox", "MistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "ministral3", "CohereForCausalLM": "cohere",
    "Olmo3ForCausalLM": "olmo3", "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe", "Lfm2MoeForCausalLM": "lfm2_moe",
    "NemotronHForCausalLM": "nemotron_h", "ExaoneMoeForCausalLM": "exaone_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32", "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa", "GptOssForCausalLM": "gpt_oss",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "GraniteMoeSharedForCausalLM": "granitemoeshared", "Llama4ForCausalLM": "llama4_text",
    "Qwen3NextForCausalLM": "qwen3_next",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "FalconMambaForCausalLM": "falcon_mamba", "MiMoV2FlashForCausalLM": "mimo_v2_flash",
    "Qwen4ExpForCausalLM": "qwen4_exp_text", "KimiLinearForCausalLM": "kimi_linear",
    "Dots3NoteForCausalLM": "dots3_note_text",
    "MiniMaxForCausalLM": "minimax",
    "MiniMaxM3VLForCausalLM": "minimax_m3_vl_text",
    "FalconH1ForCausalLM": "falcon_h1", "Cohere2MoeForCausalLM": "cohere2_moe",
    "SolarOpenForCausalLM": "solar_open", "YoutuForCausalLM": "youtu",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GraniteMoeSWAForCausalLM": "granitemoe_swa",
    "BambaForCausalLM": "bamba", "BailingHybridForCausalLM": "bailing_hybrid",
    "LlamaForCausalLM": "llama",
    "PhiForCausalLM": "phi", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
}  # fmt: skip


def class_of(source: GgufSource) -> str:
    """The class of transformers that computes what llama.cpp's architecture does."""
    name = source.architecture

    def said(key: str) -> Any:
        """The number that a key says, 0 without the key."""
        value = source.metadata.get(f"{name}.{key}")
        return 0 if value is None else value.value

    if name == "llama" and said("expert_count"):
        return "MixtralForCausalLM"
    if name == "deepseek2" and said("nextn_predict_layers"):
        return "Glm4MoeLiteForCausalLM"
    if name == "deepseek2" and not said("expert_count"):
        return "YoutuForCausalLM"
    if name == "deepseek2" and any(t.name.endswith(".exp_probs_b.bias") for t in source.tensors):
        return "DeepseekV3ForCausalLM"
    if name == "mistral3" and "mistral3.attention.temperature_scale" in source.metadata:
        return "Ministral3ForCausalLM"
    if "granite.deepstack_mapping" in source.metadata:
        return "Granite4VisionForConditionalGeneration"
    if "granitemoe.expert_shared_feed_forward_length" in source.metadata:
        return "GraniteMoeSharedForCausalLM"
    if name == "mamba" and said("ssm.dt_b_c_rms"):
        return "FalconMambaForCausalLM"
    if name == "olmo2" and said("attention.sliding_window"):
        return "Olmo3ForCausalLM"
    if name == "granite_swa" and said("expert_count"):
        return "GraniteMoeSWAForCausalLM"
    if name == "granitehybrid" and said("rope.scaling.finetuned"):
        return "BambaForCausalLM"
    if name == "glm4moe" and _is_solar(source, said):
        return "SolarOpenForCausalLM"
    for found, row in TABLE.items():
        if row.name == name:
            return found
    known = ", ".join(sorted({row.name for row in TABLE.values()}))
    raise UnsupportedError(
        f"{source.path}: the architecture {name!r} is not in the table of what can be written as a "
        f"Hugging Face checkpoint ({known})"
    )


def _is_solar(source: GgufSource, said: Callable[[str], Any]) -> bool:
    """GLM-4.5 with experts in each block, whole heads rotated, and no norms of heads."""
    if said("leading_dense_block_count") or said("nextn_predict_layers"):
        return False
    whole = said("rope.dimension_count") == said("attention.key_length")
    return whole and all(t.name != "blk.0.attn_q_norm.weight" for t in source.tensors)
