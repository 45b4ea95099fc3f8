"""DeepSeek V4: one head of keys that are values too, windows in each block, and in most of them
tokens further back that are put together, four at a time or 128; between four residual streams.

    wo_a [groups * rank, heads * head / groups]   each row is of one group's heads
    ape  [tokens, keys]                           where a token is among those put together; of four
                                                  at a time, each entry is of eight, and keys double
    tid2eid [vocabulary, experts of a token]      in the first blocks, integers

Four at a time, an indexer chooses among the entries. Multi-token prediction is left out.
Released checkpoints and transformers name the same settings otherwise: compress_ratios and
layer_types, num_hash_layers and mlp_layer_types, rope_scaling and rope_parameters.compress.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qtool.checkpoints.hf_config import BY_BLOCK, Config, count, integers, number
from qtool.errors import SourceError
from qtool.formats.gguf_values import Kind, Value, array, u32
from qtool.gguf.architectures import limits, sparse_keys
from qtool.gguf.architectures.hy_v4 import BOUND, bounded
from qtool.gguf.architectures.indexed import INDEXER_COUNTS, whole_rotations
from qtool.gguf.architectures.keys import MOE, Key
from qtool.gguf.architectures.modules import ENDS, Module, before, in_blocks, since
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sparse_keys import gating, with_own
from qtool.messages.printable import in_json

_FUNCTION = 4  # the square root of a softplus
_STREAMS = 4  # that llama.cpp has
_FEW, _MANY = 4, 128  # tokens that are put together
_KINDS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": _FEW,
    "heavily_compressed_attention": _MANY,
}
_HASHED = 3  # blocks whose experts are told by the token, unless config.json says otherwise
_BARE = ((".weight", ""),)
_WEIGHT = ENDS[:1]
_BIAS = ENDS[1:]


def _settle(config: dict[str, Any]) -> dict[str, Any]:
    blocks = count(config, "num_hidden_layers")
    config["compress_ratios"] = _ratios(config, blocks)
    config[BY_BLOCK] = [{"compress_ratio": one} for one in config["compress_ratios"]]
    config.setdefault("num_hash_layers", _HASHED)
    mlps = config.get("mlp_layer_types")
    if mlps is not None:
        limits.listed(config, "mlp_layer_types", blocks)
        config["num_hash_layers"] = sum(one == "hash_moe" for one in mlps)
    config["intermediate_size"] = None  # of an MLP without experts, which no block has
    full = config["rope_parameters"]["full_attention"]
    own, main = full.get("compress"), full.get("main")
    if isinstance(own, Mapping) and isinstance(main, Mapping):
        config["rope_parameters"] = {
            "full_attention": {**own, "rope_theta": main.get("rope_theta")},
            "main": main,
        }
        config["compress_rope_theta"] = own.get("rope_theta")
    full = config["rope_parameters"]["full_attention"]
    if full.get("attention_factor") == 1.0:  # as of models that say none
        full["attention_factor"] = None
    if config.get("qk_rope_head_dim") is None:
        share = config["rope_parameters"]["full_attention"].get("partial_rotary_factor", 1 / 8)
        config["qk_rope_head_dim"] = int(count(config, "head_dim") * share)
    return config


def _ratios(config: Config, blocks: int) -> list[int]:
    """How many tokens each block puts together, 0 where it sees a window alone."""
    kinds = config.get("layer_types")
    if kinds is None:
        given = integers(config, "compress_ratios")
        usual = [_MANY if b < 2 or b % 2 == 0 else _FEW for b in range(blocks)]
        found = given or usual
        if len(found) < blocks:
            raise SourceError(
                f"config.json: compress_ratios has {len(found)} numbers, expected one for each of "
                f"{blocks} blocks"
            )
        return found
    limits.listed(config, "layer_types", blocks)
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise SourceError(
            f"config.json: layer_types names {in_json(unknown[0])}, expected {', '.join(_KINDS)}"
        )
    return [_KINDS[kind] for kind in kinds]


def _puts_together(config: Config, b: int) -> bool:
    return bool(config["compress_ratios"][b] != 0)


def _few(config: Config, b: int) -> bool:
    return bool(config["compress_ratios"][b] == _FEW)


_hashed, _learned = before("num_hash_layers"), since("num_hash_layers")


_AT = "layers.{b}."
_FFN = _AT + "ffn."


def _compressor(at: str, called: str, keys: str) -> tuple[Module, ...]:
    """What puts tokens together; keys: the size of one entry."""
    wide = f"{keys}, twice if few"
    return in_blocks(_puts_together, (
        Module(f"{at}.wkv", called=f"{called}_kv", shape=(wide, "width")),
        Module(f"{at}.wgate", called=f"{called}_gate", shape=(wide, "width")),
        Module(f"{at}.ape", called=f"{called}_ape", shape=("tokens put together", wide),
               ends=_BARE),
        Module(f"{at}.norm", called=f"{called}_norm", shape=(keys,)),
    ))  # fmt: skip


_INDEXER = in_blocks(_few, (
    Module(_AT + "attn.indexer.wq_b", called="indexer.attn_q_b",
           shape=("indexer's queries", "query latents")),
    Module(_AT + "attn.indexer.weights_proj", called="indexer.proj",
           shape=("indexer's heads", "width")),
    *_compressor(_AT + "attn.indexer.compressor", "indexer_compressor", "indexer's key"),
))  # fmt: skip


def _streams(at: str, called: str, *, head: bool = False) -> tuple[Module, ...]:
    rows = "streams of mixing" if head else "two of the streams, and streams by streams"
    parts = (("fn", (rows, "all streams of mixing")), ("base", (rows,)),
             ("scale", ("one" if head else "three",)))  # fmt: skip
    return tuple(
        Module(f"{at}_{part}", called=f"{called}_{part}", ends=_BARE, shape=shape,
               also=(f"hc_head.hc_{part}",) if head else ())
        for part, shape in parts
    )  # fmt: skip


def _experts(part: str, called: str, *shape: str) -> tuple[Module, Module]:
    return (
        Module(f"{_FFN}experts.{part}", called=f"ffn_{called}_exps",
               each=(f"{_FFN}experts.{{i}}.{part}", "n_routed_experts"),
               shape=("experts", *(one.replace("inner", "inner of experts") for one in shape))),
        Module(f"{_FFN}shared_experts.{part}", called=f"ffn_{called}_shexp",
               shape=tuple(one.replace("inner", "inner of shared experts") for one in shape)),
    )  # fmt: skip


_MODULES = (
    Module("embed", also=("embed_tokens",), called="token_embd", shape=("vocabulary", "width")),
    Module("norm", called="output_norm", shape=("width",)),
    Module("head", also=("lm_head",), called="output", shape=("vocabulary", "width"),
           needed=False),
    *_streams("hc_head", "output_hc", head=True),
    *_streams(_AT + "hc_attn", "hc_attn"),
    *_streams(_AT + "hc_ffn", "hc_ffn"),
    Module(_AT + "attn_norm", called="attn_norm", shape=("width",)),
    Module(_AT + "ffn_norm", called="ffn_norm", shape=("width",)),
    Module(_AT + "attn.attn_sink", called="attn_sinks", ends=_BARE, shape=("number of heads",)),
    Module(_AT + "attn.wq_a", called="attn_q_a", shape=("query latents", "width")),
    Module(_AT + "attn.q_norm", called="attn_q_a_norm", shape=("query latents",)),
    Module(_AT + "attn.wq_b", called="attn_q_b", shape=("heads", "query latents")),
    Module(_AT + "attn.wkv", called="attn_kv", shape=("head", "width")),
    # transformers saves it under the other name.
    Module(_AT + "attn.kv_norm", also=(_AT + "attn.norm",), called="attn_kv_a_norm",
           shape=("head",)),
    Module(_AT + "attn.wo_a", called="attn_output_a",
           shape=("all groups' outputs", "heads of a group")),
    Module(_AT + "attn.wo_b", called="attn_output_b", shape=("width", "all groups' outputs")),
    *_compressor(_AT + "attn.compressor", "attn_compressor", "head"),
    *_INDEXER,
    Module(_FFN + "gate", called="ffn_gate_inp", ends=_WEIGHT, shape=("experts", "width")),
    Module(_FFN + "gate.choice", within=_FFN + "gate", called="exp_probs_b", ends=_BIAS,
           shape=("experts", "one"), blocks=_learned),
    Module(_FFN + "gate.tid2eid", called="ffn_gate_tid2eid", ends=_BARE, whole=True,
           shape=("vocabulary", "experts of a token"), blocks=_hashed),
    *_experts("w1", "gate", "inner", "width"),
    *_experts("w3", "up", "inner", "width"),
    *_experts("w2", "down", "width", "inner"),
)  # fmt: skip


def _all_ratios(config: Config) -> Value:
    return array(Kind.INT32, config["compress_ratios"])


def _all_streams(config: Config) -> Value:
    return u32(count(config, "hidden_size") * count(config, "hc_mult"))


_KEYS = with_own(
    MOE,
    Key("expert_count", "n_routed_experts"),
    sparse_keys.SHARED_COUNT,
    sparse_keys.ADD_UP,
    sparse_keys.SCALED,
    gating(_FUNCTION),
    Key("rope.dimension_count", "qk_rope_head_dim"),
    Key("attention.q_lora_rank", "q_lora_rank"),
    Key("attention.sliding_window", "sliding_window"),
    BOUND,
    replace(BOUND, name="swiglu_clamp_shexp"),
    *INDEXER_COUNTS,
    Key("attention.output_group_count", "o_groups"),
    Key("attention.output_lora_rank", "o_lora_rank"),
    Key("attention.compress_ratios", "", _all_ratios, listed=True),
    Key("attention.compress_rope_freq_base", "compress_rope_theta", real=True),
    Key("hyper_connection.count", "hc_mult"),
    Key("hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters"),
    Key("hyper_connection.epsilon", "hc_eps", real=True),
    Key("hash_layer_count", "num_hash_layers"),
    Key("embedding_length_out", "", _all_streams),
)  # fmt: skip


def _known(config: Config) -> str | None:
    for name, expected in (("num_key_value_heads", 1), ("hc_mult", _STREAMS)):
        if config.get(name) != expected:
            return f"{name} is {config.get(name)}, and it takes {expected}"
    heads, groups = count(config, "num_attention_heads"), count(config, "o_groups")
    if heads % groups:
        return f"{heads} heads are no multiple of o_groups ({groups})"
    return None


def _known_ratios(config: Config) -> str | None:
    rates = config.get("compress_rates") or {}
    odd = [one for one in config["compress_ratios"] if one not in _KINDS.values()]
    for kind, own in rates.items() if isinstance(rates, Mapping) else ():
        odd += [own] if kind in _KINDS and own != _KINDS[kind] else []
    if not odd:
        return None
    return f"{odd[0]} tokens are put together, and it knows {_FEW} and {_MANY}"


def _some_chosen(config: Config) -> str | None:
    if _FEW in config["compress_ratios"][: count(config, "num_hidden_layers")]:
        return None
    return f"no block puts {_FEW} tokens together, and it stops where none does"


def _hashed_first(config: Config) -> str | None:
    blocks = range(count(config, "num_hidden_layers"))
    usual = ["hash_moe" if _hashed(config, b) else "moe" for b in blocks]
    if config.get("mlp_layer_types") in (None, usual):
        return None
    return "blocks whose experts the token tells are not the first, and it takes them to be"


def _known_rope(config: Config) -> str | None:
    """Of its windows nothing is scaled, and of the others only by YaRN's ramp."""
    rope, main = config["rope_parameters"]["full_attention"], config["rope_parameters"].get("main")
    if main is not None and main.get("rope_type", "default") != "default":
        return f"blocks with windows alone have rope scaling {main['rope_type']}, and it takes none"
    own = config["rope_parameters"]["full_attention"].get("partial_rotary_factor")
    for share in (own, None if main is None else main.get("partial_rotary_factor")):
        width = count(config, "head_dim")
        rotated = count(config, "qk_rope_head_dim")
        if share is not None and int(width * number({"share": share}, "share")) != rotated:
            return f"{share} of {width} is rotated, and qk_rope_head_dim is {rotated}"
    if rope["rope_type"] == "yarn" and rope.get("truncate", True) is not True:
        return "truncate of the rope settings is false, and it rounds where YaRN's ramp lies"
    if rope["rope_type"] == "yarn" and main is not None and "attention_factor" not in rope:
        return "YaRN multiplies attention with a factor, and it with none"
    return limits.yarn_of_usual_ramp(config)


DEEPSEEK_V4: dict[str, Architecture] = {
    "DeepseekV4ForCausalLM": Architecture(
        "deepseek4", _MODULES, _KEYS,
        {"num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024, "n_routed_experts": 256,
         "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 2048,
         "routed_scaling_factor": 1.5, "norm_topk_prob": True, 
         "compress_rope_theta": 160000.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
         "swiglu_limit": 10.0, "sliding_window": 128, "o_groups": 8, "o_lora_rank": 1024,
         "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "rms_norm_eps": 1e-6,
         "rope_theta": 1e4, "max_position_embeddings": 1048576, "vocab_size": 129280},
        rope=("default", "yarn"), yarn=True, names="glm-dsa", needs_head=True, bare=True,
        settle=_settle,
        refuse=(_known, _known_ratios, _some_chosen, _hashed_first, _known_rope, bounded,
                whole_rotations,
                limits.chosen_add_up(True), limits.no_biases("mlp_bias"),
                limits.taken(("scoring_func", "sqrtsoftplus"), ("topk_method", "noaux_tc"))),
        warn=(),
    ),
}  # fmt: skip
