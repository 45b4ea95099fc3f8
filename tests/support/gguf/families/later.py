"""Small checkpoints of decoders that the table got last; rows as in `gguf_models`."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from support.gguf.families.newest import renamed

_ROTATED = {"rope_type": "default", "rope_theta": 2e4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v4": (
        "DeepseekV4",
        {"intermediate_size": 32, "num_key_value_heads": 1, "num_hidden_layers": 5, "head_dim": 32,
         "q_lora_rank": 24, "qk_rope_head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 3,
         "moe_intermediate_size": 32, "routed_scaling_factor": 1.25, "swiglu_limit": 0.3,
         "layer_types": ["sliding_attention", "compressed_sparse_attention",
                         "heavily_compressed_attention", "compressed_sparse_attention",
                         "sliding_attention"],
         "num_hash_layers": 2, "sliding_window": 8, "o_groups": 2, "o_lora_rank": 12,
         "index_n_heads": 16, "index_head_dim": 64, "index_topk": 3, "hc_eps": 1e-3,
         "hc_sinkhorn_iters": 3, "rms_norm_eps": 1e-5, "rope_theta": 3e4,
         "compress_rope_theta": 2e3, "rope_parameters": {
             "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "minimax-01": (
        "MiniMax",
        {"num_hidden_layers": 4, "head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3,
         "layer_types": ["linear_attention", *["full_attention"] * 2, "linear_attention"],
         "full_attn_alpha_factor": 3.5, "linear_attn_alpha_factor": 3.5, "mlp_alpha_factor": 3.5,
         "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
    ),
    "ling-3": (
        "BailingHybrid",
        {"num_hidden_layers": 5, "layer_group_size": 3, "num_key_value_heads": 4,
         "moe_intermediate_size": 32, "n_shared_experts": 2, "kv_lora_rank": 24,
         "qk_rope_head_dim": 8, "qk_nope_head_dim": 20, "v_head_dim": 12, "n_group": 3,
         "topk_group": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
         "num_local_experts": 6, "head_dim": 24, "short_conv_kernel_size": 3,
         "kda_lower_bound": -3.5, "num_mtp_layers": 0, "routed_scaling_factor": 1.5,
         "layer_types": ["linear_attention", "linear_attention", "full_attention",
                         "full_attention", "full_attention"],
         "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
    ),
    # Decoders inside of what hears or reads.
    "voxtral": ("Voxtral", {"head_dim": 32, "rope_parameters": _ROTATED}),
    "qwen2-audio": ("Qwen2Audio", {"rope_parameters": _ROTATED}),
    "qwen3-asr": ("Qwen3ASR", {"head_dim": 32, "rope_parameters": {
        **_ROTATED, "mrope_section": [6, 5, 5]}}),
    "lighton-ocr": ("LightOnOcr", {"head_dim": 32, "tie_word_embeddings": True}),
}  # fmt: skip
_HEARS = {
    "d_model": 32, "hidden_size": 32, "intermediate_size": 96, "encoder_layers": 1,
    "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_source_positions": 24,
}  # fmt: skip
# What lies around the settings of the text, as in `seeing`.
SEEING: dict[str, dict[str, Any]] = {
    "Voxtral": {"text_config": {"model_type": "llama"},
                "audio_config": {**_HEARS, "model_type": "voxtral_encoder"}},
    "Qwen2Audio": {"text_config": {"model_type": "qwen2"},
                   "audio_config": {**_HEARS, "model_type": "qwen2_audio_encoder"}},
    "Qwen3ASR": {"text_config": {"model_type": "qwen3"},
                 "audio_config": {**_HEARS, "downsample_hidden_size": 16, "output_dim": 64}},
    "LightOnOcr": {
        "text_config": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        "vision_config": {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48,
                          "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
                          "image_size": 16, "head_dim": 16}},
}  # fmt: skip
SAID_BEYOND: dict[str, set[str]] = {"minimax-01": {"minimax-01.attention.recurrent_layers"}}
# As in `recent`: one token or expert for another, where inputs are rounded.
NOT_ROUNDED = ("deepseek-v4",)
# Tokens that it takes until all parts of a model compute.
LONGER = {"deepseek-v4": 140}
FAILS_THERE = ("deepseek-v4",)


def fill(model: Any) -> None:
    """Values for what gguf_models leaves at zero."""
    for name, parameter in model.named_parameters():
        if name.endswith("position_bias"):
            parameter.normal_(std=0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):  # a token's experts are different ones
            chances = buffer.new_ones(len(buffer), model.config.n_routed_experts).float()
            buffer.copy_(chances.multinomial(buffer.shape[1]))


def finish(name: str, folder: Path) -> None:
    """Settings and names as released models have them, which llama.cpp's converter asks for."""
    if name not in _FINISH:
        return
    path = folder / "config.json"
    config = json.loads(path.read_text())
    _FINISH[name](config, folder)
    path.write_text(json.dumps(config))


def _deepseek_v4(config: dict[str, Any], folder: Path) -> None:
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": 4}
    kinds, mlps = config.pop("layer_types"), config.pop("mlp_layer_types")
    scaling = config.pop("rope_parameters")["compress"]
    for setting in ("rope_theta", "attention_factor", "partial_rotary_factor"):
        del scaling[setting]
    del config["compress_rates"], config["partial_rotary_factor"]
    config |= {
        "compress_ratios": [*(ratios.get(kind, 128) for kind in kinds), 0],
        "num_hash_layers": mlps.count("hash_moe"),
        "rope_scaling": {"type": scaling.pop("rope_type"), **scaling},
        "topk_method": "noaux_tc",
    }

    def new(key: str) -> str:
        key = key.removeprefix("model.").replace("embed_tokens", "embed")
        return key.replace("hc_head.hc_", "hc_head_").replace("attn.norm.", "attn.kv_norm.")

    renamed(folder, new)


def _minimax_01(config: dict[str, Any], folder: Path) -> None:
    parts = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
    for part, released in parts.items():
        for name in ("alpha", "beta"):
            config[f"layernorm_{released}_{name}"] = config[f"{part}_{name}_factor"]
    config |= {"rotary_dim": config["head_dim"], "postnorm": True}
    config["architectures"] = ["MiniMaxText01ForCausalLM"]
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")  # with what follows from the settings
    kept = {k: v for k, v in state.items() if not k.endswith(("_rate", "_decay"))}
    assert len(kept) < len(state)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def _ling_3(config: dict[str, Any], folder: Path) -> None:
    shared = config["num_shared_experts"] * config["moe_intermediate_size"]
    config |= {
        "architectures": ["BailingMoeV3ForCausalLM"], "head_dim": config.pop("linear_head_dim"),
        "no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise",
        "score_function": "sigmoid", "moe_shared_expert_intermediate_size": shared,
        "norm_topk_prob": config.pop("moe_renormalize"), "n_group": config.pop("num_expert_group"),
        "num_experts_per_tok": config.pop("num_experts_per_token"),
        "max_position_embeddings": config.pop("model_max_length"),
    }  # fmt: skip
    del config["linear_num_heads"], config["linear_conv_kernel_dim"]


_FINISH = {"ling-3": _ling_3, "minimax-01": _minimax_01, "deepseek-v4": _deepseek_v4}


def in_four_bits(folder: Path, plain: Path) -> None:
    """Random codes in place of DeepSeek V4's experts, as it is released; in `plain`, numbers."""
    import torch
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values])
    numbers = dict(state)
    for name in [name for name in state if ".ffn.experts." in name]:
        rows, columns = state[name].shape
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        scales = torch.randint(120, 124, (rows, columns // 32), dtype=torch.uint8)
        both = torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], -1)
        each = torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
        numbers[name] = (both.flatten(1) * each).bfloat16()
        state[name] = codes.view(torch.int8)
        state[name.replace("weight", "scale")] = scales.view(torch.float8_e8m0fnu)
    shutil.copytree(folder, plain)
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    save_file(state, folder / "model.safetensors", {"format": "pt"})


# What DeepSeek V4 is released with in FP8, beside experts in four bits.
_EIGHT_BITS = re.compile(r".+\.(?:wq_a|wq_b|wkv|wo_a|wo_b|w1|w2|w3)\.weight")


def as_released(folder: Path, plain: Path) -> None:
    """And the other matrices in blocks of FP8, as config.json says; in `plain`, numbers."""
    import torch
    from safetensors.torch import load_file, save_file

    in_four_bits(folder, plain)
    state, numbers = (load_file(where / "model.safetensors") for where in (folder, plain))
    for name in [name for name in state if _EIGHT_BITS.fullmatch(name)]:
        if ".experts." in name or ".compressor." in name:
            continue
        rows, columns = state[name].shape
        grid = (-(-rows // 128), -(-columns // 128))
        scales = torch.exp2(torch.randint(-9, -5, grid).float())
        codes = (torch.randn(rows, columns) * 30).to(torch.float8_e4m3fn)
        each = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        numbers[name] = (codes.float() * each).bfloat16()
        state[name] = codes
        state[name.replace("weight", "scale")] = scales.to(torch.float8_e8m0fnu)
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["expert_dtype"] = "fp4"
    config["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
