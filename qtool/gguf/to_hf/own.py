"""Settings that no key of a GGUF file tells: by its tensors, or since llama.cpp knows no other."""

from collections.abc import Collection
from typing import Any

from qtool.errors import FormatError
from qtool.formats.gguf_values import Value
from qtool.gguf.architectures import Architecture
from qtool.gguf.architectures.dbrx import OF_ATTENTION, OF_EXPERTS, OLD_SIZES
from qtool.gguf.architectures.llama4 import WITHOUT_NORMS
from qtool.gguf.architectures.minimax_01 import usual_kinds
from qtool.gguf.architectures.minimax_m3 import SPARSE
from qtool.gguf.from_hf.source import gguf_names
from qtool.gguf.source import GgufSource
from qtool.gguf.to_hf.keys import plain

# Classes that are told of each block whether its MLP is dense.
_MLPS_BY_BLOCK = ("Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "HYV3ForCausalLM",
                  "LagunaForCausalLM", "KimiLinearForCausalLM", "HYV4ForCausalLM",
                  "Dots3NoteForCausalLM", "MiniMaxM3VLForCausalLM",
                  "BailingHybridForCausalLM")  # fmt: skip


def put_asked(row: Architecture, config: dict[str, Any], names: Collection[str]) -> None:
    """Settings that say whether a model has some modules, where no key tells."""
    told = {key.setting for key in row.keys}
    asked = {m.name: m.asked for m in row.modules if m.asked and m.asked not in told}
    for (name, block), gguf_name in gguf_names(row, config).items() if asked else ():
        if name in asked and block == 0:
            config[asked[name]] = f"{gguf_name}.weight" in names


def put_own(
    row: Architecture, config: dict[str, Any], names: Collection[str], source: GgufSource
) -> None:
    """Settings that llama.cpp takes for granted, or sees in the tensors."""
    if row.name == "stablelm":
        config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in names
    if row.name == "command-r":
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in names
    if row.name in ("qwen3moe", "qwen3vlmoe", "qwen3next", "qwen4exp"):
        config["norm_topk_prob"] = True
    if row.name.startswith(("nemotron_h", "granitehybrid")):
        config["max_position_embeddings"] = plain(source.metadata[f"{row.name}.context_length"])
    if row.name.startswith("nemotron_h"):
        config["use_conv_bias"] = _biased_taps(names)
    if row.name in ("gpt-oss", "granitehybrid", "granitemoe", "llama4"):
        config["num_local_experts"] = config.pop("num_experts", 0)
    if row.name == "granite_swa" and "num_experts" in config:
        config["num_local_experts"] = config.pop("num_experts")
    rotating = source.metadata.get("granite_swa.attention.rope_pattern")
    if row.name == "granite_swa" and rotating is not None:
        theta = config["rope_theta"]
        config["layer_rope_theta"] = [theta if one else 0 for one in rotating.value]
    if row.name == "llama4":
        config["use_qk_norm"] = config["num_local_experts"] != WITHOUT_NORMS
    if row.name == "granitehybrid":
        config["mamba_conv_bias"] = _biased_taps(names)
    if config["architectures"][0] == "BambaForCausalLM":
        kinds, _ = config.pop("layer_types"), config.pop("num_local_experts")
        attending = [b for b, kind in enumerate(kinds) if kind == "full_attention"]
        config |= {"attn_layer_indices": attending, "mamba_expand": 2}
    if row.name == "afmoe":
        config["mup_enabled"] = True
    if config["architectures"][0] in _MLPS_BY_BLOCK:
        leading, blocks = config["first_k_dense_replace"], _blocks(config)
        config["mlp_layer_types"] = ["dense" if b < leading else "sparse" for b in blocks]
    if row.name == "mimo2":
        heads = _said(source, "attention.head_count_kv")
        config["num_key_value_heads"] = min(heads.value) if heads.element else heads.value
        sparse = (f"blk.{b}.ffn_gate_inp.weight" in names for b in _blocks(config))
        config["mlp_layer_types"] = ["sparse" if one else "dense" for one in sparse]
        config.setdefault("attention_value_scale", 1.0)
    if row.name == "laguna":
        heads = _said(source, "attention.head_count")
        each = heads.value if heads.element else [heads.value] * config["num_hidden_layers"]
        config["num_attention_heads_per_layer"] = [*each]
        gates = next((t.rows for t in source.tensors if t.name == "blk.0.attn_gate.weight"), 0)
        config["gating"] = True if gates == each[0] else "per-element"
    if row.name == "kimi-linear":
        config["norm_topk_prob"] = True
        config["linear_num_heads"] = config["num_attention_heads"]
    if row.name == "minimax-m3":
        share = config.pop("partial_rotary_factor", 1.0)
        config["rope_parameters"] = {
            "rope_type": "default", "rope_theta": config["rope_theta"],
            "partial_rotary_factor": share,
        }  # fmt: skip
        config["rotary_dim"] = int(share * config["head_dim"])
        wide = plain(_said(source, "expert_feed_forward_length"))
        config["shared_intermediate_size"] = config.get("n_shared_experts", 1) * wide
        leading = config["first_k_dense_replace"]
        config["layer_types"] = [
            SPARSE if b >= leading else "full_attention" for b in _blocks(config)
        ]
    if row.name == "dots3note":
        _put_local_latents(config, source)
    if row.name == "qwen4exp":
        config |= {"indexer_kv_heads": 1, "output_gate_type": "sigmoid"}
        _put_ngrams(config, source)
    if row.name == "bailingmoe3":
        config["head_dim"] = config["linear_head_dim"]  # which its class then goes by
    if row.name == "minimax-01":
        said = source.metadata.get("minimax-01.attention.recurrent_layers")
        linear = usual_kinds(len(_blocks(config))) if said is None else said.value
        config["layer_types"] = [f"{'linear' if one else 'full'}_attention" for one in linear]
        scale = config["full_attn_alpha_factor"]
        config |= {"linear_attn_alpha_factor": scale, "mlp_alpha_factor": scale}
        config["num_local_experts"] = config.pop("num_experts")
    if row.name == "deepseek4":
        del config["indexer_compress_ratio"]  # which Qwen calls so
        config["compress_ratios"] = [*_said(source, "attention.compress_ratios").value]
    if row.name == "gemma3n":
        config["vocab_size_per_layer_input"] = config["vocab_size"]
    if row.name in ("gpt2", "starcoder"):
        config["n_inner"] = config["intermediate_size"]
    if row.name == "starcoder":
        config["multi_query"] = config["num_key_value_heads"] == 1
    if row.name == "dbrx":
        config["attn_config"]["clip_qkv"] = config["attn_config"]["clip_qkv"] or None
        for part, names in (("attn_config", OF_ATTENTION), ("ffn_config", OF_EXPERTS)):
            own = {there: config.pop(name) for name, there in names.items() if name in config}
            config[part] = {**config.get(part, {}), **own}
        config["attn_config"]["rope_theta"] = config["rope_theta"]
        # Which its class reads before it knows that they are the same.
        config |= {there: config.pop(name) for name, there in OLD_SIZES.items()}
    if row.name == "falcon":
        both, heads = "blk.0.attn_norm_2.weight" in names, config.pop("num_key_value_heads")
        config |= {
            "num_kv_heads": heads,
            "new_decoder_architecture": both or heads != 1,
            "num_ln_in_parallel_attn": 1 + both,
            "ffn_hidden_size": config["intermediate_size"],
        }
    if row.name == "lfm2":
        config["block_auto_adjust_ff_dim"] = False
    if row.name in ("gemma2", "gemma3"):
        large = {"gemma2": 46, "gemma3": 62}[row.name] == config["num_hidden_layers"]
        by_width = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = by_width if large else config["head_dim"]


def _said(source: GgufSource, key: str) -> Value:
    if (value := source.metadata.get(f"{source.architecture}.{key}")) is None:
        raise FormatError(f"{source.path}: lacks {source.architecture}.{key}")
    return value


def _biased_taps(names: Collection[str]) -> bool:
    return any(name.endswith(".ssm_conv1d.bias") for name in names)


def _blocks(config: dict[str, Any]) -> range:
    return range(config["num_hidden_layers"])


def _put_local_latents(config: dict[str, Any], source: GgufSource) -> None:
    """Sizes of blocks with a window, and of the others."""
    heads = _said(source, "attention.head_count")
    each = heads.value if heads.element else [heads.value] * config["num_hidden_layers"]
    if len(config["layer_types"]) != len(each):
        raise FormatError(f"{source.path}: says of some blocks whether they have a window")
    kinds = dict(zip(config["layer_types"], each, strict=True))
    local = kinds.get("sliding_attention", max(each))
    whole = plain(_said(source, "attention.key_length_mla_swa"))
    config["num_attention_heads"] = config["num_key_value_heads"] = kinds.get(
        "full_attention", max(each)
    )
    wide = plain(_said(source, "expert_feed_forward_length"))
    config["moe_shared_expert_intermediate_size"] = wide
    config |= {
        "swa_num_attention_heads": local, "swa_num_key_value_heads": local,
        "swa_q_lora_rank": config["q_lora_rank"], "swa_head_dim": whole,
        "swa_qk_rope_head_dim": config["qk_rope_head_dim"],
        "swa_qk_nope_head_dim": whole - config["qk_rope_head_dim"],
        "swa_rope_theta": config.pop("rope_local_base_freq", config["rope_theta"]),
    }  # fmt: skip


def _put_ngrams(config: dict[str, Any], source: GgufSource) -> None:
    """Of embeddings of n-grams; which multipliers hash them is proved by the class's own seed."""
    said = {
        name.removeprefix("qwen4exp.ple."): plain(value)
        for name, value in source.metadata.items()
        if name.startswith("qwen4exp.ple.")
    }
    if not said.get("layers"):
        return
    table = next((t for t in source.tensors if t.name == "per_layer_token_embd.weight"), None)
    config |= {
        "ple_layer_ids": [b + 1 for b in said["layers"]],
        "ngram_size": said.get("ngram_size"),
        "heads_per_ngram": said.get("heads_per_ngram"),
        "ple_conv_kernel_size": said.get("conv_kernel"),
        "eos_token_id": said.get("eos_token_id"),
        "ngram_vocab_size_base": (said.get("head_vocab_sizes") or [0])[0],
        "make_ngram_vocab_size_divisible_by": table.rows if table else None,
        "split_ngram_parts": 1,
    }
