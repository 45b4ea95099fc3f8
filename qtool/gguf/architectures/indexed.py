"""Decoders whose attention sees a few tokens, chosen by an indexer (DeepSeek V3.2, GLM-5).

All else is attention to latents, as in DeepSeek V3. Blocks of GLM-5 may take what an earlier one
has chosen, and have no indexer then.
"""

from dataclasses import replace

from qtool.checkpoints.hf_config import Config, count
from qtool.errors import SettingError
from qtool.formats.gguf_values import Kind, Value, array
from qtool.gguf.architectures import limits, sparse_keys
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.latent_attention import (
    DEFAULTS,
    KEYS,
    LATENT_MODULES,
    REFUSE,
    scores,
)
from qtool.gguf.architectures.modules import BLOCK, Module, in_blocks, is_mtp
from qtool.gguf.architectures.mtp import AHEAD
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sparse import CHOICE_BIAS
from qtool.gguf.architectures.sparse_keys import NEXTN, blocks_with, with_own

_AHEAD = "num_nextn_predict_layers"
_ROTATED = 64  # elements of an indexer's keys that llama.cpp rotates together, at least
_AT = BLOCK + "self_attn.indexer."
INDEXER = (
    Module(_AT + "wq_b", shape=("indexer's queries", "query latents")),
    Module(_AT + "wk", shape=("indexer's key", "width")),
    Module(_AT + "k_norm", shape=("indexer's key",)),
    Module(_AT + "weights_proj", shape=("indexer's heads", "width")),
)


def _kinds(config: Config) -> list[str]:
    """Of each block, whether it has an indexer of its own: full or shared."""
    blocks = count(config, "num_hidden_layers")
    given = config.get("indexer_types")
    if given is None:
        pattern = config.get("index_topk_pattern")
        if pattern is None:
            every = max(config.get("index_topk_freq") or 1, 1)
            after = config.get("index_skip_topk_offset", 2)
            shared = [max(b - after + 1, 0) % every != 0 for b in range(blocks)]
            return ["shared" if one else "full" for one in shared]
        given = [{"F": "full", "S": "shared"}.get(str(one), one) for one in pattern]
    if not isinstance(given, list) or len(given) != blocks or {*given} - {"full", "shared"}:
        raise SettingError("indexer_types", f"is not a list of {blocks} words, each full or shared")
    return given


def is_full(config: Config, b: int) -> bool:
    return not is_mtp(config, b) and _kinds(config)[b] == "full"


def _full(config: Config) -> Value:
    return array(Kind.BOOL, [kind == "full" for kind in _kinds(config)])


def known_start(config: Config) -> str | None:
    if _kinds(config)[0] == "full":
        return None
    return "the first block is shared, and there is none before it to share with"


def whole_rotations(config: Config) -> str | None:
    given = count(config, "index_head_dim")
    if given % _ROTATED == 0:
        return None
    return f"index_head_dim is {given}, and it rotates keys of a multiple of {_ROTATED}"


_MTP = in_blocks(is_mtp, AHEAD)
INDEXER_COUNTS = (
    Key("attention.indexer.head_count", "index_n_heads"),
    Key("attention.indexer.key_length", "index_head_dim"),
    Key("attention.indexer.top_k", "index_topk"),
)
_TYPES = Key("attention.indexer.types", "indexer_types", _full, listed=True)
INDEXER_KEYS = (*INDEXER_COUNTS, _TYPES)
_KEYS = with_own(
    (*KEYS, scores(sparse_keys.SIGMOID)),
    blocks_with(_AHEAD),
    NEXTN,
    *INDEXER_COUNTS,
)
_REFUSE = (*REFUSE, whole_rotations, limits.dense_first)
_DEFAULTS = {
    **DEFAULTS, "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "index_topk": 2048, "index_head_dim": 128,
}  # fmt: skip
# What a block of multi-token prediction has may be left out: llama.cpp goes without.
_OF_GLM = (
    *in_blocks(is_full, INDEXER),
    *(
        replace(
            module, name=module.name.replace("indexer.", "indexer.ahead."), also=(module.name,),
            blocks=is_mtp, needed=False, called=f"indexer.{called}",
        )
        for module, called in zip(INDEXER, ("attn_q_b", "attn_k", "k_norm", "proj"), strict=True)
    ),
)  # fmt: skip

# fmt: off
INDEXED: dict[str, Architecture] = {
    "DeepseekV32ForCausalLM": Architecture(
        "deepseek32", (*LATENT_MODULES, *CHOICE_BIAS, *INDEXER, *_MTP), _KEYS,
        {**_DEFAULTS, "n_group": 8, "topk_group": 4, "index_n_heads": 64,
         "max_position_embeddings": 163840, "vocab_size": 129280},
        rope=("default", "yarn"), yarn=True, names="glm-dsa", refuse=_REFUSE, warn=(),
        mtp=_AHEAD,
    ),
    "GlmMoeDsaForCausalLM": Architecture(
        "glm-dsa", (*LATENT_MODULES, *CHOICE_BIAS, *_OF_GLM, *_MTP),
        (*_KEYS, _TYPES),
        {**_DEFAULTS, "n_group": 1, "topk_group": 1, "index_n_heads": 32, "q_lora_rank": 2048,
         "v_head_dim": 256, "qk_nope_head_dim": 192, "rms_norm_eps": 1e-5,
         "max_position_embeddings": 202752, "vocab_size": 154880},
        rope=("default",), refuse=(*_REFUSE, known_start, limits.whole_heads_rotated), warn=(),
        mtp=_AHEAD,
    ),
}
# fmt: on
