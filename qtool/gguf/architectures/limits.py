"""What llama.cpp computes otherwise than a checkpoint asks for: a sentence each, None where it is
the same. Source: llama.cpp, src/models/."""

from collections.abc import Callable

from qtool.gguf.hf_config import Config, count, head_width, number, plain_head_width

Limit = Callable[[Config], str | None]


def experts_everywhere(config: Config) -> str | None:
    if not config.get("mlp_only_layers") and config.get("decoder_sparse_step", 1) == 1:
        return None
    return "some blocks have no experts, and it expects experts in each"


def chosen_add_up(to_one: bool) -> Limit:
    """Whether the weights of the chosen experts are scaled so that they add up to one."""

    def check(config: Config) -> str | None:
        given = bool(config.get("norm_topk_prob"))
        return None if given is to_one else f"norm_topk_prob is {given}, and it takes {to_one}"

    return check


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


def no_biases(config: Config) -> str | None:
    return "attention_bias is true, and it adds none" if config.get("attention_bias") else None


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


def yarn_of_usual_slope(config: Config) -> str | None:
    """It does not read where the slope of YaRN's frequencies lies, nor a factor of attention."""
    rope = config["rope_parameters"]["full_attention"]
    if rope["rope_type"] != "yarn":
        return None
    for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0), ("attention_factor", None)):
        if (rope.get(name) or usual) != usual:
            return f"{name} of the rope settings is {rope[name]}, and it does not read that"
    return None


def experts_once_they_start(config: Config) -> str | None:
    last = count(config, "num_hidden_layers") - 1
    for name, usual in (("moe_layer_end_index", (None, -1, last)), ("moe_layer_interval", (1,))):
        if config.get(name) not in usual:
            return f"{name} is {config[name]}, and it has experts in each block once they start"
    return None


def no_biases_at_all(config: Config) -> str | None:
    return "use_bias is true, and it adds none" if config.get("use_bias") else None
