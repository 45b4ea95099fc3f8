"""Settings that no key of a GGUF file tells: by its tensors, or since llama.cpp knows no other."""

from collections.abc import Callable, Collection
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

Config = dict[str, Any]
Names = Collection[str]


def put_asked(row: Architecture, config: Config, names: Names) -> None:
    """Settings that say whether a model has some modules, where no key tells."""
    told = {key.setting for key in row.keys}
    asked = {m.name: m.asked for m in row.modules if m.asked and m.asked not in told}
    for (name, block), gguf_name in gguf_names(row, config).items() if asked else ():
        if name in asked and block == 0:
            config[asked[name]] = f"{gguf_name}.weight" in names


def put_own(row: Architecture, config: Config, names: Names, source: GgufSource) -> None:
    """Settings that llama.cpp takes for granted, or sees in the tensors."""
    for put in _OF_ARCHITECTURE.get(row.name, ()):
        put(config, names, source)
    for put in _OF_CLASS.get(config["architectures"][0], ()):
        put(config, names, source)


def _always(**settings: Any) -> "Put":
    def put(config: Config, names: Names, source: GgufSource) -> None:
        config |= settings

    return put


def _normed_heads(setting: str) -> "Put":
    def put(config: Config, names: Names, source: GgufSource) -> None:
        config[setting] = "blk.0.attn_q_norm.weight" in names

    return put


def _same(setting: str, other: str) -> "Put":
    """What another setting says, too."""

    def put(config: Config, names: Names, source: GgufSource) -> None:
        config[setting] = config[other]

    return put


def _taps(setting: str) -> "Put":
    """Whether convolutions over time have biases."""

    def put(config: Config, names: Names, source: GgufSource) -> None:
        config[setting] = any(name.endswith(".ssm_conv1d.bias") for name in names)

    return put


def _positions(config: Config, names: Names, source: GgufSource) -> None:
    config["max_position_embeddings"] = plain(_said(source, "context_length"))


def _local_experts(config: Config, names: Names, source: GgufSource) -> None:
    config["num_local_experts"] = config.pop("num_experts", 0)


def _granite_swa(config: Config, names: Names, source: GgufSource) -> None:
    if "num_experts" in config:
        _local_experts(config, names, source)
    if (rotating := source.metadata.get("granite_swa.attention.rope_pattern")) is not None:
        theta = config["rope_theta"]
        config["layer_rope_theta"] = [theta if one else 0 for one in rotating.value]


def _llama4(config: Config, names: Names, source: GgufSource) -> None:
    config["use_qk_norm"] = config["num_local_experts"] != WITHOUT_NORMS


def _bamba(config: Config, names: Names, source: GgufSource) -> None:
    kinds, _ = config.pop("layer_types"), config.pop("num_local_experts")
    attending = [block for block, kind in enumerate(kinds) if kind == "full_attention"]
    config |= {"attn_layer_indices": attending, "mamba_expand": 2}


def _mlps_by_block(config: Config, names: Names, source: GgufSource) -> None:
    leading, blocks = config["first_k_dense_replace"], _blocks(config)
    config["mlp_layer_types"] = ["dense" if b < leading else "sparse" for b in blocks]


def _mimo2(config: Config, names: Names, source: GgufSource) -> None:
    heads = _said(source, "attention.head_count_kv")
    config["num_key_value_heads"] = min(heads.value) if heads.element else heads.value
    sparse = (f"blk.{b}.ffn_gate_inp.weight" in names for b in _blocks(config))
    config["mlp_layer_types"] = ["sparse" if one else "dense" for one in sparse]
    config.setdefault("attention_value_scale", 1.0)


def _laguna(config: Config, names: Names, source: GgufSource) -> None:
    each = _heads(config, source)
    config["num_attention_heads_per_layer"] = each
    gates = next((t.rows for t in source.tensors if t.name == "blk.0.attn_gate.weight"), 0)
    config["gating"] = True if gates == each[0] else "per-element"


def _minimax_m3(config: Config, names: Names, source: GgufSource) -> None:
    share = config.pop("partial_rotary_factor", 1.0)
    config["rope_parameters"] = {
        "rope_type": "default", "rope_theta": config["rope_theta"], "partial_rotary_factor": share,
    }  # fmt: skip
    config["rotary_dim"] = int(share * config["head_dim"])
    wide = plain(_said(source, "expert_feed_forward_length"))
    config["shared_intermediate_size"] = config.get("n_shared_experts", 1) * wide
    leading = config["first_k_dense_replace"]
    config["layer_types"] = [SPARSE if b >= leading else "full_attention" for b in _blocks(config)]


def _minimax_01(config: Config, names: Names, source: GgufSource) -> None:
    said = source.metadata.get("minimax-01.attention.recurrent_layers")
    linear = usual_kinds(len(_blocks(config))) if said is None else said.value
    config["layer_types"] = [f"{'linear' if one else 'full'}_attention" for one in linear]
    scale = config["full_attn_alpha_factor"]
    config |= {"linear_attn_alpha_factor": scale, "mlp_alpha_factor": scale}
    config["num_local_experts"] = config.pop("num_experts")


def _deepseek4(config: Config, names: Names, source: GgufSource) -> None:
    del config["indexer_compress_ratio"]  # which Qwen calls so
    config["compress_ratios"] = [*_said(source, "attention.compress_ratios").value]


def _starcoder(config: Config, names: Names, source: GgufSource) -> None:
    config["multi_query"] = config["num_key_value_heads"] == 1


def _dbrx(config: Config, names: Names, source: GgufSource) -> None:
    config["attn_config"]["clip_qkv"] = config["attn_config"]["clip_qkv"] or None
    for part, inside in (("attn_config", OF_ATTENTION), ("ffn_config", OF_EXPERTS)):
        own = {there: config.pop(name) for name, there in inside.items() if name in config}
        config[part] = {**config.get(part, {}), **own}
    config["attn_config"]["rope_theta"] = config["rope_theta"]
    # Which its class reads before it knows that they are the same.
    config |= {there: config.pop(name) for name, there in OLD_SIZES.items()}


def _falcon(config: Config, names: Names, source: GgufSource) -> None:
    both, heads = "blk.0.attn_norm_2.weight" in names, config.pop("num_key_value_heads")
    config |= {
        "num_kv_heads": heads,
        "new_decoder_architecture": both or heads != 1,
        "num_ln_in_parallel_attn": 1 + both,
        "ffn_hidden_size": config["intermediate_size"],
    }


def _scaled_queries(blocks: int) -> "Put":
    """blocks: of the largest of its kind, which scales queries otherwise."""

    def put(config: Config, names: Names, source: GgufSource) -> None:
        by_width = config["hidden_size"] // config["num_attention_heads"]
        large = config["num_hidden_layers"] == blocks
        config["query_pre_attn_scalar"] = by_width if large else config["head_dim"]

    return put


def _said(source: GgufSource, key: str) -> Value:
    if (value := source.metadata.get(f"{source.architecture}.{key}")) is None:
        raise FormatError(f"{source.path}: lacks {source.architecture}.{key}")
    return value


def _blocks(config: Config) -> range:
    return range(config["num_hidden_layers"])


def _heads(config: Config, source: GgufSource) -> list[int]:
    """Of each block."""
    heads = _said(source, "attention.head_count")
    return [*heads.value] if heads.element else [heads.value] * config["num_hidden_layers"]


def _local_latents(config: Config, names: Names, source: GgufSource) -> None:
    """Sizes of blocks with a window, and of the others."""
    each = _heads(config, source)
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


def _ngrams(config: Config, names: Names, source: GgufSource) -> None:
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


Put = Callable[[Config, Names, GgufSource], None]

_TOPK_NORMED = _always(norm_topk_prob=True)
_OF_ARCHITECTURE: dict[str, tuple[Put, ...]] = {
    "afmoe": (_always(mup_enabled=True),),
    "bailingmoe3": (_same("head_dim", "linear_head_dim"),),  # which its class then goes by
    "command-r": (_normed_heads("use_qk_norm"),),
    "dbrx": (_dbrx,),
    "deepseek4": (_deepseek4,),
    "dots3note": (_local_latents,),
    "falcon": (_falcon,),
    "gemma2": (_scaled_queries(46),),
    "gemma3": (_scaled_queries(62),),
    "gemma3n": (_same("vocab_size_per_layer_input", "vocab_size"),),
    "gpt-oss": (_local_experts,),
    "gpt2": (_same("n_inner", "intermediate_size"),),
    "granite_swa": (_granite_swa,),
    "granitehybrid": (_positions, _local_experts, _taps("mamba_conv_bias")),
    "granitemoe": (_local_experts,),
    "kimi-linear": (_TOPK_NORMED, _same("linear_num_heads", "num_attention_heads")),
    "laguna": (_laguna,),
    "lfm2": (_always(block_auto_adjust_ff_dim=False),),
    "llama4": (_local_experts, _llama4),
    "mimo2": (_mimo2,),
    "minimax-01": (_minimax_01,),
    "minimax-m3": (_minimax_m3,),
    "nemotron_h": (_positions, _taps("use_conv_bias")),
    "nemotron_h_moe": (_positions, _taps("use_conv_bias")),
    "qwen3moe": (_TOPK_NORMED,),
    "qwen3next": (_TOPK_NORMED,),
    "qwen3vlmoe": (_TOPK_NORMED,),
    "qwen4exp": (
        _TOPK_NORMED, _always(indexer_kv_heads=1, output_gate_type="sigmoid"), _ngrams,
    ),
    "stablelm": (_normed_heads("qk_layernorm"),),
    "starcoder": (_same("n_inner", "intermediate_size"), _starcoder),
}  # fmt: skip
_OF_CLASS: dict[str, tuple[Put, ...]] = {
    "BambaForCausalLM": (_bamba,),
    **dict.fromkeys(
        ("BailingHybridForCausalLM", "Dots3NoteForCausalLM", "Glm4MoeLiteForCausalLM",
         "GlmMoeDsaForCausalLM", "HYV3ForCausalLM", "HYV4ForCausalLM", "KimiLinearForCausalLM",
         "LagunaForCausalLM", "MiniMaxM3VLForCausalLM"), (_mlps_by_block,)),
}  # fmt: skip
