"""Granite 4: state spaces or attention, and behind either an MLP or experts.

Where no block has a state space, the model is one of the first Granite to llama.cpp.
"""

from dataclasses import replace

from qtool.checkpoints.hf_config import Config, count
from qtool.formats.gguf_values import Value, boolean, u32
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import (
    BLOCK,
    OUTER,
    TWO_NORMS,
    Module,
    attention,
    block,
    in_blocks,
)
from qtool.gguf.architectures.row import LLAMA_ROPE, OWN_HEADS, Architecture
from qtool.gguf.architectures.sizes import SIZES
from qtool.gguf.architectures.sparse import GRANITE_EXPERTS, SPARSE
from qtool.gguf.architectures.sparse_keys import with_own
from qtool.gguf.architectures.state_spaces import (
    ATTENTION,
    LONGEST,
    STATE,
    by_block,
    is_a,
    kinds_of,
    no_limit,
    sized,
    state_space,
)
from qtool.gguf.from_hf.row_maps import some_rows


def only_attends(config: Config) -> bool:
    return {*kinds_of(config)} == {ATTENTION}


def _half(config: Config, module: Module, part: int) -> Module:
    inner = count(config, "shared_intermediate_size")
    rows = some_rows(part * inner, (part + 1) * inner, 2 * inner, "shared_intermediate_size")
    return replace(module, rows=rows)


def _gate(module: Module, config: Config) -> Module:
    return _half(config, module, 0)


def _up(module: Module, config: Config) -> Module:
    return _half(config, module, 1)


def _shared_mlp(suffix: str) -> tuple[Module, ...]:
    """One MLP, whose gate and up are one matrix; llama.cpp has three, under either of two names."""
    at, inner = BLOCK + "shared_mlp.", ("inner of the shared MLP", "width")
    read, down = at + "input_linear", at + "output_linear"
    return (
        Module(f"{read}.gate{suffix}", within=read, called=f"ffn_gate{suffix}", shape=inner,
               fit=_gate),
        Module(f"{read}.up{suffix}", within=read, called=f"ffn_up{suffix}", shape=inner, fit=_up),
        Module(f"{down}.down{suffix}", within=down, called=f"ffn_down{suffix}",
               shape=("width", "inner of the shared MLP")),
    )  # fmt: skip


def _routed(config: Config, b: int) -> bool:
    return bool(config.get("num_experts"))


def shares(config: Config, b: int) -> bool:
    return _routed(config, b) and bool(config.get("shared_intermediate_size"))


def _plain(config: Config, b: int) -> bool:
    return not _routed(config, b)


_BEHIND = (
    *in_blocks(_plain, _shared_mlp("")),
    *in_blocks(shares, _shared_mlp("_shexp")),
    *in_blocks(_routed, GRANITE_EXPERTS),
)
_GRANITE = (
    *OUTER,
    *block(*TWO_NORMS),
    *in_blocks(is_a(ATTENTION), attention(pairs=True)),
    *in_blocks(is_a(STATE), state_space(BLOCK + "mamba.")),
    *_BEHIND,
)
_GRANITE_KEYS = with_own(
    keys.GRANITE, Key("expert_shared_feed_forward_length", "shared_intermediate_size"),
)  # fmt: skip


def shared_width(config: Config) -> Value | None:
    name = "shared_intermediate_size"
    return u32(count(config, name)) if config.get(name) else None


def twice_as_wide(config: Config) -> str | None:
    inner, width = SIZES["state"](config), count(config, "hidden_size")
    return (
        None if inner == 2 * width else f"state spaces are {inner} wide, and it takes {2 * width}"
    )


def _one_width(config: Config) -> str | None:
    one, other = config.get("intermediate_size"), config.get("shared_intermediate_size")
    if one == other or config.get("num_experts"):
        return None
    return f"shared_intermediate_size is {other}, and it takes intermediate_size ({one})"


def _positions(wanted: str | None) -> limits.Limit:
    def check(config: Config) -> str | None:
        given = config.get("position_embedding_type")
        if (given == "rope") is (wanted == "rope"):
            return None
        knows = "has rotations" if wanted else "knows no positions beside state spaces"
        return f"position_embedding_type is {given}, and it {knows}"

    return check


_GRANITE_DEFAULTS = {
    **OWN_HEADS, "num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
    "vocab_size": 32000, "shared_intermediate_size": 1024, "position_embedding_type": None,
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
}  # fmt: skip

# fmt: off
GRANITE_4: dict[str, Architecture] = {
    "GraniteMoeHybridForCausalLM": Architecture(
        "granitehybrid", _GRANITE,
        with_own(
            _GRANITE_KEYS,
            Key("context_length", "", lambda _: u32(LONGEST)),
            Key("rope.scaling.finetuned", "", lambda _: boolean(False)),
            by_block("num_key_value_heads", ATTENTION),
            *sized("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads"),
        ),
        _GRANITE_DEFAULTS, rope=LLAMA_ROPE,
        refuse=(limits.plain_heads, limits.no_biases("mamba_proj_bias"), no_limit,
                twice_as_wide, _one_width, _positions(None)),
        warn=(),
    ),
    "GraniteMoeHybridForCausalLM of attention": Architecture(
        "granite", _GRANITE,
        with_own(_GRANITE_KEYS, Key("rope.scaling.finetuned", "", lambda _: boolean(True)),
                 by_block("num_key_value_heads", ATTENTION),
                 *sized("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads")),
        _GRANITE_DEFAULTS, rope=LLAMA_ROPE,
        refuse=(limits.plain_heads, _one_width, _positions("rope")),
    ),
    "GraniteMoeSharedForCausalLM": replace(
        SPARSE["GraniteMoeForCausalLM"],
        modules=(*SPARSE["GraniteMoeForCausalLM"].modules,
                 *in_blocks(shares, _shared_mlp("_shexp"))),
        keys=with_own(
            SPARSE["GraniteMoeForCausalLM"].keys,
            Key("expert_shared_feed_forward_length", "shared_intermediate_size", shared_width),
        ),
        defaults={**SPARSE["GraniteMoeForCausalLM"].defaults, "shared_intermediate_size": 0},
    ),
}
# fmt: on
