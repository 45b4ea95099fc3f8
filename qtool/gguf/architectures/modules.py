"""Modules of a checkpoint as the table of architectures lists them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from qtool.checkpoints.hf_config import Config, count
from qtool.gguf.from_hf.cuts import Cut
from qtool.gguf.from_hf.row_maps import (
    FIRST_HALF,
    KEY_PAIRS,
    QUERY_PAIRS,
    SECOND_HALF,
    Factor,
    RowMap,
    Rows,
)
from qtool.gguf.from_hf.value_maps import ValueMap

Where = Callable[[Config, int], bool]  # whether a block is one of some
ENDS = ((".weight", ".weight"), (".bias", ".bias"))


@dataclass(frozen=True)
class Module:
    """A weight, and a bias if the checkpoint has one; {b} in a name is the number of the block."""

    name: str  # as checkpoints and TensorNameMap call it
    rows: RowMap | None = None
    # Which column of the checkpoint's tensor each of the file's is.
    columns: Rows | None = field(default=None, compare=False)
    add: int = 0  # to every weight: Gemma's norms multiply by 1 + weight
    values: ValueMap | None = None  # what llama.cpp stores in place of each number
    # That rows are multiplied by, one after another; each is for all, or for each row.
    factors: tuple[Factor, ...] = field(default=(), compare=False)
    needed: bool = True
    also: tuple[str, ...] = ()  # other names that checkpoints have for it
    within: str = ""  # the checkpoint's tensor that holds it, where that has no tensor of the name
    # The parts that are stacked, {i} is their number, and the setting that counts them;
    # {gate,up}: first the one, then the other. They are so in the tensor `within`, where it is set.
    each: tuple[str, str] | None = None
    # The same in one tensor, as transformers 5 has it in memory, and where the rows lie in it.
    fused: tuple[str, RowMap | None] | None = None
    shape: tuple[str, ...] = ()  # names of sizes in arch_shapes, where the name does not tell
    blocks: Where | None = None  # those that have it, where not all do
    unread: Where | None = None  # those where it may be stored, and nothing computes with it
    asked: str = ""  # the setting that says whether a model has it
    # How its tensors end here and in a checkpoint; the first is needed where the module is.
    ends: tuple[tuple[str, str], ...] = ENDS
    called: str = ""  # here, after the block's number, where TensorNameMap does not tell
    behind: str = ""  # the setting that counts blocks of another stack, which come before its own
    of_model: bool = False  # the model's own, though a block has it
    joined: int = 0  # the parts of `each` are one below the other: how many rows they have in all
    squeezed: bool = False  # the checkpoint has an axis of one in the middle
    # Which part of the checkpoint's tensor it is, before its rows change; of the fused one, if any.
    cut: Cut | None = None
    transposed: bool = False  # the checkpoint's matrix is transposed
    folded: bool = False  # the checkpoint's is a vector, whose numbers here are in rows
    padded: str = ""  # the setting that counts its rows in a checkpoint; the others are zeros
    whole: bool = False  # integers, of 64 bits in a checkpoint and 32 in a file
    packed: bool = False  # or in MXFP4, in a tensor of blocks and one of scales
    # The module with what follows from settings, as `rows`, `columns` and `cut` may.
    fit: Callable[["Module", Config], "Module"] | None = None

    @property
    def stored(self) -> tuple[str, ...]:
        """What a checkpoint may call the tensor that it is, or is in."""
        return (self.within,) if self.within else (self.name, *self.also)

    @property
    def rearranged(self) -> bool:
        """Whether the file's rows are not rows of the checkpoint's, one after another."""
        return self.rows is not None or self.columns is not None or self.folded or self.transposed

    @property
    def is_part(self) -> bool:
        """Whether the tensor that holds it holds others, or has it transposed."""
        return bool(self.within) and (self.rows is not None or self.cut is not None)

    def fitted(self, config: Config) -> "Module":
        """With what follows from the settings, which are complete."""
        return self if self.fit is None else self.fit(self, config)

    def in_block(self, config: Config, block: int) -> bool:
        """Whether this block may have it."""
        return self.blocks is None or self.blocks(config, block)

    def required(self, config: Config) -> bool:
        """Whether a model with these settings has it."""
        return self.needed and (not self.asked or bool(config.get(self.asked)))


def spelled(pattern: str) -> tuple[str, ...]:
    """The names that the pattern of `each` has for the parts of one number."""
    parts = ("gate", "up") if "{gate,up}" in pattern else ("",)
    return tuple(pattern.replace("{gate,up}", part) for part in parts)


BLOCK = "model.layers.{b}."
OUTER = (
    Module("model.embed_tokens"),
    Module("model.norm"),
    Module("lm_head", needed=False),
)
HEADS = ("lm_head", "embed_out", "head", "output", "transformer.output_layer")
EMBEDDINGS = (
    "model.embed_tokens",
    "gpt_neox.embed_in",
    "backbone.embeddings",
    "transformer.wte",
    "wte",
    "transformer.word_embeddings",
    "word_embeddings",
    "embed",
    "embed_tokens",
    "embeddings",
    "model.tok_embeddings",
    "model.word_embeddings",
    "transformer.embedding.word_embeddings",
)
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
FOUR_NORMS = (*TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")  # one for all heads


def block(*names: str) -> tuple[Module, ...]:
    return tuple(Module(BLOCK + name) for name in names)


def attention(*, pairs: bool = False) -> tuple[Module, ...]:
    """pairs: llama.cpp rotates neighbouring elements in this architecture."""
    return (
        Module(BLOCK + "self_attn.q_proj", QUERY_PAIRS if pairs else None),
        Module(BLOCK + "self_attn.k_proj", KEY_PAIRS if pairs else None),
        *block("self_attn.v_proj", "self_attn.o_proj"),
    )


def experts(
    prefix: str, gate: str, up: str, down: str, counted: str = "num_experts"
) -> tuple[Module, ...]:
    """One tensor per expert and matrix, or all in two; either way llama.cpp has three.

    counted: the setting that says how many there are.
    """
    fused = {
        gate: (BLOCK + "mlp.experts.gate_up_proj", replace(FIRST_HALF, groups=counted)),
        up: (BLOCK + "mlp.experts.gate_up_proj", replace(SECOND_HALF, groups=counted)),
        down: (BLOCK + "mlp.experts.down_proj", None),
    }
    return tuple(
        Module(
            f"{BLOCK}{prefix}.{name}",
            each=(f"{BLOCK}{prefix}.{{i}}.{name}", counted),
            fused=fused[name],
        )
        for name in (gate, up, down)
    )


def in_blocks(where: Where, modules: tuple[Module, ...]) -> tuple[Module, ...]:
    """The modules in some blocks only."""
    return tuple(replace(module, blocks=where) for module in modules)


def is_sparse(config: Config, b: int) -> bool:
    """Whether a block has experts, by mlp_layer_types."""
    return bool(config["mlp_layer_types"][b] == "sparse")


def is_dense(config: Config, b: int) -> bool:
    """Whether it has none."""
    return not is_sparse(config, b)


def has_window(config: Config, b: int) -> bool:
    """Whether a block's attention sees a window, by layer_types."""
    return bool(config["layer_types"][b] == "sliding_attention")


def before(setting: str) -> Where:
    """The leading blocks, as many as a setting says; none where it is silent."""
    return lambda config, b: b < (count(config, setting) if config.get(setting) else 0)


def since(setting: str) -> Where:
    """The others."""
    leading = before(setting)
    return lambda config, b: not leading(config, b)


def is_mtp(config: Config, b: int) -> bool:
    """Multi-token prediction: the blocks behind the others."""
    return b >= count(config, "num_hidden_layers")


def choice_bias(name: str) -> Module:
    """What is added to the scores of experts where they are chosen, and not where they weigh."""
    return Module(BLOCK + name, ends=((".bias", "_bias"),))


def head_norms() -> tuple[Module, ...]:
    """A norm for each head's queries and keys, stacked; only some StableLM have them."""
    return tuple(
        Module(
            f"{BLOCK}self_attn.{which}_layernorm",
            needed=False,
            each=(f"{BLOCK}self_attn.{which}_layernorm.norms.{{i}}", heads),
        )
        for which, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"))
    )


def wide_norms() -> tuple[Module, ...]:
    """A norm for the queries of all heads together, and one for the keys."""
    return (
        Module(BLOCK + QK_NORMS[0], shape=("heads",)),
        Module(BLOCK + QK_NORMS[1], shape=("key heads",)),
    )


def norms_plus_one(modules: tuple[Module, ...]) -> tuple[Module, ...]:
    return tuple(replace(m, add=1) if m.name.endswith("norm") else m for m in modules)


def neox(*names: str) -> tuple[Module, ...]:
    return tuple(Module("gpt_neox.layers.{b}." + name) for name in names)
