"""Sizes of the newest decoders, as `shapes` has those of the others."""

from collections.abc import Callable, Mapping

from qtool.checkpoints.hf_config import Config, count


def product(*names: str) -> Callable[[Config], int]:
    """Of settings."""

    def size(config: Config) -> int:
        found = 1
        for name in names:
            found *= count(config, name)
        return found

    return size


def _gates(config: Config) -> int:
    """One for each head, or for each of its elements."""
    of_heads = config.get("gating") in (True, "per-head", "per_head")
    return count(config, "num_attention_heads") * (1 if of_heads else count(config, "head_dim"))


def _entries(config: Config) -> int:
    """Of DeepSeek V4, how many each token goes into."""
    return 2 if count(config, "compress_ratio") == 4 else 1


NEWEST: Mapping[str, Callable[[Config], int]] = {
    "key heads of values": product("num_key_value_heads", "v_head_dim"),
    "gates": _gates,
    "rotated keys": product("qk_rope_head_dim"),
    "number of local heads": product("swa_num_attention_heads"),
    "local latents": product("swa_kv_lora_rank"),
    "local plain keys": product("swa_qk_nope_head_dim"),
    "local head of values": product("swa_v_head_dim"),
    "local heads of values": product("swa_num_attention_heads", "swa_v_head_dim"),
    "local latents and rotated keys": lambda config: (
        count(config, "swa_kv_lora_rank") + count(config, "swa_qk_rope_head_dim")
    ),
    "local queries": lambda config: (
        count(config, "swa_num_attention_heads")
        * (count(config, "swa_qk_nope_head_dim") + count(config, "swa_qk_rope_head_dim"))
    ),
    "three": lambda _: 3,
    "pool": product("index_kpool"),
    "two of the streams, and streams by streams": lambda config: (
        (2 + count(config, "hc_mult")) * count(config, "hc_mult")
    ),
    "inner of the one that is shared": product("share_expert_dim"),
    "inner of dense blocks": product("dense_intermediate_size"),
    "inner of all that are shared": product("n_shared_experts", "intermediate_size"),
    "taps of n-grams": product("ple_conv_kernel_size"),
    "two": lambda _: 2,
    "tokens put together": product("compress_ratio"),
    "head, twice if few": lambda config: _entries(config) * count(config, "head_dim"),
    "indexer's key, twice if few": lambda config: (
        _entries(config) * count(config, "index_head_dim")
    ),
    "all groups' outputs": product("o_groups", "o_lora_rank"),
    "heads of a group": lambda config: (
        count(config, "num_attention_heads")
        * count(config, "head_dim")
        // count(config, "o_groups")
    ),
    "experts of a token": product("num_experts_per_tok"),
    "streams of mixing": product("hc_mult"),
    "two of the streams of mixing": lambda config: 2 * count(config, "hc_mult"),
    "all streams of mixing": product("hc_mult", "hidden_size"),
    "number of delta nets": product("linear_num_heads"),
    "head of a delta net": product("linear_head_dim"),
    "heads of delta nets": product("linear_num_heads", "linear_head_dim"),
    "residual streams": product("hc_count"),
    "all residual streams": product("hc_count", "hidden_size"),
    "rank of mixing": product("hc_lowrank"),
    "queries that choose": product("indexer_n_heads", "indexer_head_dim"),
    "key that is chosen by": product("indexer_head_dim"),
}
