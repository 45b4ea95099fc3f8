"""What llama.cpp computes otherwise than a checkpoint asks for: a sentence each, None where it is
the same. Source: llama.cpp, src/models/."""

import json
import math
from collections.abc import Callable
from typing import Any

from qtool.checkpoints.hf_config import (
    Config,
    count,
    head_width,
    layer_types,
    number,
    plain_head_width,
)
from qtool.errors import SettingError, SourceError
from qtool.messages.printable import in_json

Limit = Callable[[Config], str | None]
_SOME_DENSE = "some blocks have no experts, and it expects experts in each"


def experts_everywhere(config: Config) -> str | None:
    if not config.get("mlp_only_layers") and config.get("decoder_sparse_step", 1) == 1:
        return None
    return _SOME_DENSE


def chosen_add_up(to_one: bool) -> Limit:
    """Whether the weights of the chosen experts are scaled so that they add up to one."""

    def check(config: Config) -> str | None:
        given = bool(config.get("norm_topk_prob"))
        if given is to_one:
            return None
        return f"norm_topk_prob is {in_json(given)}, and it takes {in_json(to_one)}"

    return check


def listed(config: Config, name: str, length: int) -> None:
    """SourceError unless a setting is a list as long as this."""
    given = config.get(name)
    if not isinstance(given, list) or len(given) != length:
        raise SettingError(name, f"is {str(given)[:80]}, expected {length} numbers")


def tied(config: Config) -> str | None:
    if config.get("tie_word_embeddings"):
        return None
    return "the head is not tied to the embedding, and it always takes the embedding"


def known_scale(layers_of_27b: int) -> Limit:
    """llama.cpp knows the two scales that Gemma has: by head, and by width / heads for 27B."""

    def check(config: Config) -> str | None:
        given = config.get("query_pre_attn_scalar")
        large = config.get("num_hidden_layers") == layers_of_27b
        known = plain_head_width(config) if large else head_width(config)
        if given is None or given == known:
            return None
        return f"query_pre_attn_scalar is {given}, and it takes {known}"

    return check


def rope_but_each_fourth(config: Config) -> str | None:
    given = config.get("no_rope_layers")
    usual = [int((i + 1) % 4 != 0) for i in range(count(config, "num_hidden_layers"))]
    if given == usual or (given is None and config.get("no_rope_layer_interval", 4) == 4):
        return None
    return "no_rope_layers is not each fourth block, which it takes for granted"


def no_softcap(config: Config) -> str | None:
    given = config.get("attn_logit_softcapping")
    return None if given is None else f"attn_logit_softcapping is {given}, and it applies none"


def usual_yarn(config: Config) -> str | None:
    """llama.cpp reads neither the ramp of YaRN's frequencies nor its factor of attention."""
    rope = config["rope_parameters"]["full_attention"]
    if rope["rope_type"] != "yarn" or not rope.get("factor"):
        return None
    if _ramp(config, rope) != _ramp(config, {**rope, "beta_fast": 32.0, "beta_slow": 1.0}):
        return (
            f"YaRN goes from beta_fast {rope.get('beta_fast')} to beta_slow "
            f"{rope.get('beta_slow')}, and it from 32 to 1"
        )
    usual = max(1.0, 0.1 * math.log(max(1.0, number(rope, "factor"))) + 1.0)
    given = rope.get("attention_factor") or usual
    if not rope.get("attention_factor") and rope.get("mscale") and rope.get("mscale_all_dim"):
        given = None
    if given is not None and math.isclose(given, usual, rel_tol=1e-6):
        return None
    return f"YaRN multiplies attention with a factor of its own, and it with {usual:.4g}"


def _ramp(config: Config, rope: Config) -> tuple[float, float]:
    """Between which pairs of elements frequencies go over into slower ones."""
    width = head_width(config) * (rope.get("partial_rotary_factor") or 1.0)
    length, base = number(rope, "original_max_position_embeddings"), number(rope, "rope_theta")
    if not (length > 0 and base > 1):
        raise SourceError(f"config.json: YaRN of {length} tokens and rope_theta {base}")

    def pair(rotations: float) -> float:
        return width * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    betas = [rope.get(name) or usual for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0))]
    fast, slow = (number({"beta": beta}, "beta") for beta in betas)
    if not (fast > 0 and slow > 0):
        raise SourceError(f"config.json: YaRN from beta_fast {fast} to beta_slow {slow}")
    low, high = pair(fast), pair(slow)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, width - 1)


def plain_heads(config: Config) -> str | None:
    if head_width(config) == plain_head_width(config):
        return None
    return f"head_dim is {config['head_dim']}, and it takes width / heads"


def no_window(config: Config) -> str | None:
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return None
    if count(config, "sliding_window") >= count(config, "max_position_embeddings"):
        return None
    return (
        f"attention looks back {config['sliding_window']} tokens, which llama.cpp does not know of "
        "this architecture: longer texts give other results there"
    )


def no_dynamic_rope(config: Config) -> str | None:
    if config["rope_parameters"]["full_attention"]["rope_type"] != "dynamic":
        return None
    return "llama.cpp does no dynamic rope scaling: texts beyond the trained length suffer"


def as_many_key_heads(config: Config) -> str | None:
    given = count(config, "num_key_value_heads")
    if given == count(config, "num_attention_heads"):
        return None
    return f"there are {given} heads of keys, and it takes as many as heads"


def no_clip(config: Config) -> str | None:
    given = config.get("clip_qkv")
    return None if given is None else f"clip_qkv is {given}, and it clips nothing"


def no_output_bias(config: Config) -> str | None:
    if not config.get("attention_bias"):
        return None
    return "attention_bias is true, and it has no bias behind the attention"


def one_state(config: Config) -> str | None:
    """Delta nets: of each head's keys by its values, and whole numbers of values to a key."""
    keys, values = (count(config, f"linear_{which}_head_dim") for which in ("key", "value"))
    if keys != values:
        return f"linear_key_head_dim is {keys} and linear_value_head_dim {values}, and it has one"
    heads, more = (count(config, f"linear_num_{which}_heads") for which in ("key", "value"))
    if more % heads:
        return f"linear_num_value_heads is {more}, no multiple of linear_num_key_heads ({heads})"
    return None


def one_epsilon(config: Config) -> str | None:
    if number(config, "rms_norm_eps") == 1e-6:
        return None
    return (
        f"rms_norm_eps is {config['rms_norm_eps']}, which llama.cpp adds to the norms of linear "
        "attention's queries and keys too, where the model adds 1e-6: results differ a little"
    )


def yarn_of_usual_ramp(config: Config) -> str | None:
    """It does not read where the ramp of YaRN's frequencies lies, nor a factor of attention."""
    rope = config["rope_parameters"]["full_attention"]
    if rope["rope_type"] != "yarn":
        return None
    for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0), ("attention_factor", None)):
        if (rope.get(name) or usual) != usual:
            return (
                f"{name} of the rope settings is {in_json(rope[name])}, and it does not read that"
            )
    return None


def experts_once_they_start(config: Config) -> str | None:
    last = count(config, "num_hidden_layers") - 1
    for name, usual in (("moe_layer_end_index", (None, -1, last)), ("moe_layer_interval", (1,))):
        if config.get(name) not in usual:
            said = in_json(config[name])
            return f"{name} is {said}, and it has experts in each block once they start"
    return None


def no_biases(*settings: str) -> Limit:
    """For biases that no tensor of llama.cpp's architecture is."""

    def check(config: Config) -> str | None:
        given = [name for name in settings if config.get(name)]
        return f"{given[0]} is true, and it adds no such biases" if given else None

    return check


def mscale_of_one(config: Config) -> str | None:
    given = config["rope_parameters"]["full_attention"].get("mscale", 1.0)
    return None if given == 1.0 else f"mscale of the rope settings is {given}, and it takes 1.0"


def needs(setting: str) -> Limit:
    def check(config: Config) -> str | None:
        return None if config.get(setting) else f"{setting} is false, and it asks for those biases"

    return check


def not_tied(config: Config) -> str | None:
    if not config.get("tie_word_embeddings"):
        return None
    return "the head is tied to the embedding, and it asks for one of its own, with a bias"


def no_head_norms(config: Config) -> str | None:
    return "qk_layernorm is true, and it has no such norms" if config.get("qk_layernorm") else None


def head_norms_of_64_blocks(config: Config) -> str | None:
    """llama.cpp looks for Command R+'s norms by the number of blocks."""
    given, blocks = bool(config.get("use_qk_norm")), count(config, "num_hidden_layers")
    if given is (blocks >= 64):
        return None
    return (
        f"use_qk_norm is {str(given).lower()} in a model of {blocks} blocks, and it expects those "
        "norms in models of 64 blocks and more, and only there"
    )


def windows_of_64_blocks(config: Config) -> str | None:
    """llama.cpp tells EXAONE 4's models by the number of blocks, too."""
    window, blocks = config.get("sliding_window"), count(config, "num_hidden_layers")
    if (window is not None) is (blocks == 64):
        return None
    return (
        f"sliding_window is {json.dumps(window)} in a model of {blocks} blocks, and it looks "
        "through windows in models of 64 blocks, and only there"
    )


def one_rotation(config: Config) -> str | None:
    full, local = (config["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    if local["rope_type"] == "default" and local["rope_theta"] == full["rope_theta"]:
        return None
    return (
        f"blocks with windows rotate with rope_theta {local['rope_theta']} and scaling "
        f"{local['rope_type']}, and it takes {full['rope_theta']} of the others and no scaling"
    )


def whole_heads_rotated(config: Config) -> str | None:
    share = config["rope_parameters"]["full_attention"].get("partial_rotary_factor", 1.0)
    return None if share == 1.0 else f"it rotates {share} of a head, and transformers all of it"


def alpha_of_dynamic_rope(config: Config) -> str | None:
    rope = config["rope_parameters"]["full_attention"]
    if rope["rope_type"] != "dynamic" or rope.get("alpha"):
        return None
    return "its dynamic rope scaling has no alpha, and follows the text"


def dense_first(config: Config) -> str | None:
    given, dense = config.get("mlp_layer_types"), config.get("first_k_dense_replace") or 0
    blocks = range(count(config, "num_hidden_layers"))
    if given is None or given == ["dense" if b < dense else "sparse" for b in blocks]:
        return None
    return f"mlp_layer_types is not {dense} blocks without experts and the others with some"


def no_dense_blocks(config: Config) -> str | None:
    return _SOME_DENSE if "dense" in (config.get("mlp_layer_types") or []) else None


def some_windows(config: Config) -> str | None:
    if config.get("sliding_window") is None or "sliding_attention" in layer_types(config):
        return None
    return "no block looks through a window, and it asks for some where sliding_window is said"


def one_group(config: Config) -> str | None:
    given = config.get("n_group") or 1
    return None if given == 1 else f"n_group is {given}, and it chooses among all experts"


def taken(*settings: tuple[str, Any]) -> Limit:
    """Settings that it takes for granted."""

    def check(config: Config) -> str | None:
        for name, usual in settings:
            if config.get(name, usual) != usual:
                return f"{name} is {in_json(config[name])}, and it takes {in_json(usual)}"
        return None

    return check
