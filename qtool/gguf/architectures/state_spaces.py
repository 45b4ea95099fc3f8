"""Decoders with selective state spaces (Mamba 2) in most blocks: Nemotron-H and Granite 4.

    checkpoint  A_log, D [heads]     norm [heads * width of a head]
    gguf        [heads, 1]           [groups, heads * width of a head / groups]

Blocks of Nemotron-H have one part each: a state space, attention, an MLP or experts. Those of
Granite have an MLP or experts behind either; where none has a state space, they are Granite's of
old to llama.cpp.
"""

from dataclasses import replace

from qtool.errors import SourceError
from qtool.formats.gguf_values import Kind, Value, array, boolean, u32
from qtool.gguf.architectures import keys, limits, sparse_keys
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import (
    BLOCK,
    OUTER,
    TWO_NORMS,
    Module,
    Where,
    attention,
    block,
    in_blocks,
)
from qtool.gguf.architectures.row import LLAMA_ROPE, OWN_HEADS, Architecture
from qtool.gguf.architectures.shapes import SIZES
from qtool.gguf.architectures.sparse import GRANITE_EXPERTS
from qtool.gguf.architectures.sparse_keys import with_own
from qtool.gguf.cuts import Cut
from qtool.gguf.hf_config import Config, count, layer_types, number
from qtool.gguf.row_maps import KEY_PAIRS, QUERY_PAIRS
from qtool.gguf.value_maps import MINUS_EXP

STATE, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
_WORDS = {
    "mamba": STATE, "linear_attention": STATE, "attention": ATTENTION,
    "full_attention": ATTENTION, "mlp": MLP, "moe": EXPERTS,
}  # fmt: skip
_LONGEST = 1 << 20  # what llama.cpp is told of models that count no positions
_NO_END = ("none", "inf", "infinity")
_BARE = (("", ""),)


def _kinds(config: Config) -> str:
    """A letter for each block."""
    blocks = count(config, "num_hidden_layers")
    given = config.get("hybrid_override_pattern") or config.get("layers_block_type")
    if given is None:
        given = layer_types(config) or ["linear_attention"] * blocks
    found = given if isinstance(given, str) else "".join(_WORDS.get(str(k), "?") for k in given)
    if len(found) != blocks or {*found} - {*_WORDS.values()}:
        raise SourceError(f"config.json: the kinds of blocks are not those of {blocks} blocks")
    return found


def _is(kind: str) -> Where:
    return lambda config, b: _kinds(config)[b] == kind


def _by_block(setting: str, *kinds: str) -> Key:
    """A number in some blocks, zero in the others."""
    key = {"num_key_value_heads": "attention.head_count_kv"}.get(setting, "feed_forward_length")

    def make(config: Config) -> Value:
        number = count(config, setting)
        return array(Kind.INT32, [number if k in kinds else 0 for k in _kinds(config)])

    return Key(key, setting, make)


def _state_space(at: str) -> tuple[Module, ...]:
    return (
        Module(at + "in_proj", shape=("state, gates, steps", "width"), called="ssm_in"),
        Module(at + "conv1d", shape=("state and its keys", "state's taps"), squeezed=True,
               called="ssm_conv1d"),
        Module(at + "dt_bias", ends=((".bias", ""),), shape=("state's heads",), called="ssm_dt"),
        Module(at + "A_log", ends=_BARE, shape=("state's heads", "one"), folded=True,
               values=MINUS_EXP, called="ssm_a"),
        Module(at + "D", ends=_BARE, shape=("state's heads", "one"), folded=True, called="ssm_d"),
        Module(at + "norm", shape=("state's groups", "state of a group"), folded=True,
               called="ssm_norm"),
        Module(at + "out_proj", shape=("width", "state"), called="ssm_out"),
    )  # fmt: skip


def _no_limit(config: Config) -> str | None:
    given = config.get("time_step_limit") or [0.0, float("inf")]
    most = given[1] if isinstance(given, list) and len(given) > 1 else None
    most = most.get("__float__") if isinstance(most, dict) else most
    if number({"least": given[0]}, "least") <= 0 and str(most).lower() in _NO_END:
        return None
    return f"time_step_limit is {given}, and it limits nothing"


_INNER = Key("ssm.inner_size", "", lambda config: u32(SIZES["state"](config)))


def _sized(conv: str, state: str, groups: str, heads: str) -> tuple[Key, ...]:
    return (
        Key("ssm.conv_kernel", conv),
        Key("ssm.state_size", state),
        Key("ssm.group_count", groups),
        Key("ssm.time_step_rank", heads),
        _INNER,
    )


def has_experts(config: Config) -> bool:
    """Whether Nemotron-H has, which llama.cpp calls another architecture then."""
    return EXPERTS in _kinds(config)


def only_attends(config: Config) -> bool:
    return {*_kinds(config)} == {ATTENTION}


_AT = "backbone.layers.{b}."
_MIXER = _AT + "mixer."
_NEMOTRON = (
    Module("backbone.embeddings", shape=("vocabulary", "width")),
    Module("backbone.norm_f", shape=("width",)),
    OUTER[2],
    Module(_AT + "norm"),
    *in_blocks(_is(STATE), _state_space(_MIXER)),
    *in_blocks(
        _is(ATTENTION),
        (
            # In pairs, though nothing is rotated: products of queries and keys are the same.
            Module(_MIXER + "q_proj", QUERY_PAIRS),
            Module(_MIXER + "k_proj", KEY_PAIRS),
            Module(_MIXER + "v_proj"),
            Module(_MIXER + "o_proj"),
        ),
    ),
)


def _expert(part: str) -> Module:
    shape = ("moe's width", "inner of experts")
    return Module(
        f"{_MIXER}experts.{part}_proj",
        each=(f"{_MIXER}experts.{{i}}.{part}_proj", "n_routed_experts"),
        fused=(f"{_MIXER}experts.{part}_proj", None),
        shape=("experts", *(shape if part == "down" else reversed(shape))),
        called=f"ffn_{part}_exps",
    )


_SHARED = "inner of the shared expert"
_MLP = in_blocks(_is(MLP), tuple(Module(f"{_MIXER}{part}_proj") for part in ("up", "down")))
_NEMOTRON_EXPERTS = in_blocks(
    _is(EXPERTS),
    (
        Module(_MIXER + "gate", shape=("experts", "width")),
        Module(_MIXER + "gate.e_score_correction", ends=((".bias", "_bias"),), shape=("experts",)),
        _expert("up"),
        _expert("down"),
        Module(_MIXER + "shared_experts.up_proj", shape=(_SHARED, "width")),
        Module(_MIXER + "shared_experts.down_proj", shape=("width", _SHARED)),
        Module(_MIXER + "fc1_latent_proj", shape=("moe's width", "width"), asked="moe_latent_size"),
        Module(_MIXER + "fc2_latent_proj", shape=("width", "moe's width"), asked="moe_latent_size"),
    ),
)


def _one_group(config: Config) -> str | None:
    given = config.get("n_group") or 1
    return None if given == 1 else f"n_group is {given}, and it chooses among all experts"


def _no_mlp_beside(config: Config) -> str | None:
    if not {MLP, EXPERTS} <= {*_kinds(config)}:
        return None
    return "some blocks have an MLP and some have experts, and it knows one of the two"


_NEMOTRON_KEYS = with_own(
    (k for k in keys.USUAL if not k.name.startswith(("rope.", "expert_")) and k is not keys.RMS),
    Key("context_length", "", lambda _: u32(_LONGEST)),
    Key("rope.dimension_count", "", lambda config: u32(
        count(config, "hidden_size") // count(config, "num_attention_heads"))),
    Key("rope.scaling.finetuned", "", lambda _: boolean(False)),
    Key("attention.layer_norm_epsilon", "layer_norm_epsilon", real=True),
    keys.VOCABULARY,
    _by_block("num_key_value_heads", ATTENTION),
    *_sized("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads"),
)  # fmt: skip
_NEMOTRON_DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 128, "layer_norm_epsilon": 1e-5, "vocab_size": 131072,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    "conv_kernel": 4,
}  # fmt: skip
_NEMOTRON_REFUSE = (
    _no_limit, _no_mlp_beside, limits.no_biases("mamba_proj_bias", "use_bias"),
)  # fmt: skip


def _half(config: Config, module: Module, part: int) -> Module:
    inner = count(config, "shared_intermediate_size")
    return replace(module, cut=Cut(1, 2 * inner, part * inner, (part + 1) * inner))


def _gate(module: Module, config: Config) -> Module:
    return _half(config, module, 0)


def _up(module: Module, config: Config) -> Module:
    return _half(config, module, 1)


def _shared_mlp(suffix: str) -> tuple[Module, ...]:
    """One MLP, whose gate and up are one matrix; llama.cpp has three, under either of two names."""
    at, inner = BLOCK + "shared_mlp.", ("one", "inner of the shared MLP", "width")
    read, down = (at + "input_linear",), (at + "output_linear",)
    return (
        Module(f"{read[0]}.gate{suffix}", also=read, called=f"ffn_gate{suffix}", shape=inner,
               fit=_gate),
        Module(f"{read[0]}.up{suffix}", also=read, called=f"ffn_up{suffix}", shape=inner, fit=_up),
        Module(f"{down[0]}.down{suffix}", also=down, called=f"ffn_down{suffix}",
               shape=("width", "inner of the shared MLP")),
    )  # fmt: skip


def _routed(config: Config, b: int) -> bool:
    return bool(config.get("num_experts"))


def _shares(config: Config, b: int) -> bool:
    return _routed(config, b) and bool(config.get("shared_intermediate_size"))


def _plain(config: Config, b: int) -> bool:
    return not _routed(config, b)


_BEHIND = (
    *in_blocks(_plain, _shared_mlp("")),
    *in_blocks(_shares, _shared_mlp("_shexp")),
    *in_blocks(_routed, GRANITE_EXPERTS),
)
_GRANITE = (
    *OUTER,
    *block(*TWO_NORMS),
    *in_blocks(_is(ATTENTION), attention(pairs=True)),
    *in_blocks(_is(STATE), _state_space(BLOCK + "mamba.")),
    *_BEHIND,
)
_GRANITE_KEYS = with_own(
    keys.GRANITE, Key("expert_shared_feed_forward_length", "shared_intermediate_size"),
)  # fmt: skip


def _twice_as_wide(config: Config) -> str | None:
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
STATE_SPACES: dict[str, Architecture] = {
    "NemotronHForCausalLM": Architecture(
        "nemotron_h", (*_NEMOTRON, *_MLP),
        with_own(_NEMOTRON_KEYS, _by_block("intermediate_size", MLP)),
        _NEMOTRON_DEFAULTS, activations=("relu2",), rope=("default",), refuse=_NEMOTRON_REFUSE,
        warn=(),
    ),
    "NemotronHForCausalLM with experts": Architecture(
        "nemotron_h_moe", (*_NEMOTRON, *_NEMOTRON_EXPERTS),
        with_own(
            _NEMOTRON_KEYS,
            _by_block("moe_intermediate_size", EXPERTS),
            Key("expert_count", "n_routed_experts"),
            Key("expert_used_count", "num_experts_per_tok"),
            Key("expert_feed_forward_length", "moe_intermediate_size"),
            Key("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size"),
            sparse_keys.SHARED_COUNT, sparse_keys.ADD_UP, sparse_keys.SCALED,
            *sparse_keys.GROUPS,
            Key("moe_latent_size", "moe_latent_size"),
        ),
        {**_NEMOTRON_DEFAULTS, "n_routed_experts": 8, "n_shared_experts": 1,
         "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
         "num_experts_per_tok": 2, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
         "norm_topk_prob": True},
        activations=("relu2",), rope=("default",), refuse=(*_NEMOTRON_REFUSE, _one_group), warn=(),
    ),
    "GraniteMoeHybridForCausalLM": Architecture(
        "granitehybrid", _GRANITE,
        with_own(
            _GRANITE_KEYS,
            Key("context_length", "", lambda _: u32(_LONGEST)),
            Key("rope.scaling.finetuned", "", lambda _: boolean(False)),
            _by_block("num_key_value_heads", ATTENTION),
            *_sized("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads"),
        ),
        _GRANITE_DEFAULTS, rope=LLAMA_ROPE,
        refuse=(limits.plain_heads, limits.no_biases("mamba_proj_bias"), _no_limit,
                _twice_as_wide, _one_width, _positions(None)),
        warn=(),
    ),
    "GraniteMoeHybridForCausalLM of attention": Architecture(
        "granite", _GRANITE,
        with_own(_GRANITE_KEYS, Key("rope.scaling.finetuned", "", lambda _: boolean(True)),
                 _by_block("num_key_value_heads", ATTENTION),
                 *_sized("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads")),
        _GRANITE_DEFAULTS, rope=LLAMA_ROPE,
        refuse=(limits.plain_heads, _one_width, _positions("rope")),
    ),
}
# fmt: on
