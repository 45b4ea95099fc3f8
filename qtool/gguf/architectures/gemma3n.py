"""Gemma 3n: inputs of each block, four streams that one is computed of (AltUp), and a path of low
rank beside the attention (LAuReL).

llama.cpp knows what differs between E2B and E4B, and takes the rest as both have it: 20 blocks with
keys of their own, the first ten of which keep the largest twentieth of the gates. Tokens of images
and sounds have no inputs of blocks in a checkpoint, and zeros here.
"""

from dataclasses import replace
from statistics import NormalDist
from typing import Any

from qtool.checkpoints.hf_config import Config, count, layer_types, number
from qtool.errors import SettingError
from qtool.formats.gguf_values import Kind, Value, array, f32
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.gemma4 import shares
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import (
    BLOCK,
    FOUR_NORMS,
    MLP,
    OUTER,
    QK_NORMS,
    Module,
    attention,
    block,
)
from qtool.gguf.architectures.row import GELU, Architecture
from qtool.gguf.architectures.sparse_keys import with_own

_OWN_KEYS = 20  # blocks, which the others read
_SPARSE = 10  # blocks that keep some gates
_SHARE = 0.95  # of the gates that is not kept
_QUANTILE = NormalDist().inv_cdf(_SHARE)
_EVERY = 5  # blocks, of which the last has no window
_FIXED = {
    "hidden_size_per_layer_input": 256, "laurel_rank": 64, "altup_num_inputs": 4,
    "altup_active_idx": 0, "altup_correct_scale": True, "final_logit_softcapping": 30.0,
}  # fmt: skip
_BARE = ((".weight", ""),)
_STREAMS, _ADDED = "altup_num_inputs", "streams added"
_ALTUP, _LAUREL = BLOCK + "altup.", BLOCK + "laurel."


def _added(part: str) -> Module:
    """A matrix for each stream but the first."""
    return Module(
        f"model.altup_{part}",
        each=(f"model.altup_{part}.{{i}}", _ADDED),
        shape=(_ADDED, "width", "width"),
    )


_MODULES = (
    *OUTER,
    Module("model.embed_tokens_per_layer", shape=("vocabulary", "inputs of all blocks"),
           padded="vocab_size_per_layer_input"),
    Module("model.per_layer_model_projection", shape=("inputs of all blocks", "width")),
    Module("model.per_layer_projection_norm", shape=("input of a block",)),
    _added("projections"),
    _added("unembed_projections"),
    *attention(),
    *block(*QK_NORMS, *FOUR_NORMS, *MLP, "post_per_layer_input_norm"),
    Module(BLOCK + "per_layer_input_gate", shape=("input of a block", "width")),
    Module(BLOCK + "per_layer_projection", shape=("width", "input of a block")),
    Module(_ALTUP + "correction_coefs", shape=("streams", "streams")),
    Module(_ALTUP + "correct_output_scale", ends=_BARE, shape=("width",)),
    Module(_ALTUP + "prediction_coefs", shape=("streams by streams", "streams")),
    Module(_ALTUP + "modality_router", shape=("streams", "width")),
    Module(_ALTUP + "router_norm"),
    Module(_LAUREL + "linear_left", shape=("rank of LAuReL", "width")),
    Module(_LAUREL + "linear_right", shape=("width", "rank of LAuReL")),
    Module(_LAUREL + "post_laurel_norm"),
)  # fmt: skip


def settle(config: dict[str, Any]) -> dict[str, Any]:
    """The settings as the class of transformers makes them of what config.json says."""
    blocks = count(config, "num_hidden_layers")
    if not layer_types(config):
        kinds = ["full" if (b + 1) % _EVERY == 0 else "sliding" for b in range(blocks)]
        config["layer_types"] = [f"{kind}_attention" for kind in kinds]
    inner = config.get("intermediate_size")
    if isinstance(inner, list):
        if len(inner) != blocks or not inner:
            raise SettingError("intermediate_size", f"is not a list of {blocks} numbers")
        config |= {"intermediate_size": inner[0], "other widths": {*map(str, inner[1:])}}
    if config.get("activation_sparsity_pattern") is None:
        sparse = _SPARSE if blocks > _SPARSE else 0
        config["activation_sparsity_pattern"] = [_SHARE] * sparse + [0.0] * (blocks - sparse)
    config[_ADDED] = count(config, _STREAMS) - 1
    return config


def _inner(config: Config) -> Value:
    each = [count(config, "intermediate_size")] * count(config, "num_hidden_layers")
    return array(Kind.INT32, each)


def _sparsity(config: Config) -> Value:
    """How many standard deviations above the mean a gate has to be."""
    given = config["activation_sparsity_pattern"]
    return array(Kind.FLOAT32, [f32(_QUANTILE if s else float("-inf")).value for s in given])


_KEYS = with_own(
    keys.USUAL,
    keys.WINDOW,
    keys.window_pattern(_EVERY, always=True),
    keys.nonzero("final_logit_softcapping", "final_logit_softcapping"),
    Key("feed_forward_length", "intermediate_size", _inner, listed=True),
    Key("altup.active_idx", "altup_active_idx"),
    Key("altup.num_inputs", _STREAMS),
    Key("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
    Key("attention.shared_kv_layers", "num_kv_shared_layers"),
    Key("activation_sparsity_scale", "", _sparsity, real=True, listed=True),
)


def _as_released(config: Config) -> str | None:
    for name, known in _FIXED.items():
        if (given := config.get(name)) != known:
            return f"{name} is {given}, and it takes {known}"
    if others := config.get("other widths", set()) - {str(config["intermediate_size"])}:
        return f"intermediate_size is {min(others)} in some blocks, and it has one for all"
    blocks = range(count(config, "num_hidden_layers"))
    sparse = [_SHARE if b < _SPARSE else 0.0 for b in blocks]
    if config["activation_sparsity_pattern"] != sparse:
        return f"activation_sparsity_pattern is not {_SHARE} in ten blocks and then zero"
    return None


def _keys_of_20_blocks(config: Config) -> str | None:
    kinds = layer_types(config)
    own = [kind for b, kind in enumerate(kinds) if not shares(config, b)]
    if len(kinds) > len(own) and own[-2:] != ["sliding_attention", "full_attention"]:
        return "blocks share keys of two that are not one with a window and one without behind it"
    if len(own) == min(len(kinds), _OWN_KEYS):
        return None
    return f"{len(own)} blocks have keys of their own, and it expects that of the first {_OWN_KEYS}"


def _one_vocabulary(config: Config) -> str | None:
    given = number(config, "vocab_size_per_layer_input")
    if given <= count(config, "vocab_size"):
        return None
    return f"vocab_size_per_layer_input is {given:.0f}, more than vocab_size"


# fmt: off
_ROW = Architecture(
    "gemma3n", _MODULES, _KEYS,
    {"vocab_size": 262400, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
     "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
     "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 512,
     "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 15, **_FIXED,
     "rope_theta": 1e6, "rope_local_base_freq": 1e4, "tie_word_embeddings": True},
    activations=GELU, rope=("default",), settle=settle,
    refuse=(_as_released, _keys_of_20_blocks, _one_vocabulary, limits.no_biases("attention_bias")),
    warn=(),
)
GEMMA3N: dict[str, Architecture] = {
    "Gemma3nForCausalLM": _ROW,
    "Gemma3nForConditionalGeneration": replace(_ROW, alone="Gemma3nForCausalLM"),
}
# fmt: on
